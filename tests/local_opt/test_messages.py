"""What is easily mistaken is refused with the name of what came and what to pass instead."""

import jax
import jax.numpy as jnp
import optax
import pytest

import local_opt
from tests.refused import refuses

SGD, X = optax.sgd(0.1), jnp.zeros((2, 3))
PLAN = local_opt.constant(2, total_steps=4)
ON = {"axis_name": "worker"}
MAKERS = {
    "local_steps": lambda inner, **more: local_opt.local_steps(inner, PLAN, **ON, **more),
    "local_rounds": lambda inner, **more: local_opt.local_rounds(inner, **ON, **more),
    "streaming": lambda inner, **more: local_opt.streaming_rounds(inner, fragments=1, **ON, **more),
    "parallel": lambda inner: local_opt.parallel_rounds(inner, **ON),
    "accumulated": lambda inner: local_opt.accumulated_rounds(inner, **ON),
}
OUTER = ("local_steps", "local_rounds", "streaming")
PLANNED = {
    "local_steps": lambda plan: local_opt.local_steps(SGD, plan),
    "diloco": lambda plan: local_opt.diloco(SGD, plan),
    "slowmo": lambda plan: local_opt.slowmo(SGD, plan),
    "aligned": lambda plan: local_opt.aligned(plan, every=2),
    "check_same_plan": local_opt.check_same_plan,
}
test_anything_but_a_plan_is_refused = refuses({
    f"{name}, {wrong}": (lambda call=call, plan=plan: call(plan), f"plan is a {wrong}: ")
    for name, call in PLANNED.items()
    for wrong, plan in {"function": local_opt.constant, "int": 4, "NoneType": None}.items()
})  # fmt: skip
test_anything_but_an_optimizer_is_refused = refuses({
    **{name: (lambda make=make: make(0.1), "inner is 0.1: pass an optimizer, as optax.sgd")
       for name, make in MAKERS.items()},
    **{f"{name}, outer": (
        lambda make=MAKERS[name]: make(SGD, outer=0.7), "outer is 0.7: pass an optimizer"
    ) for name in OUTER},
    "not called": (
        lambda: MAKERS["local_rounds"](optax.sgd), "inner is <function sgd.*: pass an optimizer"
    ),
    "period": (
        lambda: local_opt.normalize_by_period(0.7, h_base=4), "outer is 0.7: pass an optimizer"
    ),
    "the plan first": (lambda: local_opt.local_steps(PLAN, SGD), "plan is a GradientTransf"),
})  # fmt: skip


def test_multi_steps_is_taken_without_gradient_transformation():
    opt = MAKERS["local_steps"](optax.MultiSteps(SGD, 2))
    assert opt.init(X).gradient_step == 0


# {tree: two workers' arrays that are not like X or its state}
OTHER = {
    "gradient.* real.3, 3. and in the parameters real.3.": jnp.zeros((2, 3, 3)),
    "gradient.* real.1. and in": jnp.zeros((2, 1)),
    "gradient.* complex.3. and in": jnp.zeros((2, 3), complex),
    "gradient is missing and in the parameters real.3.:": {"w": X},
}
ADAM = optax.adam(0.1)
STATES = (
    SGD,
    local_opt.local_rounds(optax.adam(0.1)),
    local_opt.local_rounds(SGD, outer=SGD),
    local_opt.parallel_rounds(optax.adam(0.1)),
)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_and_states_of_other_parameters_or_optimizers_are_refused(name):
    """They would be broadcast, or end in an error about trees."""
    opt = MAKERS[name](SGD)
    state, update = jax.vmap(opt.init)(X), jax.vmap(opt.update, axis_name="worker")
    assert update(X, state, X)[0].shape == X.shape
    for message, tree in OTHER.items():
        with pytest.raises(ValueError, match=message):
            update(tree, state, X)
        with pytest.raises(ValueError, match="gradient|state|complex"):
            update(X, state, tree)
    sync = jax.vmap(getattr(opt, "sync", opt.update), axis_name="worker")
    for other in STATES[name == "parallel" :]:
        wrong = jax.vmap(other.init)(X)
        for call in (lambda: update(X, wrong, X), lambda: sync(X, wrong)):  # noqa: B023
            with pytest.raises(ValueError, match="state.* in init.params|averages parameters"):
                call()


