"""Whatever is made while a function is traced is as good as what is made outside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
import ordering
from syncopate import models
from tests import tables

PLAN = local_opt.constant(2, total_steps=4)
SGD = optax.sgd(0.1, momentum=0.9)
KEY = jax.random.key(3)


def use_order(order):
    run = jax.vmap(order.init, (0, None), axis_name="worker")
    state = run(jax.random.split(jax.random.key(0), 2), jnp.zeros(2))
    observe = jax.vmap(lambda s, g: order.observe(s, ordering.Rows.of(g)), axis_name="worker")
    state = observe(state, jnp.ones((2, 1, 2)))
    return jax.vmap(order.next_epoch, axis_name="worker")(state).current


def use_optimizer(opt):
    x = jnp.ones(2)
    state = jax.vmap(opt.init)(x)
    update = jax.vmap(lambda g, s, x: opt.update(g, s, x), axis_name="worker")
    return update(x, state, x)[0]


def use_rounds(rounds):
    x = jnp.ones(2)
    updates, state = jax.vmap(rounds.update, axis_name="worker")(x, jax.vmap(rounds.init)(x), x)
    return jax.vmap(rounds.sync, axis_name="worker")(x + updates, state)[0]


def use_streaming(stream):
    x = jnp.ones(2)
    _, state = jax.vmap(stream.update)(x, jax.vmap(stream.init)(x), x)
    start = jax.vmap(lambda x, s: stream.start(x, s, fragment=0), axis_name="worker")
    return jax.vmap(lambda x, s: stream.finish(x, s, fragment=0))(x, start(x, state))[0]


def use_gradients(gradients):
    return gradients(jnp.ones(2), jnp.ones((3, 2)), jax.random.key(0))[1]


def loss(params, batch, key):
    return batch @ params


def use_outer(outer):
    return outer.update(jnp.ones(2), outer.init(jnp.ones(2)), period=jnp.int32(2))[0]


def use_rule(rule):
    return rule.sign(rule.init(jax.random.key(0)), jnp.float32(0.5), jnp.float32(1.0))[1]


def use_plan(plan):
    return np.frombuffer(bytes.fromhex(plan.digest()), np.uint8)


def use_model(model):
    return jax.tree.leaves(model.init(jax.random.key(0)))[0]


MADE = {
    **{n: (lambda row=row: row.make(5, 1), use_order) for n, row in tables.ORDERS.items()},
    **{n: (make, use_rule) for n, make in tables.RULES.items()},
    **{
        f"{kind} {n}": (lambda m=m: m(12), use_plan)
        for kind, table in (("plan", tables.PLANS), ("echo", tables.ECHO_PLANS))
        for n, m in table.items()
        if n != "bernoulli"  # draws from a key of the table, and that would be one of the trace
    },
    "local_steps": (lambda: local_opt.local_steps(SGD, PLAN, axis_name="worker"), use_optimizer),
    "accumulate": (lambda: local_opt.accumulate(SGD, PLAN, axis_name="worker"), use_optimizer),
    "diloco": (
        lambda: local_opt.diloco(SGD, PLAN, axis_name="worker", momentum=0.0),
        use_optimizer,
    ),
    "streaming_rounds": (
        lambda: local_opt.streaming_rounds(SGD, axis_name="worker", fragments=1),
        use_streaming,
    ),
    "lift": (
        lambda: local_opt.lift(jnp.sin, 2, inputs=("owned",), outputs="owned"),
        lambda lifted: lifted(jnp.ones(2)),
    ),
    "dealt": (
        lambda: ordering.dealt(ordering.cd_grab(5, units_per_step=1), 5),
        use_order,
    ),
    "dealt_reshuffling": (lambda: ordering.dealt_reshuffling(5), use_order),
    "per_example": (lambda: ordering.per_example(loss), use_gradients),
    "microbatch": (lambda: ordering.microbatch(lambda *a: loss(*a).mean()), use_gradients),
    "sketched": (lambda: ordering.sketched(loss, KEY, size=2), use_gradients),
    "parallel_rounds": (lambda: local_opt.parallel_rounds(SGD, axis_name="worker"), use_rounds),
    "local_rounds": (lambda: local_opt.local_rounds(SGD, axis_name="worker"), use_rounds),
    "accumulated_rounds": (
        lambda: local_opt.accumulated_rounds(SGD, axis_name="worker"),
        use_rounds,
    ),
    "nesterov": (local_opt.nesterov, lambda o: o.update(jnp.ones(2), o.init(jnp.ones(2)))[0]),
    "slow_momentum": (
        local_opt.slow_momentum,
        lambda o: o.update(jnp.ones(2), o.init(jnp.ones(2)))[0],
    ),
    "normalize_by_period": (
        lambda: local_opt.normalize_by_period(local_opt.nesterov(), h_base=2),
        use_outer,
    ),
    "proximal_anchor": (
        lambda: ordering.echo.proximal_anchor(0.5),
        lambda o: o.update(jnp.ones(2), o.init(jnp.zeros(2)), jnp.ones(2), fresh=False)[0],
    ),
    "measured": (
        lambda: ordering.echo.measured(
            total_steps=9, max_factor=3, floor=optax.constant_schedule(0.5)
        ),
        lambda policy: policy.at_least,
    ),
    "mlp": (lambda: models.mlp(num_features=3, hidden=(4,), num_classes=2), use_model),
}


@pytest.mark.parametrize("trace", [jax.eval_shape, lambda f: jax.jit(f)()], ids=["shape", "jit"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_inside_a_trace_may_leave_it(name, trace):
    make, use = MADE[name]
    made = []
    trace(lambda: made.append(make()))
    np.testing.assert_array_equal(use(made[0]), use(make()))


@pytest.mark.parametrize("make", [local_opt.bernoulli, ordering.echo.bernoulli])
def test_draws_from_a_key_that_is_there_are_made_at_once(make):
    key, made = jax.random.key(5), []
    jax.eval_shape(lambda: made.append(make(0.5, total_steps=30, key=key)))
    assert made[0] == make(0.5, total_steps=30, key=jax.random.key(5))
