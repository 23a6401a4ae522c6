"""A small transformer under all three decisions, in one file: JAX, optax and Syncopate alone.

    python examples/single_file.py

Four workers, simulated on one device, read Python's manual byte by byte. A coordinated order says
which windows come next, an echo plan says when they are used again, and QSR says when the workers
average. Each decision is one line, with the plain choice as a comment below it.
"""

from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncopate import local_opt, ordering

WORKERS, UNITS, BATCH, CONTEXT = 4, 256, 8, 64  # UNITS windows per worker, BATCH in its step
WIDTH, HEADS, LAYERS, STEPS, SKETCH = 64, 4, 2, 640, 1024
RATE = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, STEPS, 1e-4)

ORDER = ordering.cd_grab(UNITS, units_per_step=BATCH, gathers="sync")
# ORDER = ordering.random_reshuffling(UNITS, units_per_step=BATCH)
SYNCS = local_opt.qsr(RATE, total_steps=STEPS, alpha=0.006, h_base=4)
# SYNCS = local_opt.constant(1, total_steps=STEPS)
LOADS = ordering.echo.fixed(2, total_steps=STEPS)
# LOADS = ordering.echo.fixed(1, total_steps=STEPS)


def windows(count):
    """uint8[count, CONTEXT + 1], cut from the texts of `help("topics")`."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    return np.frombuffer(text, np.uint8)[: count * (CONTEXT + 1)].reshape(count, -1)


def init(key):
    normal = jax.nn.initializers.normal(0.02)
    shapes = {"embed": (256, WIDTH), "place": (CONTEXT, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"qkv{i}": (WIDTH, 3 * WIDTH), f"out{i}": (WIDTH, WIDTH)}
        shapes |= {f"up{i}": (WIDTH, 4 * WIDTH), f"down{i}": (4 * WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def losses(params, batch, key):
    """float[B], the mean loss of each window."""
    del key  # of dropout, if there were any
    tokens = batch.astype(jnp.int32)
    x = params["embed"][tokens[:, :-1]] + params["place"][None]
    for i in range(LAYERS):
        qkv = jax.nn.standardize(x) @ params[f"qkv{i}"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ params[f"out{i}"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ params[f"up{i}"]) @ params[f"down{i}"]
    logits = jax.nn.standardize(x) @ params["embed"].T
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return each.mean(axis=1)


ROUNDS = local_opt.local_rounds(optax.adamw(RATE))
GRADIENTS = ordering.sketched_grads(losses, jax.random.key(7), size=SKETCH)  # and a sketch of each


def fresh(params, state, batch, key):
    """One worker's step on new windows, and a sketch of the gradient of each for the order."""
    loss, grads, sketches = GRADIENTS(params, batch, key=key)
    updates, state = ROUNDS.update(grads, state, params)
    return optax.apply_updates(params, updates), state, sketches, loss.mean()


def again(params, state, batch, key):
    """One worker's step on windows that it has used before."""
    grads = jax.grad(lambda p: losses(p, batch, key).mean())(params)
    updates, state = ROUNDS.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def main():
    def workers(f, axes=0):
        return jax.jit(jax.vmap(f, in_axes=axes, axis_name="worker"))

    step, repeat = workers(fresh, (0, 0, 0, None)), workers(again, (0, 0, 0, None))
    sync, key = workers(ROUNDS.sync), jax.random.key(1)
    data, held_out = np.split(windows(WORKERS * UNITS + 256), [WORKERS * UNITS])
    params = local_opt.replicate(init(jax.random.key(0)), WORKERS)
    state = workers(ROUNDS.init)(params)
    print(f"{SYNCS.rounds} syncs and {LOADS.loads} loads in {STEPS} steps")
    like = jnp.zeros(SKETCH)
    reads = ordering.data.read_epochs(data, ORDER, key, like=like, workers=WORKERS)
    batches = ordering.echo.repeat(reads, LOADS)
    for batch in batches:
        if batches.fresh:
            params, state, sketches, loss = step(params, state, batch, key)
            batches.observe(sketches)
        else:
            params, state = repeat(params, state, batch, key)
        if SYNCS.syncs_after(batches.step):
            params, state = sync(params, state)
            batches.sync()  # the orders exchange their sketches
        if (done := batches.step + 1) % 64 == 0:
            test = losses(local_opt.mean_over_workers(params), held_out, key).mean()
            print(f"step {done}: train {loss.mean():.3f}, held out {test:.3f}", flush=True)
    return local_opt.mean_over_workers(params)


if __name__ == "__main__":
    main()
