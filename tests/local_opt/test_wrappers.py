"""Optax inside local steps, before them and around them: equal to a plain loop, or found out.

On meshes too: `pytest -m "" tests/local_opt/test_wrappers.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import local_opt
from syncopate import mesh
from tests.cases import mostly_slow
from tests.plain_loop import Mean, history
from tests.problems import RUNS, W, copies

STEPS = 6
PLAN = local_opt.SyncPlan([0, 2, 3], STEPS)  # rounds of 2, 1, 3 steps
RNG = np.random.default_rng(5)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=4), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32),
}
TARGETS = {
    "b": jnp.asarray(RNG.normal(size=(W, STEPS, 4)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(W, STEPS, 3, 4)), jnp.float32),
}
SGD = optax.sgd(0.1, momentum=0.9)
ONLY_W = {"b": False, "w": True}


def square(params, target):
    return 0.5 * optax.tree.norm(optax.tree.sub(params, target), squared=True)


def one_step(opt, params, state, target, extra=(), at=None):
    """A step of one worker, with what the optimizer needs beside a gradient, taken `at` a point."""
    at = params if at is None else at
    value, grads = jax.value_and_grad(square)(at, target)
    given = {
        "value": value,
        "grad": grads,
        "value_fn": lambda params: square(params, target),
        "grad_fn": lambda params, i: jax.grad(square)(params, target),
    }
    updates, state = opt.update(grads, state, params, **{name: given[name] for name in extra})
    return optax.apply_updates(params, updates), state


def expected(make, synced=(), extra=(), plans=None):
    """([W, STEPS, ...], kept): the plain loop, with means where a round ends.

    Args:
      make: of the optimizer.
      synced: fields of its state that are averaged, too.
      extra: arguments that it needs.
      plans: of some of the parameters alone, by name.

    `kept` is what a step leaves of a move of worker 0's parameters, at least: 1 if it only adds.
    """
    plans = {"b": PLAN, "w": PLAN} if plans is None else plans
    opts, kept = [make() for _ in range(W)], []  # each with a key of its own, if any
    step = jax.jit(lambda *args: one_step(opts[0], *args[:3], extra, args[3]))

    def one(w, t, params, state):
        target = jax.tree.map(lambda x: x[w, t], TARGETS)
        after = step(params, state, target, params)
        if w == 0:
            other = jax.tree.map(lambda x: x + 0.01, params)
            moved = step(other, jax.tree.map(jnp.copy, state), target, params)[0]
            kept.extend(float((moved[n] - after[0][n]).mean() / 0.01) for n in PARAMS)
        return after

    due = {t: {n for n, plan in plans.items() if plan.syncs_after(t)} for t in range(STEPS)}
    means = {t: Mean(params=some, state={*synced}) for t, some in due.items() if some}
    result = history(one, PARAMS, [opt.init(PARAMS) for opt in opts], STEPS, means)
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1), result), min(kept)


def result_of(opt, run="vmap", extra=()):
    """The same of what is to be tested, in one compiled loop: history, and the last state."""

    @jax.jit
    @RUNS[run]
    def all_steps(params, targets):
        def body(carry, target):
            carry = mesh.varying(one_step(opt, *carry, target, extra), params)
            return carry, carry[0]

        start = mesh.varying((params, opt.init(params)), params)
        (_, state), history = jax.lax.scan(body, start, targets)
        return history, state

    return all_steps(copies(PARAMS), TARGETS)


def assert_equal(history, reference):
    # float32 sums in another order, over six steps of numbers of about 1.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), history, reference
    )


def last(history):
    return jax.tree.map(lambda x: x[:, -1], history)


def local(inner, plan=PLAN, **options):
    return local_opt.local_steps(inner, plan, axis_name="worker", **options)


LABELS = {"b": "b", "w": "w"}
OTHER = local_opt.SyncPlan([0, 3], STEPS)
ADAM = optax.adam(0.1)

# Inside local steps.
OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adamw": lambda: optax.adamw(0.1, mask=ONLY_W),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 6), 0.9, nesterov=True),
    "sam, opaque": lambda: contrib.sam(
        SGD, optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
    ),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1),
    "galore": lambda: contrib.galore(0.1, rank=2),
    "muon": lambda: contrib.muon(0.1),
    "prodigy": lambda: contrib.prodigy(1.0, estim_lr0=0.1),
    "flatten": lambda: optax.flatten(SGD),
    "conditionally_mask": lambda: optax.conditionally_mask(SGD, lambda step: step % 2 == 0),
    "keep_params_nonnegative": lambda: optax.chain(SGD, optax.keep_params_nonnegative()),
    "partition": lambda: optax.partition({"b": optax.adam(0.1), "w": SGD}, LABELS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 6), momentum=0.9
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "MultiSteps": lambda: optax.MultiSteps(SGD, 2),
    "MultiSteps, with a value": lambda: optax.MultiSteps(
        optax.chain(SGD, contrib.reduce_on_plateau(0.5, patience=1)), 2
    ).gradient_transformation(),
    "selective_transform": lambda: optax.selective_transform(SGD, freeze_mask=ONLY_W),
}
# What transforms a worker's own gradient: inside or before, these are the same steps.
LINKS = {
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(2)),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "masked": lambda: optax.masked(optax.clip(0.5), ONLY_W),
    "named_chain": lambda: optax.named_chain(("one", optax.clip(1.0)), ("two", optax.trace(0.5))),
    "reduce_on_plateau": lambda: contrib.reduce_on_plateau(0.5, patience=1),  # by its own value
}
# What computes parameters from fields of its state is refused unless these meet, too.
SYNCED = {
    "schedule_free": (lambda: contrib.schedule_free_sgd(0.1), ("z",)),
    "sam": (
        lambda: contrib.sam(SGD, optax.chain(contrib.normalize(), optax.sgd(0.05))),
        ("cache",),
    ),
    "madgrad": (lambda: contrib.madgrad(0.1), ("s", "grad_sum_sq")),
    "cocob": (
        lambda: contrib.cocob(),
        ("cumulative_gradients", "scale", "subgradients", "reward"),
    ),
}
# What a row's update is passed beside a gradient.
EXTRA = {
    "reduce_on_plateau": ("value",),
    "MultiSteps, with a value": ("value",),
    "sam, opaque": ("grad_fn",),
    "lbfgs": ("value", "grad", "value_fn"),
}
# Conditionals of optax whose branches are typed otherwise: JAX refuses them where it checks types.
WITHOUT_VMA = ("lbfgs", "reduce_on_plateau", "MultiSteps, with a value")
# These look at where they are, and do not go back to where they were before a sync.
LESS = ("keep_params_nonnegative", "lbfgs", "sam, opaque")


def made(name):
    """A row's optimizer."""
    if name in LINKS:
        return optax.chain(LINKS[name](), SGD)
    return SYNCED[name][0]() if name in SYNCED else OPTIMIZERS[name]()


