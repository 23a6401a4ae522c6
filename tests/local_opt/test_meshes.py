"""The table of docs/use/meshes.md: every number is that of workers simulated on one device."""

import functools
import itertools
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import local_opt
import ordering
from tests.cases import mostly_slow

W, UNITS, BATCH, STEPS, K = 2, 8, 4, 6, 128
SGD = optax.sgd(0.05, 0.9)
RNG = np.random.default_rng(0)
DATA = {n: RNG.normal(size=(W * UNITS, size)).astype("f") for n, size in (("x", 8), ("y", 4))}
WEIGHTS = {
    n: RNG.normal(size=shape).astype("f") / 3 for n, shape in (("w1", (8, 8)), ("w2", (8, 4)))
}
AXES = (("worker",), (2,)), (("worker", "data"), (2, 4)), (("worker", "data", "model"), (2, 2, 2))
EQUAL_KINDS = [(*axes, kinds) for axes in AXES for kinds in (None, (AxisType.Auto,) * len(axes[0]))]
MIXED = [(*AXES[1], kinds) for kinds in itertools.permutations((AxisType.Explicit, AxisType.Auto))]
MESHES = [*EQUAL_KINDS, MIXED[0]]  # None: as JAX makes them


class Run(NamedTuple):
    """Workers of a mesh that is in scope, or simulated."""

    mesh: jax.sharding.Mesh | None = None

    @property
    def workers(self):
        return W if self.mesh is None else None

    @property
    def inside(self):
        return () if self.mesh is None else self.mesh.axis_names[1:]

    def map(self, function, **specs):
        return jax.jit(local_opt.map_workers(function, self.workers, **specs))

    def replicate(self, tree, specs=None, **how):
        if specs and self.inside:
            put = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
            tree = jax.tree.map(put, tree, specs)
        return local_opt.replicate(tree, self.workers, **how)

    def explicit(self):
        return bool({*self.inside} & {*self.mesh.explicit_axes}) if self.inside else False

    def over_devices(self, tree):
        """In a step: over the devices of this worker."""
        if not self.inside:
            return tree
        put = jax.reshard if self.explicit() else jax.lax.with_sharding_constraint
        return jax.tree.map(lambda x: put(x, P("data")), tree)


def losses(w, batch, key=None, **how):
    hidden = jnp.tanh(batch["x"] @ w["w1"])
    return jnp.sum((jnp.matmul(hidden, w["w2"], **how) - batch["y"]) ** 2, axis=1)


def words(run):
    def one(local_state, shared, rows, key):
        return (
            local_state + shared,
            shared * 2,
            rows + local_state,
            jax.random.normal(key),
            local_state,
            local_state,
        )

    mapped = run.map(
        one,
        in_specs=("worker", "replicated", "batch", "key"),
        out_specs=("worker", "replicated", "batch", "worker", "mean", "sum"),
    )
    return mapped(jnp.arange(W), 10, jnp.zeros((4 * W, 3)), jax.random.key(3))


def start(run):
    tree = {"w": jnp.arange(8.0), "n": 3, "key": jax.random.key(0), "b": jnp.ones(4, jnp.bfloat16)}
    copies = run.replicate(tree, keys="fold")
    local_opt.check_synced(copies["w"], ulps=0)
    move = run.map(
        lambda w: w + 2.0 * jax.lax.axis_index("worker"), in_specs="worker", out_specs="worker"
    )
    with pytest.raises(ValueError, match=r"parameters are 2 apart .*worker 1 from worker 0"):
        local_opt.check_synced(move(copies["w"]))
    one = local_opt.mean_over_workers(copies | {"w": move(copies["w"])})
    return one | {"key": jax.random.key_data(one["key"])}


def trained(run, rounds, specs=None, weighed=False):
    """Losses, parameters and their mean of local steps, whose batches are over all devices."""

    def step(w, state, batch):
        # A sum over shards of explicit axes must be told what becomes of it.
        how = {"out_sharding": P()} if specs and run.explicit() else {}
        batch = batch if specs else run.over_devices(batch)
        of = lambda w: losses(w, batch, **how).mean()  # noqa: E731
        value, grads = jax.value_and_grad(of)(w)
        updates, state = rounds.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    def sync(w, state, weight):
        return rounds.sync(w, state, weight=weight if weighed else None)

    step = run.map(
        step, in_specs=("worker", "worker", "batch"), out_specs=("worker", "worker", "mean")
    )
    sync = run.map(sync, in_specs="worker", out_specs="worker")
    init = run.map(rounds.init, in_specs="worker", out_specs="worker")
    w = run.replicate(WEIGHTS, specs)
    state, results = init(w), []
    for t in range(STEPS):
        rows = (np.arange(W * BATCH) + t) % len(DATA["x"])
        w, state, value = step(w, state, {n: a[rows] for n, a in DATA.items()})
        if t % 3 == 2 and hasattr(rounds, "sync"):
            w, state = jax.block_until_ready(sync(w, state, jnp.arange(1.0, W + 1)))
        results.append(value)
    if specs and run.inside:
        assert all(x.sharding.shard_shape(x.shape)[1:] != x.shape[1:] for x in jax.tree.leaves(w))
    return results, w, local_opt.mean_over_workers(w)


