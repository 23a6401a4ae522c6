"""How much of the gain of exact gradients orders on sketches keep, at fixed parameters.

    python -m benchmarks.sketch_gains --data_dir=DIR

A language model of `--task=wikitext2_small` is trained for some epochs. Then its parameters stay,
and CD-GraB orders the windows of 64 workers for five epochs, by exact gradients g_i or by sketches
of them. Let D be the scale of Adam (`second_moment_scale`). Everything else follows from the
centred Gram matrices G of g_i . g_j, A of g_i . D g_j, and S of D g_i . D g_j, over all units.

The first table is of parameters: the share of the squared norm; the effective rank tr(G_l)^2 /
tr(G_l^2); and the share of the inner products of different units, tr(G_l G) / tr(G^2). A parameter
with much of the first and little of the last is mostly noise for a sketch.

The second table is of orders: the mean of |v_t|^2 over the prefix sums v_t of an epoch, relative to
random orders. It is by G, by A, and by v^T A^2 v, in which the loss moves. In brackets is the part
of the reduction by exact gradients that is kept.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from scipy.linalg import blas

import ordering
from experiments.data import wikitext

WORKERS, EPOCHS, STARTS = 64, 5, 2

ADAMW = optax.adamw(2e-3, weight_decay=0.0)


def trained(model, data, units, epochs):
    """(parameters, optimizer's state) after some epochs of AdamW in random orders."""
    params = model.init(jax.random.key(0))

    def step(carry, chosen):
        params, state = carry
        batch = jax.tree.map(lambda x: x[chosen], data)
        gradient = jax.grad(lambda p: jnp.mean(model.loss(p, batch, jax.random.key(0))))(params)
        updates, state = ADAMW.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    rng, first = np.random.default_rng(0), units * np.arange(WORKERS)[:, None]
    steps = np.concatenate([(shuffled(rng, units) + first).T for _ in range(epochs)])
    carry, _ = jax.jit(lambda c: jax.lax.scan(step, c, steps))((params, ADAMW.init(params)))
    return carry


def shuffled(rng, units):
    return np.stack([rng.permutation(units) for _ in range(WORKERS)])


def gradients_of(model, params, data, units):
    """{path: float32[N, ...]} of all units."""
    one = jax.jit(
        lambda b: ordering.per_example_grads(model.loss)(params, b, key=jax.random.key(0))[2]
    )
    grads = {}
    for batch in batches(data, units):
        for path, leaf in jax.tree_util.tree_leaves_with_path(one(batch)):
            grads.setdefault(path, []).append(np.asarray(leaf))
    return {path: np.concatenate(leaves) for path, leaves in grads.items()}


def batches(data, units):
    for i in range(0, WORKERS * units, units):
        yield jax.tree.map(lambda x, i=i: x[i : i + units], data)


def group_of(path):
    return path[0].key.rstrip("0123456789")


def gram(rows):
    """float32[N, N] of rows around their mean."""
    rows = rows.reshape(len(rows), -1)
    upper = np.triu(blas.ssyrk(1.0, np.ascontiguousarray(rows).T, trans=1))
    products = upper + np.triu(upper, 1).T
    mean = products.mean(0)
    return products - mean - mean[:, None] + mean.mean()


def sketches(model, params, data, units, size, scale):
    """float32[N, k], the sketches of all units, from the backward pass."""
    gradients = ordering.sketched_grads(model.loss, jax.random.key(0), size=size)
    one = jax.jit(lambda b: gradients(params, b, key=jax.random.key(0), scale=scale)[2])
    return np.concatenate([np.asarray(one(batch)) for batch in batches(data, units)])


def scales(model, params, state, data, size):
    """{how: scale}: none, that of `second_moment_scale`, and one with a number per table row."""
    batch = next(batches(data, 1))
    leaves = ordering.sketch_plan(model.loss, params, batch, key=jax.random.key(0), size=size)
    plain = [leaf._replace(table=False) for leaf in leaves]
    scale = functools.partial(ordering.second_moment_scale, ADAMW, state, params)
    return {
        "": None,
        ", scaled": scale(leaves=leaves),
        ", each row scaled": scale(leaves=plain),
    }


def balanced(order, rows, is_gram):
    """[W, M] after some epochs of CD-GraB, by rows or by their Gram matrix."""
    units = order.shape[1]
    for _ in range(EPOCHS):
        total, made = np.zeros(rows.shape[1], np.float32), order.copy()
        made[:, units // 2] = order[:, -1]  # of an odd number
        for k in range(units // 2):
            for w, (a, b) in enumerate(order[:, 2 * k : 2 * k + 2]):
                z = rows[a] - rows[b]
                sign = 1 if (total[a] - total[b] if is_gram else z @ total) <= 0 else -1
                total += sign * z
                made[w, k], made[w, units - 1 - k] = (a, b)[::sign]
        order = made
    return order


def prefixes(order, by_g, by_a):
    """The means over prefixes of |v|^2 by G, by A, and of v^T A^2 v."""
    ends = np.zeros((order.shape[1], order.size), np.float32)
    for t in range(order.shape[1]):
        ends[t:, order[:, t]] = 1
    in_g, in_a = ends @ by_g, ends @ by_a
    return np.array([np.sum(in_g * ends), np.sum(in_a * ends), np.sum(np.square(in_a))])


def parameters_table(gradients, scale):
    """Prints the first table; returns G, A and S."""
    sums = {}
    for path, leaf in gradients.items():
        parts = sums.setdefault(group_of(path), [0, 0, 0])
        for n in range(3):
            parts[n] = parts[n] + gram(leaf * np.asarray(scale[path]) ** (n / 2))
    whole = [sum(parts) for parts in zip(*sums.values(), strict=True)]
    print("parameter: by each of G, A, S its share, rank, and share of inner products")
    for group, parts in {**sums, "all": whole}.items():
        cells = [
            f"{np.trace(x) / np.trace(y):6.3f} {np.trace(x) ** 2 / np.sum(x * x):5.0f} "
            f"{np.sum(x * y) / np.sum(y * y):6.3f}"
            for x, y in zip(parts, whole, strict=True)
        ]
        print(f"{group:10}", *cells, sep="  ", flush=True)
    return whole


def main(argv):
    del argv
    values = flags.FLAGS
    task = wikitext.load("wikitext2_small", values.data_dir, values.model)
    units = len(task.train["x"]) // WORKERS
    data = {name: jnp.asarray(x[: WORKERS * units]) for name, x in task.train.items()}
    params, state = trained(task.model, data, units, values.epochs)
    scale = dict(
        jax.tree_util.tree_leaves_with_path(ordering.second_moment_scale(ADAMW, state, params))
    )
    by_g, by_a, by_s = parameters_table(gradients_of(task.model, params, data, units), scale)
    rows = {"random": None, "exact": (by_g, True), "exact, scaled": (by_s, True)}
    for size in map(int, values.sizes):
        for how, scale in scales(task.model, params, state, data, size).items():
            rows[f"{size}{how}"] = sketches(task.model, params, data, units, size, scale), False
    measured = {}
    for how, given in rows.items():
        rng, lengths = np.random.default_rng(1), 0
        for _ in range(STARTS):
            order = shuffled(rng, units) + units * np.arange(WORKERS)[:, None]
            order = order if given is None else balanced(order, *given)
            lengths = lengths + prefixes(order, by_g, by_a)
        measured[how] = lengths / measured.get("random", lengths)
        if how != "random":
            kept = (1 - measured[how]) / (1 - measured["exact"])
            cells = (f"{m:.3f} ({k:.2f})" for m, k in zip(measured[how], kept, strict=True))
            print(f"{how:28}", *cells, sep="  ", flush=True)
        measured["random"] = lengths if how == "random" else measured["random"]


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", None, "folder of test.txt and valid.txt")
    flags.DEFINE_enum("model", "gpt2", ["gpt2", "lstm"], "model")
    flags.DEFINE_integer("epochs", 4, "epochs of training before")
    flags.DEFINE_list("sizes", ["256", "1024", "4096"], "numbers of a sketch")
    app.run(main)