def after_round(name):
    return SYNCED[name][1] if name in SYNCED else ()


@functools.cache
def of_row(name):
    """(the expected history, what a step leaves of a move)."""
    wanted, kept = expected(lambda: made(name), after_round(name), EXTRA.get(name, ()))
    spread = max(np.ptp(x[:, -2], axis=0).max() for x in jax.tree.leaves(wanted))
    assert spread > 1e-4, "inside a round workers differ, or nothing is tested"
    return wanted, kept


MESHES, INSIDE = mostly_slow(RUNS, quick=("vmap",)), [*OPTIMIZERS, *LINKS, *SYNCED]


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", mostly_slow(INSIDE, quick=INSIDE[::3]))
def test_optax_inside_and_before_local_steps(name, run):
    policy, extra = dict.fromkeys(after_round(name), "mean") or "local", EXTRA.get(name, ())
    if name in WITHOUT_VMA and run == "shard_map":
        with pytest.raises(TypeError, match="cond branches must have equal output types"):
            result_of(made(name), run, extra)  # without anything of ours, too
        return
    seen, state = result_of(local(made(name), sync_opt_state=policy), run, extra)
    wanted, kept = of_row(name)
    assert (kept < 0.95) == (name in SYNCED or name in LESS), "would its next step undo a sync?"
    assert_equal(seen, wanted)
    local_opt.check_synced(last(seen))
    assert state.num_syncs.tolist() == [PLAN.rounds] * W and state.num_steps.tolist() == [STEPS] * W
    if name in LINKS:
        before, _ = result_of(optax.chain(LINKS[name](), local(SGD)), run, extra)
        assert_equal(before, wanted)
        local_opt.check_synced(last(before))


