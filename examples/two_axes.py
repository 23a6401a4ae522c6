"""A small decoder whose two workers are four devices each, on the mesh that `jax.make_mesh` makes.

QSR says when workers average their weights. Pair balance orders the units of each worker.

XLA_FLAGS=--xla_force_host_platform_device_count=8 PJRT_NPROC=16 python examples/two_axes.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncopate import local_opt, ordering

WORKERS, UNITS, STEPS = 2, 32, 48  # every worker has 32 units of 8 sequences
text = np.frombuffer(("to be or not to be that is the question " * 900).encode(), np.uint8)
tokens = (text[: WORKERS * UNITS * 8 * 17] % 32).astype("i").reshape(-1, 17)
SHAPES = {
    "embed": (32, 64),
    "place": (16, 64),
    "q": (64, 64),
    "k": (64, 64),
    "v": (64, 64),
    "in": (64, 256),
    "out": (256, 64),
}
rate = optax.cosine_decay_schedule(1e-2, STEPS)
plan = local_opt.qsr(rate, total_steps=STEPS, alpha=2e-2, h_base=2)
rounds = local_opt.local_rounds(optax.adam(rate))
order = ordering.pair_balance(UNITS, units_per_step=1)


def logits_of(w, ids):  # a decoder of one block
    x = w["embed"].at[ids].get(out_sharding=jax.P("data")) + w["place"][None]
    q, k, v = (jnp.einsum("btd,de->bte", x, w[n])[:, :, None] for n in ("q", "k", "v"))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0]
    return (x + jax.nn.gelu(x @ w["in"]) @ w["out"]) @ w["embed"].T


def loss(w, ids, key):  # the mean of a unit
    targets = jax.nn.one_hot(ids[:, 1:], 32)
    return optax.softmax_cross_entropy(logits_of(w, ids[:, :-1]), targets).mean()


def step(w, state, orders, tokens):  # of one worker; each of its devices has its tokens
    unit = orders.current[orders.position]
    batch = jax.lax.dynamic_slice_in_dim(tokens, 8 * unit, 8)
    batch = jax.reshard(batch, jax.P("data"))
    value, grads, rows = ordering.microbatch_grads(loss)(w, batch, key=jax.random.key(0))
    updates, state = rounds.update(grads, state, w)
    return optax.apply_updates(w, updates), state, order.observe(orders, rows), value


def main():
    keys, means = iter(jax.random.split(jax.random.key(0), len(SHAPES))), []
    w = {name: jax.random.normal(next(keys), s) * s[0] ** -0.5 for name, s in SHAPES.items()}
    with jax.set_mesh(jax.make_mesh((WORKERS, 4), ("worker", "data"))):
        specs = {"in_specs": ("worker", "worker", "worker", "batch"), "out_specs": "worker"}
        run = jax.jit(local_opt.map_workers(step, **specs))
        specs = {"in_specs": "worker", "out_specs": "worker"}
        sync = jax.jit(local_opt.map_workers(rounds.sync, **specs))
        following = jax.jit(local_opt.map_workers(order.next_epoch, **specs))
        init = local_opt.map_workers(order.init, in_specs=("key", "replicated"), out_specs="worker")
        orders = init(jax.random.key(1), w)
        w, state = local_opt.replicate((w, rounds.init(w)))
        for t in range(STEPS):
            w, state, orders, value = run(w, state, orders, tokens)
            if t % UNITS == UNITS - 1:
                orders = following(orders)
            if plan.syncs_after(t):
                w, state = jax.block_until_ready(sync(w, state))
                means.append(float(value.mean()))
                print(t, means[-1])
        return means


if __name__ == "__main__":
    main()
