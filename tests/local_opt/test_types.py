"""What types say of workers: parameters that are shared by their type are no worker's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import local_opt

PLAN = local_opt.constant(2, total_steps=4)
SGD = optax.sgd(1.0)
STARTS = -np.arange(1.0, 5)
DOORS = {  # an optimizer, and the worker's x after a step from 0 with gradients 1, 2, 3, 4
    "parallel": (local_opt.parallel_rounds(SGD), np.full(4, -2.5)),
    "local": (local_opt.local_rounds(SGD), STARTS),
    "accumulated": (local_opt.accumulated_rounds(SGD), np.zeros(4)),
    "planned": (local_opt.local_steps(SGD, PLAN), STARTS),
    "chain": (optax.chain(optax.clip(9.0), local_opt.local_steps(SGD, PLAN)), STARTS),
    "streaming": (local_opt.streaming.streaming_rounds(SGD, fragments=1), STARTS),
    "diloco": (local_opt.presets.diloco(SGD, local_opt.constant(2, total_steps=400)), STARTS),
    "control": (local_opt.local_rounds(SGD, correction=local_opt.corrections.scaffold()), STARTS),
}


def loss(x, target):
    return jnp.sum(x["w"] * target)


def workers_of(kind, shape=(4,), names=("worker",)):
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices()[: len(STARTS)])


def moved(opt, mesh, *, cast=None, check_vma=True, names="worker"):
    """x [4] after one step of parameters that all workers share."""

    def one(x, target):
        if cast:
            x = jax.lax.pcast(x, cast, to="varying")
        updates, _ = opt.update(jax.grad(loss)(x, target), opt.init(x), x)
        return (x["w"] + updates["w"])[None]

    specs = jax.P(), jax.P(names)
    args = {"w": jnp.zeros(())}, jnp.arange(1.0, 5)
    args = jax.device_put(args, tuple(jax.NamedSharding(mesh, spec) for spec in specs))
    run = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=jax.P(names), check_vma=check_vma)
    return jax.jit(run)(*args)


EXPLICIT = [(name, AxisType.Explicit) for name in ("parallel", "planned")]


@pytest.mark.parametrize("name,kind", [*((name, AxisType.Auto) for name in DOORS), *EXPLICIT])
def test_a_gradient_that_jax_has_added_up_is_refused(name, kind):
    (opt, expected), mesh = DOORS[name], workers_of(kind)
    with pytest.raises(ValueError, match=r"leaf \['w'\] is typed as equal .*pcast"):
        moved(opt, mesh)
    np.testing.assert_array_equal(moved(opt, mesh, cast="worker"), expected)
    np.testing.assert_array_equal(moved(opt, mesh, check_vma=False), expected)


def test_workers_on_two_axes_must_vary_over_both():
    names = "host", "worker"
    mesh = workers_of(AxisType.Auto, (2, 2), names)
    opt = local_opt.parallel_rounds(SGD, axis_name=names)
    for cast, lacking in ((None, "host', 'worker"), ("host", "worker"), ("worker", "host")):
        with pytest.raises(ValueError, match=rf"equal on all workers of \['{lacking}'\]"):
            moved(opt, mesh, cast=cast, names=names)
    np.testing.assert_array_equal(moved(opt, mesh, cast=names, names=names), [-2.5] * 4)


def test_a_mean_of_what_is_equal_by_its_type_is_refused_and_beside_others_it_is_kept():
    def over(function, out):
        run = jax.shard_map(
            function,
            mesh=workers_of(AxisType.Auto),
            in_specs=(jax.P(), jax.P("worker")),
            out_specs=out,
        )
        return jax.jit(run)({"w": jnp.ones(())}, jnp.arange(1.0, 5))

    with pytest.raises(ValueError, match=r"leaf \['w'\] is typed as equal"):
        over(lambda x, t: local_opt.pmean(jax.grad(loss)(x, t)), jax.P())
    result = over(lambda x, t: local_opt.pmean({"own": t, "rate": x, "n": 3}), jax.P())
    assert result["own"] == 2.5 and result["rate"]["w"] == 1 and result["n"] == 3
    rounds = local_opt.local_rounds(SGD)
    stream = local_opt.streaming.streaming_rounds(SGD, fragments=1, mixing=0.0)

    def streamed(x, state):
        return stream.finish(x, stream.start(x, state, fragment=0), fragment=0)

    def trained(x, target, made, sync):  # the state is shared at first, and steps go on from there
        state, x = made.init(x), jax.lax.pcast(x, "worker", to="varying")
        for _ in range(2):
            for _ in range(3):
                updates, state = made.update(jax.grad(loss)(x, target), state, x)
                x = optax.apply_updates(x, updates)
            x, state = sync(x, state)
        return x["w"][None]

    for made, sync in ((rounds, rounds.sync), (stream, streamed)):
        run = functools.partial(trained, made=made, sync=sync)
        assert over(run, jax.P("worker")).tolist() == [1 - 6 * 2.5] * 4