def planned(run):
    plan = local_opt.qsr(lambda t: 0.1 / (t + 1), alpha=0.06, h_base=2, total_steps=STEPS)
    assert len(set(plan.periods.tolist())) > 1
    return trained(run, local_opt.local_steps(optax.adam(0.05), plan))


def streaming(run):
    stream = local_opt.streaming.streaming_rounds(SGD, fragments=2)

    def sync(w, state, weight):
        for f in range(2):
            state = stream.start(w, state, fragment=f, weight=weight)
            w, state = stream.finish(w, state, fragment=f, weight=weight)
        return w, state

    return trained(run, local_opt.Rounds(stream.init, stream.update, sync))


def split(run):
    specs = {"w1": P(None, run.inside[-1]), "w2": P(run.inside[-1], None)} if run.inside else None
    return trained(run, local_opt.local_rounds(SGD, specs=specs, drift=True), specs)


def ordered(
    run,
    order,
    gradients,
    *,
    start=WEIGHTS,
    whole=True,
    of_rows=lambda rows: rows,
):
    """Losses and orders of three epochs: every worker gathers its own units in its own order."""

    def step(w, orders, data, at):
        units = jax.lax.dynamic_slice_in_dim(orders.current, at, BATCH)
        batch = jax.tree.map(lambda a: a[units], data)
        batch = batch if whole else run.over_devices(batch)
        value, grads, rows = gradients(w, batch, key=jax.random.key(0))
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, grads)
        return w, order.observe(orders, of_rows(rows)), value.mean()

    step = run.map(
        step,
        in_specs=("worker", "worker", "batch", "replicated"),
        out_specs=("worker", "worker", "mean"),
    )
    next_epoch = run.map(
        lambda s: order.next_epoch(order.sync(s)), in_specs="worker", out_specs="worker"
    )
    w, orders = (
        run.replicate(WEIGHTS),
        run.map(order.init, in_specs=("key", "replicated"), out_specs="worker")(
            jax.random.key(2), start
        ),
    )
    results = []
    for _ in range(3):
        for at in range(0, UNITS, BATCH):
            w, orders, value = step(w, orders, DATA, at)
            results.append(value)
        orders = next_epoch(orders)
        results.append(orders.current)
    return results, w


def of_examples(run, order_of=ordering.pair_balance, maker=ordering.per_example_grads, **how):
    return ordered(run, order_of(UNITS, units_per_step=BATCH), maker(losses), **how)


def in_auto_axes(run):
    """Where JAX takes no gradients along explicit axes, the compiler looks after them."""
    gradients, sides = ordering.per_example_grads(losses), (P(), P(), P())

    def inside(w, batch, *, key):
        axes = tuple(jax.sharding.get_abstract_mesh().explicit_axes)
        of_all = lambda w, batch, key: gradients(w, batch, key=key)  # noqa: E731
        auto = jax.sharding.auto_axes(of_all, axes=axes, out_sharding=sides)
        return (auto if axes else of_all)(w, batch, key)

    return ordered(run, ordering.pair_balance(UNITS, units_per_step=BATCH), inside, whole=False)


def in_numbers(run, *, gathers, order_of=ordering.cd_grab, maker=None):
    """A coordinated order of sketches."""
    how = {"start": jnp.zeros(K)}
    if maker is None:
        to_sketch = ordering.make_sketch(SKETCH, size=K)
        how["of_rows"] = jax.vmap(to_sketch)
    coordinated = functools.partial(order_of, gathers=gathers)
    return of_examples(run, coordinated, maker or ordering.per_example_grads, **how)


