"""Orders, gradients and rounds work wherever a JAX program may put them, with the same numbers.

The default suite traces loops and gradients, where types, axes and carries are refused, and runs a
few; all of them: `pytest -m "" tests/project/test_anywhere.py`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import ordering
from tests import tables
from tests.cases import mostly_slow
from tests.problems import RUNS

W, M, B, D, T = 4, 4, 2, 6, 2
SGD = optax.sgd(0.1, momentum=0.9)
PLAN = local_opt.constant(2, total_steps=T)
KEYS = jax.random.split(jax.random.key(0), W)
ROWS = tables.whole_numbers((W, M, D))  # of each worker's units
SKETCH_KEY = jax.random.key(3)
PARAMS = jnp.linspace(-1.0, 1.0, D)


class Subject(NamedTuple):
    """How something is made, and a run of it: pure functions of one worker."""

    make: Callable
    init: Callable  # (made, key, rows) -> state
    step: Callable  # (made, state, rows) -> state
    end: Callable = lambda made, state: state
    value: Callable = lambda state: state  # what is compared


def of_order(make):
    def step(order, state, rows):
        unit = jax.lax.dynamic_slice_in_dim(state[0].current, B * state[1], B) % M
        orders = order.sync(order.observe(state[0], rows[unit]))
        return orders, state[1] + 1

    return Subject(
        make,
        lambda order, key, rows: (order.init(key, rows[0]), jnp.zeros((), jnp.int32)),
        step,
        lambda order, state: (order.next_epoch(state[0]), jnp.zeros_like(state[1])),
        lambda state: state[0].current,
    )


def loss(params, batch, key):
    del key
    return jnp.square(batch @ params)


def mean_loss(params, batch, key):
    return jnp.mean(loss(params, batch, key))


def of_gradients(make):
    def step(gradients, params, rows):
        _, mean, result = gradients(params, rows, key=jax.random.key(0))
        return params - 1e-3 * mean - 1e-3 * jnp.mean(result @ jnp.sum(result, axis=0))

    return Subject(make, lambda made, key, rows: PARAMS + 0 * rows[0], step)


def of_steps(make):
    def step(opt, carry, rows):
        params, state = carry
        updates, state = opt.update(params - rows.mean(axis=0), state, params)
        return optax.apply_updates(params, updates), state

    def init(opt, key, rows):
        params = PARAMS + 0 * rows[0]  # of a worker, as whatever has been trained
        return params, opt.init(params)

    return Subject(make, init, step, value=lambda carry: carry[0])


def of_rounds(make):
    steps = of_steps(make)
    return steps._replace(end=lambda rounds, carry: rounds.sync(*carry))


def of_streaming(make):
    steps = of_steps(make)

    def step(stream, carry, rows):
        params, state = steps.step(stream, carry, rows)
        return stream.finish(params, stream.start(params, state, fragment=0), fragment=0)

    return steps._replace(step=step)


def opt(function, *args, **options):
    return lambda: function(SGD, *args, axis_name="worker", **options)


SUBJECTS = {
    **{name: of_order(lambda row=row: row.make(M, B)) for name, row in tables.ORDERS.items()},
    "dealt": of_order(lambda: ordering.global_order(ordering.cd_grab(M, units_per_step=B), M)),
    "global_reshuffling": of_order(lambda: ordering.global_reshuffling(M)),
    "per_example": of_gradients(lambda: ordering.per_example_grads(loss)),
    "microbatch": of_gradients(
        lambda: ordering.microbatch_grads(lambda *a, key: jnp.mean(loss(*a, key)))
    ),
    "sketched": of_gradients(lambda: ordering.sketched_grads(loss, SKETCH_KEY, size=D)),
    "local_steps": of_steps(opt(local_opt.local_steps, PLAN)),
    "local_steps, compressor": of_steps(
        opt(local_opt.local_steps, PLAN, compress=local_opt.quantize("int8"), sync_opt_state="mean")
    ),
    "diloco": of_steps(opt(local_opt.presets.diloco, PLAN, momentum=0.0)),
    "local_rounds": of_rounds(opt(local_opt.local_rounds)),
    "local_rounds, corrected": of_rounds(
        opt(local_opt.local_rounds, correction=local_opt.corrections.scaffold())
    ),
    "parallel_rounds": of_rounds(opt(local_opt.parallel_rounds)),
    "accumulated_rounds": of_rounds(opt(local_opt.accumulated_rounds)),
    "streaming_rounds": of_streaming(opt(local_opt.streaming.streaming_rounds, fragments=1)),
}


def epoch(subject, made, state, rows, wrap=lambda f: f):
    """T steps, and what ends them."""
    step = wrap(functools.partial(subject.step, made))
    for _ in range(T):
        state = step(state, rows)
    return subject.end(made, state)


def plain(subject, made, key, rows, wrap=lambda f: f):
    state = subject.init(made, key, rows)
    for _ in range(2):
        state = epoch(subject, made, state, rows, wrap)
    return subject.value(state)


def scanned(subject, made, key, rows):
    """Rounds, or epochs, in a loop that is compiled; their steps in another one."""

    def steps(state, _):
        return subject.step(made, state, rows), None

    def body(state, _):
        return subject.end(made, jax.lax.scan(steps, state, None, length=T)[0]), None

    state = subject.init(made, key, rows)
    return subject.value(jax.lax.scan(body, state, None, length=2)[0])


def differentiated(subject, made, key, rows):
    """Inside a function whose gradient somebody takes, of the rows among others."""

    def outer(scale):
        value = plain(subject, made, key, scale * rows)
        total = jnp.sum(value.astype(jnp.float32)) + jnp.sum(jnp.square(scale * rows))
        return total, value

    grad, value = jax.grad(outer, has_aux=True)(jnp.ones(()))
    return jnp.where(jnp.isfinite(grad), value, jnp.full_like(value, -1))


INSIDE = {
    "plain": plain,
    "scan": scanned,
    "checkpoint": functools.partial(plain, wrap=jax.checkpoint),
    "grad": differentiated,
    "made there": lambda subject, made, *a: plain(subject, subject.make(), *a),
}


def mapped(workers):
    return lambda function: local_opt.map_workers(
        function, workers, in_specs="worker", out_specs="worker"
    )


def explicit(function):
    return mapped(jax.make_mesh((W,), ("worker",), devices=jax.devices()[:W]))(function)


OVER = {**RUNS, "map_workers": mapped(W), "map_workers, mesh": explicit}


def program(name, inside, over):
    subject = SUBJECTS[name]
    made = subject.make()
    return OVER[over](lambda key, rows: INSIDE[inside](subject, made, key, rows))


@functools.cache
def shape_of(name):
    return jax.eval_shape(program(name, "plain", "vmap"), KEYS, ROWS)


# What differs in its types and carries.
TRACED = [
    ("shard_map", ("scan", "grad")),
    ("shard_map", ("checkpoint", "made there")),
    ("map_workers, mesh", ("scan",)),
]


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("over,places", mostly_slow(TRACED, quick=TRACED[:1]))
def test_every_place_can_be_traced(name, over, places):
    shape = shape_of(name)
    for inside in places:
        there = jax.eval_shape(program(name, inside, over), KEYS, ROWS)
        assert (there.shape, there.dtype) == (shape.shape, shape.dtype), inside


# Two loops and an explicit axis, whose types JAX checks, have all that can go wrong at once.
RUN = ("cd_grab", "dealt", "sketched", "local_steps", "local_rounds", "streaming_rounds")
SOME = [(name, "scan", "map_workers, mesh") for name in RUN]
ALL = [c for c in itertools.product(SUBJECTS, INSIDE, OVER) if c[1:] != ("plain", "vmap")]


@pytest.mark.parametrize("name,inside,over", mostly_slow(ALL, quick=SOME))
def test_every_place_gives_the_same_numbers(name, inside, over):
    actual = jax.jit(program(name, inside, over))(KEYS, ROWS)
    expected = jax.jit(program(name, "plain", "vmap"))(KEYS, ROWS)
    # The same sums, compiled otherwise; orders are whole numbers.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def traced(make):
    """(what a trace has made, the operations that it asks of a device, known or not)."""
    made = []
    return made, jax.make_jaxpr(lambda: made.append(make()) or ())().jaxpr.eqns


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_made_in_a_trace_may_leave_it_and_asks_nothing_of_a_device(name):
    subject = SUBJECTS[name]
    (made,), operations = traced(subject.make)
    assert not operations
    jax.eval_shape(RUNS["vmap"](functools.partial(plain, subject, made)), KEYS, ROWS)
    assert traced(lambda: jnp.arange(3).sum())[1], "array work would be seen"


PLANS = {**tables.PLANS, **{f"echo {name}": make for name, make in tables.ECHO_PLANS.items()}}


@pytest.mark.parametrize("name", [name for name in PLANS if "bernoulli" not in name])
def test_a_plan_made_in_a_trace_is_the_plan(name):
    (made,), _ = traced(lambda: PLANS[name](12))
    assert made == PLANS[name](12)


@pytest.mark.parametrize("make", [local_opt.bernoulli, ordering.echo.bernoulli])
def test_draws_from_a_key_that_is_there_are_made_at_once(make):
    key = jax.random.key(5)
    (made,), _ = traced(lambda: make(0.5, total_steps=30, key=key))
    assert made == make(0.5, total_steps=30, key=key)
    with pytest.raises(ValueError, match="traced: make it before jax.jit"):
        traced(lambda: make(0.5, total_steps=30, key=jax.random.key(5)))


@pytest.mark.parametrize(
    "ask",
    [
        lambda plan, step: plan.after(step, jnp.ones((2, 3)), 2),
        lambda plan, step: plan.syncs_after(step),
        lambda plan, step: plan.aligned(every=step + 0.5),
        lambda plan, step: ordering.echo.fixed(step, total_steps=4),
    ],
)
def test_a_number_of_a_plan_that_is_traced_is_refused_with_what_to_do(ask):
    plan = local_opt.constant(2, total_steps=4)
    with pytest.raises(ValueError, match="Tracer.*: pass .*, outside of jax.jit and jax.lax.scan"):
        jax.jit(functools.partial(ask, plan))(1)


def test_what_is_drawn_at_once_is_so_on_a_mesh_that_is_not_in_scope():
    """Explicit axes of several devices are named in a mapped step, and no device is known."""
    sketched, key = ordering.sketched_grads(lambda w, x: x @ w, jax.random.key(7), size=8), KEYS[0]

    def step(w, x):
        plan = local_opt.bernoulli(lambda t: 1 / (1 + t), total_steps=30, key=key)
        return sketched(w, x)[2], plan.rounds

    w, x = np.ones(50, "f"), np.random.default_rng(0).normal(size=(2, 3, 50)).astype("f")
    actual, expected = (
        jax.jit(
            local_opt.map_workers(
                step, workers, in_specs=("replicated", "worker"), out_specs=("worker", "replicated")
            )
        )(w, x)
        for workers in (jax.make_mesh((2, 4), ("worker", "data")), 2)
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    assert actual[1] == expected[1]


DONATED = [n for n in SUBJECTS if n not in ("per_example", "microbatch")]


@pytest.mark.parametrize("name", mostly_slow(DONATED, quick=DONATED[::3]))
def test_a_whole_state_may_be_donated(name):
    """As it comes from its functions, outside jit: no buffer is in it twice."""
    subject = SUBJECTS[name]
    made = subject.make()
    keep = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), donate_argnums=0)
    keys, rows = jax.random.split(jax.random.key(1), W), jnp.asarray(ROWS)
    state = RUNS["vmap"](functools.partial(subject.init, made))(keys, rows)
    keep(RUNS["vmap"](functools.partial(subject.end, made))(keep(state)))
    assert not any(x.is_deleted() for x in (keys, rows))
