"""Gradients of examples that are split over a mesh are those of the same examples on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import local_opt
import ordering
from tests.cases import mostly_slow

KEY, SKETCH_KEY, N = jax.random.key(3), jax.random.key(7), 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return (RNG.normal(size=shape) / 2).astype(np.float32)


def conv(x, w, **how):
    spatial = "DHW"[5 - w.ndim :]
    how = {"window_strides": (1,) * (w.ndim - 2), "padding": "SAME"} | how
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    return jax.lax.conv_general_dilated(x, w, **how, dimension_numbers=numbers)


def standard(w):
    """A kernel that is not the parameter itself, as in weight standardisation."""
    return (w - w.mean()) / (w.std() + 1e-3)


def scanned(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(conv(x, w)), None), x, w)[0]


CONVOLUTIONS = {
    "2-D": (conv, (6, 6, 3), (3, 3, 3, 5)),
    "1-D": (functools.partial(conv, window_strides=(2,)), (9, 4), (3, 4, 6)),
    "3-D": (conv, (4, 3, 4, 2), (2, 2, 2, 2, 3)),
    "strided": (
        functools.partial(conv, window_strides=(2, 1), padding="VALID"),
        (7, 6, 3),
        (3, 2, 3, 5),
    ),
    "dilated": (functools.partial(conv, rhs_dilation=(2, 2)), (7, 6, 3), (3, 3, 3, 5)),
    "transposed": (
        functools.partial(conv, lhs_dilation=(2, 2), padding=((1, 2), (2, 1))),
        (4, 4, 3),
        (3, 3, 3, 5),
    ),
    "groups": (functools.partial(conv, feature_group_count=2), (6, 6, 4), (3, 3, 2, 6)),
    "depthwise": (functools.partial(conv, feature_group_count=4), (6, 6, 4), (3, 3, 1, 4)),
    "point": (conv, (6, 6, 8), (1, 1, 8, 8)),
    "bfloat16": (
        lambda x, w: conv(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
        (6, 6, 3),
        (3, 3, 3, 5),
    ),
    "scan": (scanned, (6, 6, 3), (2, 3, 3, 3, 3)),
    "remat": (jax.checkpoint(lambda x, w: jnp.tanh(conv(x, w))), (6, 6, 3), (3, 3, 3, 5)),
    "cond": (
        lambda x, w: jax.lax.cond(x.sum() > 0, conv, lambda x, w: -conv(x, w), x, w),
        (6, 6, 3),
        (3, 3, 3, 5),
    ),
    "of the kernel": (lambda x, w: conv(x, standard(w)), (6, 6, 3), (3, 3, 3, 5)),
}


def loss_of(function):
    def loss(w, x, key):
        return jnp.square(function(x, w).astype(jnp.float32)).reshape(len(x), -1).sum(1)

    return loss


MESHES = {
    "data": (((4,), ("data",)), jax.P("data")),
    "data of two axes": (((2, 2), ("data", "model")), jax.P(("data", "model"))),
    "data beside model": (((2, 2), ("data", "model")), jax.P("data")),
}


def mesh_of(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices()[:4])


MAKERS = {
    "per_example": ordering.per_example_grads,
    "in turn": functools.partial(ordering.per_example_grads, in_turn=True),
    "sketched": functools.partial(ordering.sketched_grads, key=SKETCH_KEY, size=16),
    "microbatch": ordering.microbatch_grads,
}


def alone(loss, params, batch):
    """The gradients of single examples, one after another, on one device."""
    gradient = jax.jit(jax.grad(lambda p, example: loss(p, example, KEY)[0]))
    units = range(len(jax.tree.leaves(batch)[0]))
    gradients = [gradient(params, jax.tree.map(lambda x: x[i : i + 1], batch)) for i in units]  # noqa: B023
    return jax.tree.map(lambda *g: np.stack(g), *gradients)


def close(actual, expected, tolerance=1e-5):
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        scale = float(np.max(np.abs(np.asarray(other, np.float32)))) + 1e-9
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


OFTEN = ("2-D", "depthwise", "scan", "cond")  # each kind of program


@pytest.mark.parametrize("name", mostly_slow(CONVOLUTIONS, quick=OFTEN))
def test_gradients_of_convolutions_of_a_batch_that_is_split(name):
    function, of_data, of_kernel = CONVOLUTIONS[name]
    loss, x, w = loss_of(function), normal(N, *of_data), normal(*of_kernel)
    expected, tolerance = alone(loss, w, x), 2e-2 if name == "bfloat16" else 1e-5
    meshes = MESHES if name == "2-D" else {"data": MESHES["data"]}
    # Of single examples one after another, and of all at once, convolutions are JAX's own.
    for maker in MAKERS if name == "2-D" else ("per_example", "sketched"):
        run = jax.jit(lambda w, x, make=MAKERS[maker]: make(loss)(w, x, key=KEY))
        _, _, rows = run(w, x)
        for shape, spec in meshes.values():
            split = jax.device_put(x, NamedSharding(mesh_of(*shape), spec))
            _, mean, actual = run(w, split)
            close(mean, expected.mean(0), tolerance)
            close(actual, expected if maker in ("per_example", "in turn") else rows, tolerance)


@pytest.mark.parametrize("maker", ["per_example", "sketched"])
def test_gradients_of_convolutions_inside_map_workers_with_split_batches(maker):
    """Two workers of two devices, as in docs/use/meshes.md."""
    loss, x, w = loss_of(conv), normal(N, 6, 6, 3), normal(3, 3, 3, 5)
    mesh = mesh_of((2, 2), ("worker", "data"))

    def step(w, x):
        _, mean, rows = MAKERS[maker](loss)(w, x, key=KEY)
        return mean, rows

    mapped = local_opt.map_workers(step, mesh, in_specs=("worker", "batch"), out_specs="worker")
    split = jax.device_put(x, NamedSharding(mesh, jax.P(("worker", "data"))))
    mean, rows = jax.jit(mapped)(local_opt.replicate(w, mesh), split)
    each = [jax.jit(step)(w, x[:4]), jax.jit(step)(w, x[4:])]
    close((mean, rows), jax.tree.map(lambda *of: np.stack(of), *each))
    close(mean, alone(loss, w, x).reshape(2, 4, *w.shape).mean(1))


@pytest.mark.parametrize("maker", ["per_example", "sketched"])
def test_a_batch_that_does_not_divide_over_the_devices(maker):
    """Inside a program the compiler may split any number of examples, for instance seven."""
    loss, x, w = loss_of(conv), normal(7, 6, 6, 3), normal(3, 3, 3, 5)
    split = NamedSharding(mesh_of(*MESHES["data"][0]), jax.P("data"))

    def run(w, x):
        return MAKERS[maker](loss)(w, x, key=KEY)

    whole = lambda w, x: run(w, jax.lax.with_sharding_constraint(x, split))  # noqa: E731
    _, mean, rows = jax.jit(whole)(w, x)
    close(mean, alone(loss, w, x).mean(0))
    close(rows, jax.jit(run)(w, x)[2])


@pytest.mark.parametrize(
    "maker,jit", [("per_example", False), ("in turn", True), ("sketched", True)]
)
def test_a_batch_that_is_split_over_an_explicit_axis_is_refused(maker, jit):
    loss, x, w = loss_of(conv), normal(N, 6, 6, 3), normal(3, 3, 3, 5)
    mesh = mesh_of((4,), ("data",), AxisType.Explicit)
    split, whole = (
        jax.device_put(v, NamedSharding(mesh, s))
        for v, s in zip(({"x": x}, w), (jax.P("data"), jax.P()), strict=True)
    )
    of_dict = lambda w, batch, key: loss(w, batch["x"], key)  # noqa: E731
    run = lambda w, x: MAKERS[maker](of_dict)(w, x, key=KEY)  # noqa: E731
    with pytest.raises(ValueError, match=r"batch\['x'\] is split over \['data'\].*auto_axes"):
        (jax.jit(run) if jit else run)(whole, split)
    parts = jax.P("data"), jax.P(), jax.P("data")
    with jax.set_mesh(mesh):
        inside = jax.sharding.auto_axes(run, out_sharding=parts)
        _, mean, _ = jax.jit(inside)(whole, split)
    close(mean, alone(loss, w, x).mean(0))


@pytest.mark.parametrize("maker", ["per_example", "sketched"])
@pytest.mark.parametrize("devices", ["one", "workers"])
def test_convolutions_are_plain_where_no_batch_is_split(maker, devices, monkeypatch):
    """On one device, or inside a worker that is one: those that `jax.vmap` makes."""
    loss = lambda w, x: loss_of(conv)(w, x, KEY)  # noqa: E731
    x, w = normal(N, 6, 6, 3), normal(3, 3, 3, 5)
    formed = functools.partial(ordering.sketched_grads, key=SKETCH_KEY, size=100)
    make = formed if maker == "sketched" else MAKERS[maker]

    def run(w, x):
        return make(loss)(w, x)[1:]

    assert f"group_count={N}" not in str(jax.make_jaxpr(run)(w, x))
    if devices == "one":
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    else:
        mesh, sides = mesh_of((4,), ("worker",)), ("replicated", "batch")
        run = local_opt.map_workers(run, mesh, in_specs=sides, out_specs="worker")
    here = N if devices == "one" else N // 4
    again = lambda *args: run(*args)  # noqa: E731 (JAX remembers the first program)
    assert f"group_count={here}" in str(jax.make_jaxpr(again)(w, x))


def by_slices(p, x):
    def add(i, total):
        return total + (x @ jax.lax.dynamic_index_in_dim(p["stack"], i, 0, False)).sum(-1)

    return jax.lax.fori_loop(0, 3, add, jnp.zeros_like(x[:, 0]))


LOSSES = {
    "a product": lambda p, x: jnp.square(x @ p["w"] + p["b"][None]).sum(-1),
    "a mean": lambda p, x: jnp.square(x @ p["w"] + p["b"][None]).sum(-1).mean(),
    "slices": lambda p, x: jnp.square(x @ p["w"] + p["b"][None]).sum(-1) * by_slices(p, x),
    "a penalty": lambda p, x: x[:, 0] * (jnp.tanh(x @ p["w"]).sum(-1) + jnp.square(p["w"]).sum()),
}
ROWS = MAKERS | {
    "to sketches": functools.partial(
        ordering.per_example_grads, to_sketch=ordering.make_sketch(SKETCH_KEY, size=16)
    ),
    "kept": functools.partial(ordering.sketched_grads, key=SKETCH_KEY, size=128),
}
AXES = {"one axis": ((4,), ("data",)), "two axes": ((2, 2), ("data", "other"))}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("typed", [True, False], ids=["check_vma", "unchecked"])
@pytest.mark.parametrize("whole", [True, False], ids=["replicated", "varying"])
@pytest.mark.parametrize("name", mostly_slow(LOSSES, quick=("slices",)))
def test_rows_under_shard_map_are_of_their_own_device(axes, typed, whole, name):
    """Rows are those without a mesh; the mean gradient is that of `jax.grad` at the same place."""
    loss, x = LOSSES[name], normal(N, 9)
    params = {"w": normal(9, 5), "b": normal(5), "stack": normal(3, 9, 2)}
    mesh, split = mesh_of(*AXES[axes]), jax.P(AXES[axes][1])
    mean = lambda p, x: jnp.mean(loss(p, x))  # noqa: E731

    def run(params, x):
        if not whole:
            params = jax.tree.map(lambda p: p[0], params)
        results = {name: make(loss)(params, x) for name, make in ROWS.items()}
        means = {name: jax.tree.map(lambda g: g[None], r[1]) for name, r in results.items()}
        of_all = jax.tree.map(lambda g: g[None], jax.grad(mean)(params, x))
        return {name: (r[0], r[2]) for name, r in results.items()}, means, of_all

    given, of_params = params, jax.P()
    if not whole:
        given, of_params = jax.tree.map(lambda p: jnp.stack([p] * 4), params), split
    replicated = typed and whole
    out = split, jax.P() if replicated else split, jax.P() if replicated else split
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(of_params, split), out_specs=out, check_vma=typed
    )
    rows, means, of_all = jax.jit(mapped)(given, x)
    for maker, make in ROWS.items():
        if maker == "microbatch":
            each = [jax.jit(make(loss))(params, x[i : i + 2]) for i in range(0, N, 2)]
            expected = jax.tree.map(lambda *of: np.concatenate(of), *[(e[0], e[2]) for e in each])
        else:
            expected = jax.jit(lambda p, x: make(loss)(p, x)[::2])(params, x)  # noqa: B023
        close(rows[maker], expected)
        close(means[maker], of_all)
