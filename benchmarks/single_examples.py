"""Times what an order observes, a row for every example, beside what other packages offer.

    pip install -e ".[experiments]" jax-privacy
    python -m benchmarks.single_examples --models=gpt,vit,lenet

Every way returns the mean gradient of 16 examples and a sketch of 1,024 numbers of every example's
gradient, but for jax-privacy, which returns norms alone. Before the timing, mean gradients are
compared with the plain one, and rows or norms with those of `jax.vmap(jax.grad(...))`. The ways
take turns. `megabytes` are arguments, outputs and temporaries of the compiled call. A package
that is not installed is left out.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import ordering
from benchmarks import timing

EXAMPLES, SIZE = 16, 1024
MICROBATCHES = (None, 4, 1)


def ways_of(loss: Callable) -> dict[str, Callable]:
    """{way: (params, batch) -> (mean gradient, sketches or norms or None)}; the first is plain."""
    key = jax.random.key(0)
    to_sketch = ordering.make_sketch(jax.random.key(1), size=SIZE)
    sketched = ordering.sketched_grads(loss, jax.random.key(1), size=SIZE)
    formed = ordering.per_example_grads(loss, to_sketch=to_sketch)

    def mean_loss(params, batch):
        return jnp.mean(loss(params, batch, key))

    def rows_of(gradients):
        def run(params, batch):
            _, mean, rows = gradients(params, batch, key=key)
            return mean, rows

        return run

    return {
        "plain step": lambda params, batch: (jax.grad(mean_loss)(params, batch), None),
        "ordering.sketched_grads": rows_of(sketched),
        "vmap, then a sketch": rows_of(formed),
        **_of_optax(mean_loss, to_sketch),
        **_of_jax_privacy(mean_loss),
    }


def _of_optax(mean_loss: Callable, to_sketch: Callable) -> dict[str, Callable]:
    from optax import microbatching

    def run(params, batch, size):
        gradients = microbatching.micro_grad(
            mean_loss,
            microbatch_size=size,
            metrics_fn=to_sketch,
            accumulator=microbatching.AccumulationType.MEAN,
        )
        mean, aux = gradients(params, batch)
        return mean, aux.metrics

    return {
        f"optax micro_grad, microbatches {size or 'none'}": functools.partial(run, size=size)
        for size in MICROBATCHES
    }


def _of_jax_privacy(mean_loss: Callable) -> dict[str, Callable]:
    try:
        from jax_privacy import clipping
    except ImportError as error:
        print(f"jax-privacy is left out: {error}")
        return {}

    def run(params, batch):
        gradients = clipping.clipped_grad(
            mean_loss, l2_clip_norm=jnp.inf, normalize_by=EXAMPLES, return_grad_norms=True
        )
        mean, aux = gradients(params, batch)
        return mean, aux.grad_norms

    return {"jax-privacy clipped_grad, norms": run}


def check(loss: Callable, params, batch, results: dict[str, tuple]) -> None:
    """Raises AssertionError for a way that computes something else."""
    key = jax.random.key(0)
    formed = ordering.per_example_grads(loss)
    exact = jax.jit(lambda *args: formed(*args, key=key)[2])(params, batch)
    exact = np.concatenate([np.asarray(x).reshape(EXAMPLES, -1) for x in jax.tree.leaves(exact)], 1)
    norms = np.linalg.norm(exact, axis=1)
    plain, formed = results["plain step"][0], np.asarray(results["vmap, then a sketch"][1])
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    for way, (mean, rows) in results.items():
        for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * scale, err_msg=way)
        if way.startswith("jax-privacy"):
            np.testing.assert_allclose(rows, norms, rtol=1e-3, err_msg=way)
        elif rows is not None:
            np.testing.assert_allclose(
                rows, formed, rtol=1e-3, atol=1e-3 * norms.max(), err_msg=way
            )


def rows_of(name: str, repeats: int) -> Iterator[dict]:
    """Rows of one model."""
    task = timing.step_task(name)
    params = task.model.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: jnp.asarray(x[:EXAMPLES]), task.train)
    ways = {
        way: jax.jit(run).lower(params, batch).compile()
        for way, run in ways_of(task.model.loss).items()
    }
    check(task.model.loss, params, batch, {way: run(params, batch) for way, run in ways.items()})
    calls = {way: functools.partial(run, params, batch) for way, run in ways.items()}
    for way, seconds, times in timing.compared(calls, repeats):
        memory = ways[way].memory_analysis()
        used = (
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        )
        yield {
            "model": name,
            "way": way,
            "ms": f"{seconds * 1e3:.2f}",
            "times_plain": f"{times['plain step'][0]:.2f}",
            "interval": "{1:.2f} to {2:.2f}".format(*times["plain step"]),
            "times_ours": f"{times['ordering.sketched_grads'][0]:.2f}",
            "megabytes": f"{used / 1e6:.1f}",
        }


def main(argv):
    del argv
    for name in flags.FLAGS.models:
        timing.print_rows(rows_of(name, flags.FLAGS.repeats))


if __name__ == "__main__":
    flags.DEFINE_list("models", ["gpt", "vit", "lenet"], "of benchmarks/timing.py")
    flags.DEFINE_integer("repeats", 21, "timed calls of every way")
    app.run(main)