SKETCH = jax.random.key(3)  # made outside of meshes, into which JAX closes over no other
SKETCHED = functools.partial(ordering.sketched_grads, key=jax.random.key(7), size=K)
COMPRESSED = {"compress": local_opt.quantize("int8")}
FEATURES = {
    "`map_workers`, every word": words,
    "`replicate`, `mean_over_workers`, `check_synced`": start,
    '`local_rounds`, a batch over "data"': lambda run: trained(
        run, local_opt.local_rounds(optax.adam(0.05), sync_opt_state="mean")
    ),
    "`local_steps` by QSR, the same": planned,
    "DiLoCo with weights and drift, the same": lambda run: trained(
        run,
        local_opt.local_rounds(SGD, outer=optax.sgd(0.7, 0.9, nesterov=True), drift=True),
        weighed=True,
    ),
    "`scaffold`, the same": lambda run: trained(
        run, local_opt.local_rounds(optax.sgd(0.05), correction=local_opt.corrections.scaffold())
    ),
    "`streaming_rounds`, the same": streaming,
    "a compressor, `specs=jax.P()`": lambda run: trained(
        run, local_opt.local_rounds(SGD, specs=P(), **COMPRESSED)
    ),
    "a compressor without `specs`": lambda run: trained(
        run, local_opt.local_rounds(SGD, **COMPRESSED)
    ),
    "parameters that are split, by `specs`": split,
    "`grab`, `per_example_grads` on every device": lambda run: of_examples(run, ordering.grab),
    '`pair_balance`, `per_example_grads` over "data"': lambda run: of_examples(run, whole=False),
    "the same in `jax.sharding.auto_axes`": in_auto_axes,
    '`pair_balance`, `sketched_grads` over "data"': lambda run: of_examples(
        run, maker=SKETCHED, start=jnp.zeros(K), whole=False
    ),
    "`cd_grab` of gradients": lambda run: of_examples(run, ordering.cd_grab),
    '`cd_grab(gathers="step")` of `make_sketch`': lambda run: in_numbers(run, gathers="step"),
    '`cd_grab(gathers="sync")` of `sketched_grads`': lambda run: in_numbers(
        run, gathers="sync", maker=SKETCHED
    ),
    "`global_order` of the last": lambda run: in_numbers(
        run,
        gathers="sync",
        maker=SKETCHED,
        order_of=lambda n, **how: ordering.global_order(ordering.cd_grab(n, **how), n),
    ),
}


@functools.cache
def simulated(name):
    return FEATURES[name](Run())


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "use" / "meshes.md"


@functools.cache
def table():
    """{feature: a cell per mesh}, and what stands behind a letter."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.split("\n")
        if line.startswith("| ")
    ]
    cells = {row[0].strip(): row[1:] for row in rows if row[0].strip() in FEATURES}
    return cells, dict(re.findall(r'^- (\w): "(.*)"$', text, re.M))


def test_the_table_has_every_feature():
    assert list(table()[0]) == list(FEATURES)
    assert {len(cells) for cells in table()[0].values()} == {len(MESHES)}


CELLS = [*itertools.product(FEATURES, range(len(MESHES)))]
# One of each number of axes, of which two as `jax.make_mesh` makes them, a feature in one of these.
DEAR = "`grab`", "the same in", "`cd_grab` of", "`global_order`"  # and much like others
TRIED = [(n, (0, 3, 4)[i % 3]) for i, n in enumerate(FEATURES) if not n.startswith(DEAR)]


@pytest.mark.parametrize("name,number", mostly_slow(CELLS, quick=TRIED))
def test_a_cell_of_the_table(name, number):
    names, shape, kinds = MESHES[number]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh, cells = jax.make_mesh(shape, names, kinds, devices=devices), table()
    expected, cell = simulated(name), cells[0][name][number]
    with jax.set_mesh(mesh):
        if cell != "yes":
            with pytest.raises(ValueError, match=re.escape(cells[1][cell])):
                FEATURES[name](Run(mesh))
            return
        actual = FEATURES[name](Run(mesh))
    # A change that differs in its last bits may be rounded to the next of 255 steps.
    near = {"atol": 1e-3} if "compressor" in name else {"rtol": 1e-5, "atol": 1e-6}
    check = functools.partial(np.testing.assert_allclose, **near)
    jax.tree.map(check, actual, expected)


def test_one_axis_may_be_automatic_and_the_other_explicit():
    """The other way round is a column of the table."""
    name, (names, shape, kinds) = '`local_rounds`, a batch over "data"', MIXED[1]
    with jax.set_mesh(made := jax.make_mesh(shape, names, kinds)):
        result = FEATURES[name](Run(made))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), result, simulated(name))
