"""A small network whose workers are several devices each, in three ways, and on one device.

W workers of 8 / W devices: mesh axes "worker" and "model".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import local_opt
import ordering
from syncopate.mesh import like
from tests.problems import copies, of_one

UNITS, BATCH, EPOCHS = 12, 4, 4
IN, HIDDEN, OUT = 12, 16, 3
SPECS = {"b1": P("model"), "b2": P(), "w1": P(None, "model"), "w2": P("model", None)}
SYNC_EVERY = 5
MESHES = [2, 4]  # workers, of 4 and of 2 devices
SGD = optax.sgd(0.05, momentum=0.9)
SKETCH = jax.random.key(3)
COORDINATED = functools.partial(ordering.cd_grab, gathers="sync")


def network(hidden=HIDDEN):
    """One model's parameters."""
    keys = jax.random.split(jax.random.key(0), 2)
    w1 = 0.3 * jax.random.normal(keys[0], (IN, hidden))
    w2 = 0.3 * jax.random.normal(keys[1], (hidden, OUT))
    return {"b1": jnp.zeros(hidden), "b2": jnp.zeros(OUT), "w1": w1, "w2": w2}


def data_of(workers):
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(workers, UNITS, n)).astype(np.float32) for n in (IN, OUT))
    return {"x": x, "y": y}


def loss(params, batch, key, *, second=jnp.matmul):
    """One loss per example; `second` is the product over what the devices of a worker share."""
    del key
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"][None])
    return jnp.sum((second(hidden, params["w2"]) + params["b2"][None] - batch["y"]) ** 2, axis=-1)


# `over` runs a function of one worker for all; `loss` is that of the way.


def mesh_of(workers):
    return jax.make_mesh((workers, 8 // workers), ("worker", "model"), (AxisType.Auto,) * 2)


def on_one_device(workers):
    del workers
    return lambda f, *_: jax.jit(jax.vmap(f, axis_name="worker")), loss


def left_to_the_compiler(workers, check_vma=True, mesh=None):
    """Only the workers' axis is manual."""
    mesh, spec = mesh or mesh_of(workers), P("worker")

    def over(function, *_):
        return jax.jit(
            jax.shard_map(
                of_one(function),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                axis_names={"worker"},
                check_vma=check_vma,
            )
        )

    return over, loss


def by_hand(workers):
    """Both axes are manual; functions say where their arguments and results live."""

    def over(function, in_specs, out_specs):
        return jax.jit(
            jax.shard_map(
                of_one(function),
                mesh=mesh_of(workers),
                in_specs=tuple(map(per_worker, in_specs)),
                out_specs=jax.tree.map(per_worker, out_specs),
            )
        )

    def add(hidden, w2):
        return lax.psum(hidden @ w2, "model")

    return over, functools.partial(loss, second=add)


def per_worker(specs):
    """Specs with the workers' axis in front."""
    return jax.tree.map(lambda spec: P("worker", *spec), specs)


WAYS = {"compiler": left_to_the_compiler, "by hand": by_hand}


def placed(tree, specs, mesh):
    """Arrays with a leading worker axis, in their places."""
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, like(per_worker(specs), tree), tree)


class Programs:
    """What a loop runs: `init`, `step`, `sync` and `next_epoch`, of all workers."""

    def __init__(self, way, rounds, order, *, units, rows_of, size):
        over, loss = way
        gradients = ordering.per_example_grads(loss)

        def init(params, key):
            return rounds.init(params), order.init(key, jnp.zeros(size))

        def step(params, state, orders, data, start):
            mine = lax.dynamic_slice_in_dim(orders.current, start, units)
            batch = jax.tree.map(lambda x: x[mine], data)
            losses, mean, rows = gradients(params, batch, key=jax.random.key(0))
            updates, state = rounds.update(mean, state, params)
            params = optax.apply_updates(params, updates)
            return params, state, order.observe(orders, rows_of(rows)), losses

        def sync(params, state, orders):
            return *rounds.sync(params, state), order.sync(orders)

        state, orders = state_specs(rounds), P()
        self.places = state, orders  # of what `init` gives
        self.init = over(init, (SPECS, P()), (state, orders))
        self.step = over(step, (SPECS, state, orders, P(), P()), (SPECS, state, orders, P()))
        self.sync = over(sync, (SPECS, state, orders), (SPECS, state, orders))
        self.next_epoch = over(order.next_epoch, (orders,), orders)


def state_specs(rounds):
    """Where momentum, anchor and what is lost live: as the parameters do; the rest is whole."""
    tree = jax.tree.structure(SPECS)
    has_tree = lambda part: jax.tree.structure(part) == tree  # noqa: E731
    shapes = jax.eval_shape(rounds.init, network())
    return jax.tree.map(lambda part: SPECS if has_tree(part) else P(), shapes, is_leaf=has_tree)


def trained(programs, params, data):
    """(losses [W, T], orders [E, W, M], parameters, state, orders' state) of all epochs."""
    workers, t = len(data["x"]), 0
    state, orders = programs.init(params, jax.random.split(jax.random.key(7), workers))
    losses, seen = [], []
    for _ in range(EPOCHS):
        for start in range(0, UNITS, BATCH):
            starts = jnp.full(workers, start)
            params, state, orders, result = programs.step(params, state, orders, data, starts)
            losses.append(np.asarray(result))
            t += 1
            if t % SYNC_EVERY == 0:
                params, state, orders = programs.sync(params, state, orders)
        orders = programs.next_epoch(orders)
        seen.append(np.asarray(orders.current))
    return np.concatenate(losses, axis=1), np.stack(seen), params, state, orders


def rounds_of(specs, **options):
    return local_opt.local_rounds(SGD, axis_name="worker", specs=specs, drift=True, **options)


def sketched(way, *, specs=SPECS, order_of=COORDINATED, size=512, units=BATCH):
    """512 numbers hold all entries as they are, so that orders are the same for every split."""
    to_sketch = ordering.make_sketch(SKETCH, size=size, specs=specs)
    order = order_of(UNITS, units_per_step=units)
    return Programs(
        way, rounds_of(specs), order, units=units, rows_of=jax.vmap(to_sketch), size=size
    )


def alone(way, **options):
    """Orders without other workers."""
    return sketched(way, order_of=ordering.pair_balance, **options)


def assert_in_their_places(tree, specs):
    """No array is kept whole where it should be in shards, and all copies of it are equal."""
    for x, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        assert x.sharding.shard_shape(x.shape) == jax.NamedSharding(
            x.sharding.mesh, spec
        ).shard_shape(x.shape)
        seen = {}
        for shard in x.addressable_shards:
            first = seen.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, first)


@functools.cache
def on_one(kind, workers):
    """The same run, unsharded."""
    programs = kind(on_one_device(workers), specs=None)
    return trained(programs, copies(network(), workers), data_of(workers))


def sharded(programs, workers):
    mesh = mesh_of(workers)
    params = placed(copies(network(), workers), SPECS, mesh)
    return trained(programs, params, placed(data_of(workers), P(), mesh))


def assert_same_run(actual, expected):
    losses, orders, params = actual[:3]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(orders, expected[1])
    assert len({tuple(o) for o in orders[:, 0]}) == EPOCHS, "orders that change"
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