@pytest.mark.parametrize("name", SYNCED)
def test_state_that_would_undo_a_sync_is_refused(name):
    """Unless all of it meets, or is reset; fragments have no sync of it."""
    fields, params = after_round(name), PARAMS
    chained = optax.chain(optax.clip(1.0), made(name))
    for inner in (made(name), chained):
        for policy in ("local", {fields[-1]: "local"}):
            with pytest.raises(ValueError, match=f"contrib.{name} .*sync_opt_state=.*{fields[0]}"):
                local(inner, sync_opt_state=policy).init(params)
        stream = local_opt.streaming.streaming_rounds(inner, axis_name="worker", fragments=1)
        with pytest.raises(ValueError, match=f"contrib.{name} "):
            stream.init(params)
        for policy in ("mean", "reset", dict.fromkeys(fields, "reset")):
            local(inner, sync_opt_state=policy).init(params)
        local_opt.accumulated_rounds(inner, axis_name="worker").init(params)  # one state for all


@pytest.mark.parametrize("policy", ["mean", {"weights_memory": "mean"}])
def test_curvatures_of_lbfgs_are_not_averaged(policy):
    """Their means are no curvatures: it made NaN of a quadratic."""
    inner = optax.chain(optax.clip(1.0), optax.lbfgs(memory_size=2, linesearch=None))
    for kept in ("local", "reset"):
        local(inner, sync_opt_state=kept).init(PARAMS)
    with pytest.raises(ValueError, match="optax.lbfgs .*'local' .*'reset'"):
        local(inner, sync_opt_state=policy).init(PARAMS)


def test_multi_steps_hands_on_what_an_update_is_passed():
    """Inside, as an outer optimizer, and in every kind of rounds."""

    def update(grads, state, params=None, *, value=0.0, period=0, **extra):
        return jax.tree.map(lambda g: -g * (value + period), grads), state

    probe = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    inner, x = optax.MultiSteps(probe, 1), jnp.ones(3)
    opt = local_opt.local_steps(inner, PLAN, axis_name=())
    np.testing.assert_array_equal(opt.update(x, opt.init(x), x, value=2.0)[0], [-2.0] * 3)
    for make in (local_opt.local_rounds, local_opt.parallel_rounds):
        rounds = make(inner, axis_name=())
        result, _ = rounds.update(x, rounds.init(x), x, value=2.0)
        np.testing.assert_array_equal(result, [-2.0] * 3)
    outer = local_opt.local_rounds(SGD, axis_name=(), outer=inner)
    state = outer.init(x)._replace(since=jnp.int32(3))
    np.testing.assert_allclose(outer.sync(0.5 * x, state)[0], [1.0 - 3 * 0.5] * 3)


def private(rate):
    """As optax.contrib.dpsgd, whose arguments differ between versions."""
    aggregate = contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
    return optax.chain(aggregate, optax.sgd(rate))


ANOTHER_STRUCTURE = {
    "dpsgd": lambda: private(0.1),
    "lookahead": lambda: optax.lookahead(SGD, 2, 0.5),
}


