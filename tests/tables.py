"""Every order, sign rule and plan once, with what tests go through.

A public function that has no row is taken with the values that its signature gives.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from ordering.signs import Greedy, SignRule
from tests import reference
from tests.problems import on_mesh
from tests.public import returning


class Order(NamedTuple):
    make: Callable  # (num_units, units_per_step) -> Ordering
    observes: bool = True
    coordinated: bool = False


def observing(make, **options):
    return lambda m, b: make(m, units_per_step=b, **options)


def halving(m, b):
    rule = ordering.baselines.kernel_halving(num_epochs=4, num_pairs=max(1, m // 2))
    return ordering.pair_balance(m, units_per_step=b, rule=rule)


WALK = ordering.baselines.self_balancing_walk(bound=200.0)
ORDERS = {
    "random_reshuffling": Order(observing(ordering.random_reshuffling), observes=False),
    "shuffle_once": Order(observing(ordering.baselines.shuffle_once), observes=False),
    "block_reshuffling": Order(
        lambda m, b: ordering.baselines.block_reshuffling(
            m, block_size=min(3, m), units_per_step=b
        ),
        observes=False,
    ),
    "unzip": Order(observing(ordering.baselines.unzip), observes=False),
    "grab": Order(observing(ordering.grab)),
    "pair_balance": Order(observing(ordering.pair_balance)),
    "pair_balance_walk": Order(observing(ordering.pair_balance, rule=WALK)),
    "kh": Order(halving),
    "greedy_herding": Order(observing(ordering.baselines.greedy_herding)),
    "cd_grab": Order(observing(ordering.cd_grab), coordinated=True),
    "cd_grab, gathered": Order(observing(ordering.cd_grab, gathers="step"), coordinated=True),
    "cd_grab, at syncs": Order(observing(ordering.cd_grab, gathers="sync"), coordinated=True),
    "cd_grab_walk": Order(observing(ordering.cd_grab, rule=WALK), coordinated=True),
}


def with_methods(order, **methods):
    """The order with some of its methods replaced."""
    kind = type(type(order).__name__, (type(order),), methods)
    return kind(**{field.name: getattr(order, field.name) for field in dataclasses.fields(order)})


def traits(order, units_per_step):
    """Whether an order looks at gradients, and whether it needs those of all workers."""

    def observe(key, rows):
        return order.observe(order.init(key, jnp.zeros(3)), rows)

    key, rows = jax.random.key(0), jnp.zeros((units_per_step, 3))
    try:
        traced, coordinated = jax.make_jaxpr(observe)(key, rows), False
    except ValueError:  # it needs the axis
        keys, stacked = jax.random.split(key), jnp.stack([rows, rows])
        traced = jax.make_jaxpr(jax.vmap(observe, axis_name="worker"))(keys, stacked)
        coordinated = True
    given = traced.jaxpr.invars[1]
    return any(given is of for eqn in traced.eqns for of in eqn.invars), coordinated


RULES = {
    "greedy": Greedy,
    "self_balancing_walk": ordering.baselines.self_balancing_walk,
    "kernel_halving": lambda: ordering.baselines.kernel_halving(num_epochs=3, num_pairs=8),
}


def whole_numbers(shape, seed=0, high=8):
    """Small whole numbers as float32: every product and sum is exact, so ties are real ties."""
    return np.random.default_rng(seed).integers(-high, high + 1, shape).astype(np.float32)


def steps(num_units, units_per_step):
    """The (start, stop) of every step of an epoch, the short last one included."""
    starts = range(0, num_units, units_per_step)
    return [(s, min(s + units_per_step, num_units)) for s in starts]


def run_epoch(order, state, gradients, units_per_step):
    """One worker's epoch, step by step: gradients [M, D] (or a tree of them) belong to units."""
    units = state.current

    def observe(state, unit):
        rows = jax.tree.map(lambda g: jnp.asarray(g)[unit], gradients)
        return order.observe(state, rows), None

    whole = len(units) - len(units) % units_per_step
    # A loop that is compiled, not unrolled: a step is compiled once, and a short last one once.
    state, _ = jax.lax.scan(observe, state, units[:whole].reshape(-1, units_per_step))
    if whole < len(units):
        state, _ = observe(state, units[whole:])
    return order.next_epoch(state)


def vmap_workers(function):
    return jax.jit(jax.vmap(function, axis_name="worker"))


def shard_map_workers(function):
    """The same per-worker function, one worker per device."""

    @jax.jit
    def run(*args):
        workers = jax.tree.leaves(args)[0].shape[0]
        return on_mesh(function, workers, check_vma=False)(*args)

    return run


