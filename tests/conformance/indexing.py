"""Every mode of indexing a parameter by data: inside, negative, beyond the end, with fills."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.conformance.gradients import B, Row, each, score

N = 9  # rows of a table
PLACES = {
    "inside": lambda rng, shape: rng.integers(0, N, shape),
    "negative": lambda rng, shape: rng.integers(-N, N, shape),
    "beyond": lambda rng, shape: rng.integers(-N - 4, N + 4, shape),
}
WAYS = ("fill", "drop", "clip", "promise_in_bounds", None)
NUMBERS = lax.GatherDimensionNumbers
PUT = lax.ScatterDimensionNumbers


def _gathers():
    """f(table [N, 5], places [3]) of every way to look rows up."""
    yield "t[i]", lambda t, i: t[i]
    for mode in (None, "fill", "clip", "wrap"):
        yield f"take {mode}", lambda t, i, mode=mode: jnp.take(t, i, axis=0, mode=mode)
        yield f"take flat {mode}", lambda t, i, mode=mode: jnp.take(t, i, mode=mode)
        yield f"take of columns {mode}", lambda t, i, mode=mode: jnp.take(t.T, i, 1, mode=mode)
    for mode in (None, "fill", "clip"):
        yield (
            f"take_along_axis {mode}",
            lambda t, i, mode=mode: jnp.take_along_axis(t, i[:, None], 0, mode=mode),
        )
    yield "take fill 7", lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=7.0)
    for mode in WAYS:
        for fill in (None, 0.0, 7.0) if mode in ("fill", "drop") else (None,):
            options = {"mode": mode, "fill_value": fill}
            yield f"at.get {mode} {fill}", lambda t, i, o=options: t.at[i].get(**o)
            yield f"at.get of columns {mode} {fill}", lambda t, i, o=options: t.T.at[:, i].get(**o)
            yield (
                f"at.get raw {mode} {fill}",
                lambda t, i, o=options: t.at[i].get(**o, wrap_negative_indices=False),
            )
    for mode in ("fill", "clip", "promise_in_bounds"):
        for fill in (None, 7.0) if mode == "fill" else (None,):
            rows = functools.partial(
                lax.gather,
                dimension_numbers=NUMBERS((1,), (0,), (0,)),
                slice_sizes=(1, 5),
                mode=mode,
                fill_value=fill,
            )
            blocks = functools.partial(
                lax.gather,
                dimension_numbers=NUMBERS((1, 2), (), (0,)),
                slice_sizes=(2, 3),
                mode=mode,
                fill_value=fill,
            )
            points = functools.partial(
                lax.gather,
                dimension_numbers=NUMBERS((), (0, 1), (0, 1)),
                slice_sizes=(1, 1),
                mode=mode,
                fill_value=fill,
            )
            yield f"gather {mode} {fill}", lambda t, i, f=rows: f(t, i[:, None])
            yield f"gather of blocks {mode} {fill}", lambda t, i, f=blocks: f(t, i[:, None])
            yield (
                f"gather of points {mode} {fill}",
                lambda t, i, f=points: f(t, jnp.stack([i, i % 5], 1)),
            )
    yield "sorted", lambda t, i: t.at[jnp.sort(i)].get(indices_are_sorted=True)
    yield "unique", lambda t, i: t.at[jnp.arange(3) + i[0]].get(unique_indices=True)


def _others():
    yield "t[:, j]", lambda t, i: t[:, i % 5]
    yield "t[i, j]", lambda t, i: t[i, i % 5]
    yield "t[i, 2:4]", lambda t, i: t[i, 2:4]
    yield "t[i, None]", lambda t, i: t[i, None]
    yield "t[i, :, None]", lambda t, i: t[i, :, None]
    yield "t[..., j]", lambda t, i: t[..., i % 5]
    yield "t[ix]", lambda t, i: t[i[:, None], jnp.array([0, 3])]
    yield "t[i[0]]", lambda t, i: t[i[0]]
    yield "t[i[0], j]", lambda t, i: t[i[0], i % 5]
    yield "t[i[:, None]]", lambda t, i: t[i[:, None]]
    yield "t[i][j]", lambda t, i: t[i][i % 3]
    yield "t.T[:, i]", lambda t, i: t.T[:, i]
    yield "t.reshape[i]", lambda t, i: t.reshape(3, 3, 5)[i % 3]
    yield "t.reshape[i, j]", lambda t, i: t.reshape(3, 3, 5)[i % 3, (i + 1) % 3]
    yield "t[:, 0][i]", lambda t, i: t[:, 0][i]
    yield "t[2:][i]", lambda t, i: t[2:][i]
    yield "t[::-1][i]", lambda t, i: t[::-1][i]
    yield "t[mask]", lambda t, i: t[np.arange(N) % 2 == 0] * i[0]
    yield "t[constants]", lambda t, i: t[np.array([0, -1, 3])] * i[:, None]
    yield "t[bfloat16][i]", lambda t, i: t.astype(jnp.bfloat16)[i]
    yield "uint8", lambda t, i: t[jnp.uint8(i % N)]
    yield "int8", lambda t, i: t[jnp.int8(i)]
    yield "empty", lambda t, i: t[i[:0]].sum() + t[i].sum()
    yield "tied", lambda t, i: t[i] @ t.T
    yield "tied after", lambda t, i: jnp.tanh(t[i] @ t.T)
    yield "twice", lambda t, i: jnp.tanh(t[i]) @ t[(i + 1) % N].T
    yield "one_hot", lambda t, i: jax.nn.one_hot(i, N) @ t
    yield "lax.dynamic_index_in_dim", lambda t, i: lax.dynamic_index_in_dim(t, i[0])
    yield "lax.dynamic_slice", lambda t, i: lax.dynamic_slice(t, (i[0], i[1]), (2, 3))
    yield "lax.dynamic_slice_in_dim", lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 2)
    yield "lax.index_take", lambda t, i: lax.index_take(t, (i,), (0,))
    yield "vmap", lambda t, i: jax.vmap(lambda j: t[j])(i)
    yield "vmap of both", lambda t, i: jax.vmap(lambda r, j: r[j])(t[:3], i % 5)
    yield "scan", lambda t, i: lax.scan(lambda c, j: (c + t[j], c * t[j]), t[0], i)
    yield "map", lambda t, i: lax.map(lambda j: t[j], i)
    yield "choose", lambda t, i: jnp.choose(i % 3, t[:3, :3], mode="clip")
    yield "searchsorted", lambda t, i: t[jnp.searchsorted(jnp.arange(3), i)]
    yield "argmax", lambda t, i: t[i][jnp.argmax(t[i], 0), jnp.arange(5)]
    yield "sort", lambda t, i: jnp.sort(t[i], 0)


def _scatters():
    """Parameters that are written at places, and are written to."""
    data = lambda i: jnp.sin(jnp.arange(N * 5.0).reshape(N, 5) * (1 + i[0]))  # noqa: E731
    for mode in WAYS:
        for how in ("set", "add", "mul", "min", "max"):
            unique = how == "mul"  # JAX differentiates no other products

            def write(a, i, b, how=how, mode=mode, unique=unique):
                i = jnp.arange(3) + i[0] if unique else i
                return getattr(a.at[i], how)(b, mode=mode, unique_indices=unique)

            yield f"at.{how} {mode} to data", lambda t, i, f=write: f(data(i), i, t[:3])
            yield f"at.{how} {mode} of data", lambda t, i, f=write: f(t, i, data(i)[:3])
    yield "at.divide", lambda t, i: t.at[i].divide(2.0) * i[0]
    yield "at.power", lambda t, i: (1 + t**2).at[i].power(2.0) * i[0]
    for mode in ("fill", "clip", "promise_in_bounds"):
        write = functools.partial(
            lax.scatter_add, dimension_numbers=PUT((1,), (0,), (0,)), mode=mode
        )
        yield f"scatter_add {mode}", lambda t, i, f=write: f(data(i), i[:, None], t[:3])
        yield f"scatter_add {mode} of data", lambda t, i, f=write: f(t, i[:, None], data(i)[:3])
    yield "segment_sum", lambda t, i: jax.ops.segment_sum(t[:3] * i[0], i % 3, 3)
    yield "segment_max", lambda t, i: jax.ops.segment_max(t[:3] * i[0], i % 3, 3)


def _row(name, function, places):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    table = {"t": rng.normal(size=(N, 5)).astype(np.float32)}
    loss = each(lambda params, i: score(function(params["t"], i)))
    return Row(loss, table, PLACES[places](rng, (B, 3)).astype(np.int32))


def rows(only=None) -> dict[str, Row]:
    results = {}
    for makers in (_gathers, _others, _scatters):
        for name, function in makers():
            for places in PLACES:
                undefined = "promise" in name or name == "unique"
                label = f"{name}, {places}"
                if (undefined and places != "inside") or (only and label not in only):
                    continue
                whole = places == "beyond" and makers is not _scatters
                row = _row(label, function, places)
                results[label] = row._replace(modes=None if whole else ("plain",))
    for axes in (1, 2):
        # As people write it: all examples at once.
        row = _row("batch", None, "beyond")
        places = np.stack([row.batch] * axes, -1) if axes > 1 else row.batch
        loss = lambda p, i, key: score(jnp.take(p["t"], i, axis=0, mode="clip"), len(i))  # noqa: E731
        results[f"a batch, places of {axes} axes"] = row._replace(loss=loss, batch=places)
    return results