@pytest.mark.parametrize("name", ANOTHER_STRUCTURE)
def test_optimizers_of_other_gradients_are_refused_by_name(name):
    make = ANOTHER_STRUCTURE[name]
    for inner in (make(), optax.MultiSteps(make(), 2), optax.masked(make(), ONLY_W)):
        for init in (
            local(inner).init,
            local_opt.local_rounds(inner).init,
            local_opt.parallel_rounds(inner).init,
            local_opt.accumulated_rounds(inner).init,
            local_opt.streaming.streaming_rounds(inner, fragments=1).init,
            local_opt.local_rounds(SGD, outer=inner).init,
        ):
            with pytest.raises(ValueError, match=f"optax.*{name} "):
                init(PARAMS)


def test_what_the_refusals_name_does_the_same():
    """Aggregation before local steps, and an outer step of SGD for lookahead."""
    part = jax.tree.map(lambda p: jnp.stack([p, -2 * p, 3 * p]), PARAMS)  # of three examples
    plan = local_opt.constant(2, total_steps=STEPS)
    alone, aggregate = private(0.1), contrib.differentially_private_aggregate
    opt = optax.chain(
        aggregate(1.0, 0.0, key=jax.random.key(0)),
        local_opt.local_steps(optax.sgd(0.1), plan, axis_name=()),
    )
    expected, _ = alone.update(part, alone.init(PARAMS), PARAMS)
    assert_equal(opt.update(part, opt.init(PARAMS), PARAMS)[0], expected)

    ahead = optax.lookahead(SGD, 2, 0.5)
    alone = local_opt.local_steps(SGD, plan, axis_name=(), outer=optax.sgd(0.5))
    pair, x = optax.LookaheadParams.init_synced(PARAMS), PARAMS
    theirs, ours = ahead.init(pair), alone.init(x)
    for t in range(STEPS):
        grads = jax.tree.map(lambda x, target, t=t: x - target[0, t], pair.fast, TARGETS)
        updates, theirs = ahead.update(grads, theirs, pair)
        pair = optax.apply_updates(pair, updates)
        grads = jax.tree.map(lambda x, target, t=t: x - target[0, t], x, TARGETS)
        updates, ours = alone.update(grads, ours, x)
        x = optax.apply_updates(x, updates)
        assert_equal(x, pair.fast)


def test_the_state_of_every_row_may_be_donated_with_the_parameters():
    """Some begin with the parameters themselves: no buffer may be given away twice."""
    params, states = jax.tree.map(jnp.copy, PARAMS), []
    for name in (*OPTIMIZERS, *LINKS, *SYNCED):
        policy = dict.fromkeys(after_round(name), "mean") or "local"
        states += [
            local(made(name), sync_opt_state=policy, outer=optax.sgd(1.0, 0.9)).init(params),
            local_opt.accumulated_rounds(made(name), axis_name="worker").init(params),
            local_opt.parallel_rounds(made(name), axis_name="worker").init(params),
        ]
    keep = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), donate_argnums=0)
    jax.block_until_ready(keep((params, states)))


# Around local steps; with `local` left out, the optimizer that this is.
AROUND = {
    "flatten": lambda local: optax.flatten(local(SGD)),
    "inject_hyperparams": lambda local: optax.inject_hyperparams(
        lambda rate: local(optax.sgd(rate, 0.9))
    )(rate=0.1),
    "chain": lambda local: optax.chain(optax.clip(0.5), optax.chain(optax.trace(0.5), local(SGD))),
    "partition, two plans": lambda local: optax.partition(
        {"b": local(ADAM), "w": local(SGD, OTHER)}, LABELS
    ),
    "partition, frozen": lambda local: optax.partition(
        {"b": optax.set_to_zero(), "w": local(SGD)}, LABELS
    ),
    "partition, b never meets": lambda local: optax.partition({"b": ADAM, "w": local(SGD)}, LABELS),
    "masked, b never meets": lambda local: optax.masked(local(SGD), ONLY_W),
    "selective_transform": lambda local: optax.selective_transform(
        local(SGD), freeze_mask={"b": True, "w": False}
    ),
}


