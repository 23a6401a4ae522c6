"""What does not fit together is refused by the names of the arguments and their values.

Rules of two arguments, of trees and of states; every public function with every bad argument is in
tests/project/test_bad_inputs.py.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import exchange
from tests import tables
from tests.problems import COMPRESSORS
from tests.refused import names

SGD, X = optax.sgd(0.1), jnp.zeros((2, 3))
PLAN = local_opt.constant(2, total_steps=4)
AXES = ("host", "chip")
MAKERS = {
    "local_steps": functools.partial(local_opt.local_steps, plan=PLAN),
    "local_rounds": local_opt.local_rounds,
    "streaming": functools.partial(local_opt.streaming.streaming_rounds, fragments=1),
    "parallel": local_opt.parallel_rounds,
    "accumulated": local_opt.accumulated_rounds,
}


def mapped(*args, in_specs="worker", out_specs="worker", function=lambda x: x, **options):
    return local_opt.map_workers(function, 2, in_specs=in_specs, out_specs=out_specs, **options)(
        *args
    )


def with_plan(**changes):
    return local_opt.qsr(**dict(lr=0.1, total_steps=10, alpha=0.2, h_base=2) | changes)


def after(count):
    """An update of one worker that has taken so many steps of a plan of ten."""
    opt = local_opt.local_steps(SGD, local_opt.constant(5, total_steps=10), axis_name=())
    return opt.update(X, opt.init(X)._replace(num_steps=jnp.int32(count)), X)


def with_policy(inner, **policies):
    return local_opt.local_rounds(inner, sync_opt_state=policies).init({"w": jnp.ones(3)})


def in_fragments(fragments):
    params = {"b": jnp.zeros(2), "w": jnp.zeros((2, 2))}
    return local_opt.streaming.streaming_rounds(SGD, fragments=fragments).init(params)


def with_weight(weight):
    return jax.vmap(lambda x: local_opt.pmean(x, weight=weight), axis_name="worker")(X)


def sent(specs):
    """A sync by a compressor, of one worker whose parameters are split by the specs."""
    rounds = local_opt.local_rounds(SGD, compress=INT8, specs=specs)
    return jax.vmap(lambda x: rounds.sync(x, rounds.init(x)), axis_name="worker")(X)


def sent_by_int8(tree):
    return exchange.synchronize_changes(tree, anchor=tree, compressor=INT8)


def corrected(rate):
    rounds = local_opt.local_rounds(SGD, correction=local_opt.corrections.scaffold())
    one = jnp.ones(2)
    return rounds.update(one, rounds.init(one), one, rate=rate)


SPECS, INT8, TOP_K = jax.P("model"), COMPRESSORS["int8"], COMPRESSORS["top_k"]
ADAM, TREE = optax.adam(0.1), {"x": jnp.zeros((2, 3)), "n": jnp.zeros(2)}
BOTH_KEYS = jax.random.split(jax.random.key(0), 2)
segments, pull = local_opt.streaming.stream_segments, local_opt.corrections.fedprox(1.0)
REFUSED = {  # the call, and what its message names: arguments, values, places in a tree
    "two axes as the workers": (
        lambda: local_opt.replicate(X, jax.make_mesh((1, 1), AXES), axis_name=AXES),
        "('host', 'chip'): pass one name", "make a mesh in which these are one axis",
    ),
    # Plans.
    "a rate below 0": (lambda: with_plan(lr=lambda t: 0.55 - t / 10), "lr(6)", "-0.05"),
    "a rate of 0 at first": (
        lambda: with_plan(lr=optax.linear_schedule(0.0, 0.1, 5, transition_begin=2)),
        "step 0", "warmup_steps",
    ),
    **{f"a long plan, {name}": (lambda make=make: make(10**9), "total_steps", "1000000000")
       for name, make in tables.PLANS.items()},
    "loads of another run": (
        lambda: PLAN.aligned(every=2, fresh=[True] * 3), "fresh", "[3]", "4 steps"),
    "beyond the plan": (lambda: after(15), "step 15", "0 .. 9"),
    "one beyond the plan": (lambda: after(10), "step 10", "0 .. 9"),
    "sync and step": (
        lambda: local_opt.local_steps(SGD, PLAN).update(X, None, X, sync=True, step=0),
        "sync", "step",
    ),
    # Fragments.
    "other fragments before": (lambda: segments({0: PLAN}, before={1: PLAN}), "[0]", "[1]"),
    "a gap between fragments": (lambda: in_fragments({"w": 0, "b": 2}), "fragments", "[0, 2]"),
    "a delay beyond a round": (
        lambda: segments({0: local_opt.constant(4, total_steps=13)}, delay=5),
        "delay is 5", "fragment 0", "4 steps",
    ),
    # The state of the inner optimizer.
    "a parameter of a field": (lambda: with_policy(ADAM, **{"nu.w": "mean"}), "['nu.w']"),
    "mu alone": (lambda: with_policy(ADAM, mu="mean"), "'mean' for 'mu'", "'local' for 'nu'"),
    "nu reset": (lambda: with_policy(ADAM, nu="reset"), "'local' for 'mu'", "'reset' for 'nu'"),
    "a variance": (
        lambda: with_policy(optax.rmsprop(0.1, centered=True), nu="mean"),
        "'local' for 'mu'", "'mean' for 'nu'",
    ),
    "a count": (lambda: with_policy(ADAM, count="mean"), "0.count", "int32"),
    # Parameters that are no real numbers.
    **{f"whole numbers, {name}": (
        lambda make=make: make(SGD).init({"n": jnp.arange(3), "w": jnp.ones(3)}), "['n']", "int32")
       for name, make in MAKERS.items()},
    "whole numbers to send": (lambda: sent_by_int8({"n": jnp.arange(3)}), "['n']", "int32"),
    "complex numbers to send": (lambda: sent_by_int8(jnp.ones(3, complex)), "complex64"),
    # Weights, compressors and corrections.
    "a weight too small": (lambda: with_weight(1e-20), "weight", "1e-20"),
    "a weight too large": (lambda: with_weight(1e20), "weight", "1e+20"),
    "a share of a block": (
        lambda: local_opt.top_k(0.3, block=128), "density is 0.3", "128", "38 /"),
    "specs of another tree": (lambda: sent({"w": SPECS}), "specs"),
    "specs of no mesh": (lambda: sent(SPECS), "['model']"),
    "a pull to no parameters": (
        lambda: local_opt.local_rounds(SGD, correction=pull).update(
            X, local_opt.local_rounds(SGD, correction=pull).init(X)), "fedprox", "parameters"),
    **{f"a rate, {type(rate).__name__}": (lambda rate=rate: corrected(rate), "rate is ")
       for rate in ("1", 1j, np.ones(2), jnp.ones(1), set(), BOTH_KEYS[0], 10**400)},
    # Arguments and results of a function of one worker.
    "a number of a worker": (lambda: jax.jit(mapped)({"rate": 0.5}), "args[0]['rate']", "'worker'"),
    "a number alone": (lambda: mapped(3), "args[0] is 3", "'worker'"),
    "no rows of a batch": (
        lambda: mapped(X, function=lambda x: (x, x[0]), out_specs=("worker", "batch")),
        "result[1]", "'batch'", "out_specs",
    ),
    "a mesh in turn": (
        lambda: local_opt.map_workers(
            len, jax.make_mesh((2,), ("worker",)), in_specs="worker", out_specs="worker",
            in_turn=True),
        "in_turn",
    ),
    "replicated in turn": (
        lambda: mapped(X, out_specs="replicated", in_turn=True), "in_turn", "'replicated'"),
    "an argument by keyword": (
        lambda: local_opt.map_workers(
            lambda a, b: a, 2, in_specs=("worker", "batch"), out_specs="worker")(X, b=X),
        "1 positional",
    ),
    "of no parameter": (
        lambda: mapped(X, function=lambda x, *, y: x, in_specs=("worker", "batch")), "(x, *, y)"),
    "legacy keys to fold": (
        lambda: local_opt.replicate({"rng": jax.random.PRNGKey(0)}, 2, keys="fold"),
        "['rng']", "uint32[2]",
    ),
    "a word of a tree": (
        lambda: mapped(TREE, in_specs=({"x": {"y": "own"}},)), "in_specs[0]['x']['y']", "'own'"),
    "no word": (lambda: mapped(TREE, in_specs=({"x": "worker"},)), "in_specs[0]", "n"),
    "no leaf": (
        lambda: mapped(TREE, in_specs=({"x": "worker", "n": "worker", "m": {"v": "worker"}},)),
        "in_specs[0]", "m",
    ),
    "another node": (
        lambda: mapped(TREE, out_specs=collections.OrderedDict(x="worker", n="sum")),
        "out_specs", "OrderedDict", "dict",
    ),
    "a mean of keys": (
        lambda: mapped({"key": BOTH_KEYS}, out_specs="mean"), "result['key']", "key", "out_specs"),
    # Costs and workers.
    "no seconds of sending": (
        lambda: local_opt.costs.communication_time([1, 0.5], [3, 4]), "computation", "5", "-2"),
    "no seconds of computing": (
        lambda: local_opt.costs.communication_time([1, 0.5], [3, 1]), "-1", "communication", "4"),
}  # fmt: skip
test_what_does_not_fit_is_refused_by_its_name = names(REFUSED)


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
        with pytest.raises(ValueError, match="'dp' .*axis_name="):
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
    with pytest.raises(ValueError, match="'worker'"):
        call(jnp.ones(()))
    with pytest.raises(ValueError, match=r"\['seed', 'worker'\]"):
        scoped(call, "worker", "seed")
    actual, wanted = scoped(call, "dp"), scoped(SYNCED[name]("dp"), "dp")
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


def test_numbers_of_numpy_and_jax_are_numbers():
    for one in (np.float64(0.5), jnp.float32(0.5), np.array(0.5)):
        local_opt.top_k(one, feedback=one)
