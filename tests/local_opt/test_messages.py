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
})  # fmt: skip


def test_multi_steps_is_taken_without_gradient_transformation():
    opt = MAKERS["local_steps"](optax.MultiSteps(SGD, 2))
    assert opt.init(X).gradient_step == 0


def synced(make, **options):
    rounds = make(SGD, axis_name="dp", **options)
    return lambda x: rounds.sync(x, rounds.init(x))


def updated(make, **options):
    rounds = make(SGD, axis_name="dp", **options)
    return lambda x: rounds.update(x, rounds.init(x), x)


def started():
    stream = local_opt.streaming_rounds(SGD, axis_name="dp", fragments=1)
    return lambda x: stream.start(x, stream.init(x), fragment=0)


INT8, TOP_K = local_opt.WIRES["int8"], local_opt.WIRES["top_k"]
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