@pytest.mark.parametrize("run", MESHES)
@pytest.mark.parametrize("name", AROUND)
def test_optax_around_local_steps(name, run):
    plans = {"b": PLAN, "w": OTHER} if "two" in name else {"b": PLAN, "w": PLAN}
    if "never" in name:
        del plans["b"]
    seen, _ = result_of(AROUND[name](local), run)
    assert_equal(seen, expected(lambda: AROUND[name](lambda opt, *_: opt), plans=plans)[0])
    if "never" in name:  # nothing can refuse it: this is who finds it
        with pytest.raises(ValueError, match=r"workers' parameters are .* apart in \['b'\]"):
            local_opt.check_synced(last(seen))
    else:
        local_opt.check_synced(last(seen))


WRONG = {
    "what follows": lambda opt: optax.chain(opt, optax.scale(0.5)),
    "a skip of the sync": lambda opt: optax.conditionally_mask(opt, lambda step: step != STEPS - 1),
    "schedule_free around": lambda opt: contrib.schedule_free(opt, 0.1),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_synced_finds_what_is_wrong_around_local_steps(name):
    """No step can see what stands around it, but what that does is seen."""
    history, _ = result_of(WRONG[name](local(SGD)))
    with pytest.raises(ValueError, match="parameters .* apart in"):
        local_opt.check_synced(last(history))


def test_the_evaluation_point_of_schedule_free_is_that_of_the_mean():
    opt = local(contrib.schedule_free_sgd(0.1), sync_opt_state={"z": "mean"})
    history, state = result_of(opt)
    inner, params = state.rounds.inner, last(history)
    at = jax.vmap(contrib.schedule_free_eval_params)(inner, params)
    local_opt.check_synced(at, ulps=4)  # (y - 0.1 z) / 0.9, of equal y and z
    one = contrib.schedule_free_eval_params(
        local_opt.mean_over_workers(inner), local_opt.mean_over_workers(params)
    )
    assert_equal(one, local_opt.mean_over_workers(at))


# The inner optimizer's state is read and set as it is in optax without local steps.

FALLING = optax.linear_schedule(0.1, 0.0, 10)
INNERS = {
    "momentum": (optax.sgd(FALLING, momentum=0.9), ("trace", "count")),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
        ("trace", "count", "hyperparams", "learning_rate", "momentum"),
    ),
}


def states(inner, **options):
    """The states of all workers after some steps: of local steps, of local rounds, and alone."""
    opt = local(inner, **options)
    rounds = local_opt.local_rounds(inner, axis_name="worker", **options)
    for some in (opt, rounds, inner):
        state = jax.vmap(lambda _, s=some: s.init(PARAMS))(jnp.arange(W))
        grads = jax.tree.map(lambda p: jnp.ones((W, *p.shape)), PARAMS)
        step = jax.vmap(lambda g, s, f=some.update: f(g, s, PARAMS)[1], axis_name="worker")
        step = jax.jit(step)
        for _ in range(STEPS):
            state = step(grads, state)
        yield state


@pytest.mark.parametrize("name", INNERS)
def test_optax_finds_inner_fields_and_no_others_of_their_names(name):
    inner, keys = INNERS[name]
    steps, rounds, alone = states(inner)
    for key in keys:
        find = lambda state, key=key: [  # noqa: E731
            value for _, value in optax.tree_utils.tree_get_all_with_path(state, key)
        ]
        for state in (steps, rounds):
            jax.tree.map(np.testing.assert_array_equal, find(state), find(alone))


def test_optax_sets_inner_fields():
    for state in states(INNERS["inject_hyperparams"][0]):
        new = optax.tree_utils.tree_set(state, learning_rate=jnp.full(W, 0.5))
        assert optax.tree_utils.tree_get(new, "learning_rate").tolist() == [0.5] * W
        assert jax.tree.structure(new) == jax.tree.structure(state)