def run_workers(order, gradients, units_per_step, *, epochs=2, run=vmap_workers, seed=0):
    """Orders [epochs + 1, W, M] of all workers; gradients [W, M, D]."""
    gradients = jnp.asarray(gradients)
    keys = jax.random.split(jax.random.key(seed), gradients.shape[0])

    def init(key, gradients):
        return order.init(key, gradients[0])

    def epoch(state, gradients):
        return run_epoch(order, state, gradients, units_per_step)

    state = run(init)(keys, gradients)
    orders = [np.asarray(state.current)]
    run_one = run(epoch)
    for _ in range(epochs):
        state = run_one(state, gradients)
        assert (state.epoch == len(orders)).all()
        orders.append(np.asarray(state.current))
    assert run_one._cache_size() == 1, "a state keeps its structure, shapes and dtypes"
    return np.stack(orders)


def reference_orders(name, first, gradients, epochs):
    """Orders [epochs + 1, W, M] of the NumPy reference, from the first orders on."""
    orders = [np.asarray(first)]
    means = [np.zeros(gradients.shape[2]) for _ in first]
    for _ in range(epochs):
        current = orders[-1]
        if name.startswith("cd_grab"):
            following = reference.cd_grab_epoch(current, gradients)
        elif name == "grab":
            pairs = [
                reference.grab_epoch(o, g, m)
                for o, g, m in zip(current, gradients, means, strict=True)
            ]
            following, means = [p[0] for p in pairs], [p[1] for p in pairs]
        else:
            following = [REFERENCES[name](o, g) for o, g in zip(current, gradients, strict=True)]
        orders.append(np.array(following))
    return np.stack(orders)


REFERENCES = {
    "pair_balance": reference.pair_balance_epoch,
    "unzip": lambda order, gradients: reference.unzip(order),
    "shuffle_once": lambda order, gradients: order,
    "greedy_herding": lambda order, gradients: reference.greedy_order(gradients),
}


COSINE = reference.warmup_cosine(0.1, 0, 40, 1e-4)

# Every rule that makes a plan once: total_steps -> SyncPlan, for any total_steps >= 1.
PLANS = {
    "constant": lambda t: local_opt.constant(4, total_steps=t),
    "qsr": lambda t: local_opt.qsr(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 41, 1e-4),
        total_steps=t,
        alpha=0.12,
        h_base=2,
        warmup_steps=min(3, t),
    ),
    "qsr, power 1": lambda t: local_opt.qsr(
        COSINE, total_steps=t, alpha=0.25, h_base=2, power=1, h_max=9
    ),
    "qsr, power 3": lambda t: local_opt.qsr(COSINE, total_steps=t, alpha=0.12, h_base=1, power=3),
    "bernoulli": lambda t: local_opt.bernoulli(0.3, total_steps=t, key=jax.random.key(7)),
    "from_function": lambda t: local_opt.from_function(lambda s: 1 + s % 5, total_steps=t),
    "aligned": lambda t: local_opt.constant(4, total_steps=t).aligned(every=3.5),
}

# Every maker of a plan to echo once: total_steps -> EchoPlan, for any total_steps >= 1.
ECHO_PLANS = {
    "fixed": lambda t: ordering.echo.fixed(3, total_steps=t),
    "bernoulli": lambda t: ordering.echo.bernoulli(
        optax.cosine_decay_schedule(1.0, 40, alpha=0.25), total_steps=t, key=jax.random.key(5)
    ),
    "error_diffusion": lambda t: ordering.echo.error_diffusion(
        optax.linear_schedule(1.0, 0.25, 40), total_steps=t
    ),
    "given steps": lambda t: ordering.echo.EchoPlan([s % 7 in (0, 2, 3) for s in range(t)]),
}


# Public functions without a row.


def needed(make, **usual):
    """Values of the arguments without a default: the usual ones, or some of their type."""
    some = {int: 2, float: 0.5}
    return {
        name: usual[name] if name in usual else some[parameter.annotation]
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is parameter.empty
    }


def without_row(kind, rows, *packages):
    named = {name.partition(",")[0] for name in rows}
    return {n: make for n, make in returning(kind, *packages).items() if n not in named}


def order_row(make):
    def made(m, b):
        return make(**needed(make, num_units=m), units_per_step=b)

    return Order(made, *traits(made(7, 3), 3))


def plan_of(make):
    def made(t):
        usual = {"key": jax.random.key(7), "p": 0.3, "lr": COSINE, "total_steps": t}
        return make(**needed(make, **usual))

    return made


for name, make in without_row(SignRule, RULES, ordering.baselines).items():
    RULES[name] = functools.partial(make, **needed(make))
    ORDERS[f"pair_balance, {name}"] = Order(observing(ordering.pair_balance, rule=RULES[name]()))
for name, make in without_row(ordering.Ordering, ORDERS, ordering, ordering.baselines).items():
    takes = inspect.signature(make).parameters
    if "num_units" in takes and "total" not in takes:  # those of all units: another test
        if not make(**needed(make, num_units=7)).computed:  # computed: test_counted.py
            ORDERS[name] = order_row(make)
for name, make in without_row(local_opt.SyncPlan, PLANS, local_opt).items():
    PLANS[name] = plan_of(make)
for name, make in without_row(ordering.echo.EchoPlan, ECHO_PLANS, ordering.echo).items():
    ECHO_PLANS[name] = plan_of(make)