def lifted(function, *args, inputs="owned", outputs="owned owned"):
    return local_opt.lift(function, 2, inputs=inputs, outputs=outputs)(*args)


SPECS, INT8, TOP_K = jax.P("model"), local_opt.WIRES["int8"], local_opt.WIRES["top_k"]
UNEVEN = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
ROUNDS = local_opt.local_rounds(SGD)
STREAM = local_opt.streaming_rounds(SGD, fragments=2)
TWO = {"w": jnp.zeros(3), "b": jnp.zeros(2)}


def sent(specs):
    """A sync by a wire, of one worker whose parameters are split by the specs."""
    rounds = local_opt.local_rounds(SGD, wire=INT8, specs=specs)
    return jax.vmap(lambda x: rounds.sync(x, rounds.init(x)), axis_name="worker")(X)


def fragments(labels):
    return local_opt.streaming_rounds(SGD, fragments=labels).init(TWO)


def forecast(**changes):
    cost = dict(num_params=8, num_workers=2, step_seconds=1.0, gigabits_per_second=1.0)
    return local_opt.forecast(**dict(plan=PLAN) | cost | changes)


test_what_does_not_fit_is_named = refuses({
    "a dict of results": (
        lambda: lifted(lambda x: {"a": x, "b": x}, X), "has a dict as result and outputs are"
    ),
    "rows as results": (lambda: lifted(lambda x: x, jnp.zeros((2, 2))), "as result and outputs"),
    "no result": (lambda: lifted(lambda x: None, X), "has a NoneType as result"),
    "three results": (lambda: lifted(lambda x: (x, x, x), X), "has 3 results and outputs are"),
    "no rows": (
        lambda: lifted(lambda x: (x, x[0]), X, outputs="owned split"), "number, without rows"
    ),
    "words": (lambda: lifted(len, X, outputs=None), "outputs are None: pass some of owned"),
    "word": (lambda: lifted(len, X, inputs=(1,)), r"inputs are \(1,\): pass some of owned"),
    "axes": (
        lambda: local_opt.lift(len, 2, inputs="owned", outputs="owned", axis_name=["dp"]),
        r"axis_name is \['dp'\]: pass one name",
    ),
    "not owned": (
        lambda: lifted(lambda s: s, SGD.init(0.0), jnp.zeros(()), inputs="owned owned"),
        r"takes \(s\)",
    ),
    "uneven, consolidate": (lambda: local_opt.consolidate(UNEVEN), r"\['w'\] has the shape .2, 3"),
    "uneven, check_synced": (lambda: local_opt.check_synced(UNEVEN), "of one length in all leaves"),
    "uneven, reestimate": (lambda: local_opt.reestimate(max, X, UNEVEN), "at least one batch"),
    "no batch": (lambda: local_opt.reestimate(max, X, X[:0]), r"shape \(0, 3\): .* one batch"),
    "text": (lambda: local_opt.check_synced({"w": "a"}), r"\['w'\] is str: pass arrays"),
    "a function": (
        lambda: MAKERS["local_rounds"](SGD).init({"w": X, "f": len}), "'f'. is builtin_.*: only fl"
    ),
    "policy": (lambda: MAKERS["local_rounds"](SGD, opt_state=None), "opt_state is None: it must"),
    "part": (lambda: ROUNDS.sync(X, ROUNDS.init(X), parts="nu"), "parts is 'nu': pass a tuple"),
    "specs": (lambda: MAKERS["streaming"](SGD, specs="model"), "specs holds 'model': pass a tree"),
    "specs of another tree": (lambda: sent({"w": SPECS}), "specs .* do not have the structure"),
    "specs of no mesh": (lambda: sent(SPECS), r"axes \['model'\] and the mesh in scope has"),
    "labels": (lambda: fragments({"w": 0.0, "b": 1.0}), "fragments is .*: pass a number, or"),
    "due": (
        lambda: STREAM.communicate(TWO, STREAM.init(TWO), local_opt.stream_segments({0: PLAN})[1]),
        "due is .*: pass the due of a segment",
    ),
    "a plan without name": (lambda: local_opt.stream_segments(PLAN), "plans are SyncPlan.*{0: "),
    "no plans": (lambda: forecast(plan=4), "the plans are 4: pass one SyncPlan"),
    "wire of no part": (lambda: forecast(wire={"x": INT8}), r"wires of \['x'\] and the plans"),
    "volumes": (
        lambda: local_opt.communication_time(["1", "0.5"], [1.0, 2.0]), "volumes are a list and ti"
    ),
    "fresh": (lambda: local_opt.sync_every_load(True), "fresh is bool.*one bool for each"),
    "period": (lambda: local_opt.from_function(4, total_steps=8), "period is a int: pass a func"),
    "rule": (lambda: local_opt.SyncPlan([0], 4, rule=5), "rule is 5: describe"),
    "starts": (lambda: local_opt.SyncPlan(jax.random.key(0), 4), "starts is a PRNGKeyArray"),
})  # fmt: skip


