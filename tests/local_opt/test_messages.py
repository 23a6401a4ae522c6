"""What is easily mistaken is refused with the name of what came and what to pass instead.

Rows whose words matter; every public function with every bad argument is in
tests/project/test_bad_inputs.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from tests.problems import COMPRESSORS
from tests.refused import refuses

SGD, X = optax.sgd(0.1), jnp.zeros((2, 3))
PLAN = local_opt.constant(2, total_steps=4)
MAKERS = {
    "local_steps": functools.partial(local_opt.local_steps, plan=PLAN),
    "local_rounds": local_opt.local_rounds,
    "streaming": functools.partial(local_opt.streaming.streaming_rounds, fragments=1),
    "parallel": local_opt.parallel_rounds,
    "accumulated": local_opt.accumulated_rounds,
}


def updated(grads=X, params=X, state=None, opt=None):
    """An update of two workers, with some argument another."""
    opt = opt or local_opt.local_rounds(SGD)
    state = jax.vmap((state or opt).init)(X)
    return lambda: jax.vmap(opt.update, axis_name="worker")(grads, state, params)


def mapped(function, *args, out_specs=("worker", "worker")):
    return local_opt.map_workers(function, 2, in_specs="worker", out_specs=out_specs)(*args)


SPECS, INT8, TOP_K = jax.P("model"), COMPRESSORS["int8"], COMPRESSORS["top_k"]
UNEVEN = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}


def sent(specs):
    """A sync by a compressor, of one worker whose parameters are split by the specs."""
    rounds = local_opt.local_rounds(SGD, compress=INT8, specs=specs)
    return jax.vmap(lambda x: rounds.sync(x, rounds.init(x)), axis_name="worker")(X)


test_what_does_not_fit_is_named = refuses({
    "the plan first": (lambda: local_opt.local_steps(PLAN, SGD), "plan is a GradientTransf"),
    "not called": (lambda: local_opt.local_rounds(optax.sgd), "inner is <function sgd.*: pass an"),
    "shape": (updated(jnp.zeros((2, 1))), r"gradient.* real.1. and in the parameters real.3."),
    "complex": (updated(X * 1j), "gradient.* complex.3. and in"),
    "state": (updated(state=local_opt.local_rounds(optax.adam(0.1))), "state.* in init.params"),
    "a dict of results": (
        lambda: mapped(lambda x: {"a": x, "b": x}, X),
        "out_specs is .'worker', 'worker'., which .* of type <class 'tuple'> .* type .*dict",
    ),
    "three results": (
        lambda: mapped(lambda x: (x, x, x), X), "out_specs is .* tuple of length 2, .* of length 3"
    ),
    "no rows": (
        lambda: mapped(lambda x: (x, x[0]), X, out_specs=("worker", "batch")),
        r"result\[1\] is 'batch' in out_specs and has no rows: say 'worker'",
    ),
    "uneven": (lambda: local_opt.check_synced(UNEVEN), r"'w'. has the shape .*of one length"),
    **{
        f"whole, {name}": (
            lambda make=make: make(SGD).init({"n": jnp.arange(3), "w": jnp.ones(3)}),
            r"leaf \['n'\] is int32: only floating",
        )
        for name, make in MAKERS.items()
    },
    "specs of another tree": (lambda: sent({"w": SPECS}), "specs .* do not have the structure"),
    "specs of no mesh": (lambda: sent(SPECS), r"axes \['model'\] and the mesh in scope has"),
    "a plan without name": (
        lambda: local_opt.streaming.stream_segments(PLAN), "plans are SyncPlan.*{0: "),
})  # fmt: skip


def test_leaves_without_numbers_are_synchronized():
    for compressor in (None, *COMPRESSORS.values()):
        rounds = local_opt.local_rounds(SGD, compress=compressor)
        for tree in ({}, {"w": jnp.zeros((2, 0))}, {"w": jnp.zeros((2, 0, 3)), "n": None}):
            by = dict(axis_name="worker", axis_size=2)
            state = jax.vmap(rounds.init, **by)(tree)
            new, _ = jax.vmap(rounds.sync, **by)(tree, state)
            assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, tree)


def synced_over(axis_name, name, **options):
    """A sync or step of rounds of that axis."""
    make = MAKERS[name](SGD, axis_name=axis_name, **options)
    if name == "streaming":
        return lambda x: make.start(x, make.init(x), fragment=0)
    if name in ("local_steps", "parallel"):
        return lambda x: make.update(x, make.init(x), x)
    return lambda x: make.sync(x, make.init(x))


SYNCED = {  # by the name of an axis
    **{name: functools.partial(synced_over, name=name) for name in MAKERS},
    "outer": functools.partial(synced_over, name="local_rounds", outer=SGD),
    "int8": functools.partial(synced_over, name="local_rounds", compress=INT8),
    "top_k": functools.partial(synced_over, name="local_rounds", compress=TOP_K),
    "synchronize": lambda axis: functools.partial(local_opt.pmean, axis_name=axis),
}


@pytest.mark.parametrize("name", SYNCED)
def test_an_axis_that_is_not_in_scope_is_named(name):
    """The workers' axis is "worker" here, and was said to be "dp"."""
    synced = SYNCED[name]("dp")
    mapped = local_opt.map_workers(synced, 2, in_specs="worker", out_specs="worker")
    vmapped = jax.vmap(synced, axis_name="worker")
    for call in (synced, mapped, vmapped, jax.jit(vmapped)):
        with pytest.raises(ValueError, match="axis 'dp' is not in scope.* pass it as axis_name="):
            call(X)


def scoped(function, *names):
    """The function of one worker under axes of these names, of two workers each."""
    for name in names:
        function = jax.vmap(function, axis_name=name)
    return jax.jit(function)(jnp.arange(2.0 ** len(names)).reshape((2,) * len(names)))


@pytest.mark.parametrize("name", SYNCED)
def test_none_is_the_only_axis_in_scope(name):
    """Of several a wrong one would be averaged over in silence."""
    call = SYNCED[name](None)
    with pytest.raises(ValueError, match="axis 'worker' is not in scope"):
        call(jnp.ones(()))
    with pytest.raises(ValueError, match=r"there are the axes \['seed', 'worker'\]: pass the"):
        scoped(call, "worker", "seed")
    actual, wanted = scoped(call, "dp"), scoped(SYNCED[name]("dp"), "dp")
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


def corrected(rate):
    rounds, one = (
        local_opt.local_rounds(SGD, correction=local_opt.corrections.scaffold()),
        jnp.ones(2),
    )
    return rounds.update(one, rounds.init(one), one, rate=rate)


def test_a_rate_that_is_no_number_is_refused():
    for value in ("1", 1j, np.ones(2), jnp.ones(1), set(), jax.random.key(0), 10**400):
        with pytest.raises(ValueError, match="(?s)^rate is .*: pass one number"):
            corrected(value)


def test_numbers_of_numpy_and_jax_are_numbers():
    for one in (np.float64(0.5), jnp.float32(0.5), np.array(0.5)):
        local_opt.top_k(one, feedback=one)