def test_leaves_without_numbers_are_synchronized():
    for wire in (None, *local_opt.WIRES.values()):
        rounds = local_opt.local_rounds(SGD, wire=wire)
        for tree in ({}, {"w": jnp.zeros((2, 0))}, {"w": jnp.zeros((2, 0, 3)), "n": None}):
            by = dict(axis_name="worker", axis_size=2)
            state = jax.vmap(rounds.init, **by)(tree)
            new, _ = jax.vmap(rounds.sync, **by)(tree, state)
            assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, tree)


def synced(make, **options):
    rounds = make(SGD, axis_name="dp", **options)
    return lambda x: rounds.sync(x, rounds.init(x))


def updated(make, **options):
    rounds = make(SGD, axis_name="dp", **options)
    return lambda x: rounds.update(x, rounds.init(x), x)


def started():
    stream = local_opt.streaming_rounds(SGD, axis_name="dp", fragments=1)
    return lambda x: stream.start(x, stream.init(x), fragment=0)


OUTSIDE = {
    "local_steps": updated(lambda inner, **more: local_opt.local_steps(inner, PLAN, **more)),
    "local_rounds": synced(local_opt.local_rounds),
    "outer": synced(local_opt.local_rounds, outer=SGD),
    "int8": synced(local_opt.local_rounds, wire=INT8),
    "top_k": synced(local_opt.local_rounds, wire=TOP_K),
    "parallel": updated(local_opt.parallel_rounds),
    "accumulated": synced(local_opt.accumulated_rounds),
    "streaming": started(),
    "synchronize": lambda x: local_opt.synchronize(x, axis_name="dp"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_axis_that_is_not_in_scope_is_named(name):
    """The workers' axis is "worker" here, and was said to be "dp"."""
    lifted = local_opt.lift(OUTSIDE[name], 2, inputs="owned", outputs=("owned",) * 2)
    vmapped = jax.vmap(OUTSIDE[name], axis_name="worker")
    for call in (OUTSIDE[name], lifted, vmapped, jax.jit(vmapped)):
        with pytest.raises(ValueError, match="axis 'dp' is not in scope.* pass it as axis_name="):
            call(X)


def test_an_axis_without_a_name_is_refused():
    """Each worker would go on alone."""
    for axis in ((), [], None, {}):
        rounds = local_opt.local_rounds(SGD, axis_name=axis)
        steps = local_opt.local_steps(SGD, local_opt.every_step(2), axis_name=axis)
        for call in (
            lambda x, r=rounds: r.sync(x, r.init(x)),
            lambda x, s=steps: s.update(x, s.init(x), x),
            lambda x, axis=axis: local_opt.synchronize(x, axis_name=axis),
        ):
            with pytest.raises(ValueError, match="axis .* is not in scope"):
                jax.vmap(call, axis_name="worker")(X)
