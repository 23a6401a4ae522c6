"""The calls of `local_opt`: valid arguments, and bad ones for each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from local_opt import costs, presets
from ordering import echo
from syncopate.mesh import is_key
from tests.bad_calls_ordering import W, given, over_workers, traced, varying
from tests.bad_values import (
    AXES,
    FRESH,
    INF,
    KEY,
    KEYS,
    NAN,
    OPTIMIZERS,
    THING,
    Arg,
    Foreign,
    T,
    X,
    also,
    arguments,
    but_none,
    call,
    leaves_of,
    one_number,
    real,
    two_arguments,
    whole,
    word,
    wrong_functions,
)
from tests.public import returning

SGD = optax.sgd(0.1, momentum=0.9)
PLAN = local_opt.constant(2, total_steps=T)
NO_PLANS = [
    None,
    3,
    "qsr",
    local_opt.constant,
    local_opt.SyncPlan,
    echo.fixed(2, total_steps=T),
    {},
    [0, 2, 4],
    THING,
    lambda t: 2,
]
STARTS = [None, 3, "text", [], [1, 2], [0, 2, 2], [0, 4, 2], [0, T], [0, 2.5], [0.0, 2.0], [[0, 2]],
          [0, -1], ["0", "2"], [0, NAN], THING, {}, [False, True], [0, None], 1j, [0, 2**40],
          [[0], [1, 2]], KEY, Foreign(2)]  # fmt: skip
STEP = Arg(2, [T, *one_number(whole(0))])
NO_ARRAYS = [tree for tree in leaves_of(3) if not is_key(jax.tree.leaves(tree)[0])]
USUAL = {
    "total_steps": T,
    "period": 2,
    "offset": also("offset", 0, T),
    "p": 0.5,
    "key": KEY,
    "lr": 0.1,
    "alpha": 0.25,
    "h_base": 2,
    "h_max": also("h_max", 4, 1),
    "density": Arg(1 / 64, real(0)),
    "warmup_steps": also("warmup_steps", 0, T + 1),
    "power": Arg(2.0, real(0)),
    "strength": 0.5,
}
PERIODS = wrong_functions(
    None,
    two_arguments,
    local_opt.qsr,
    *(lambda t, h=h: h for h in (0, -1, 0.5, NAN, INF, None, "2", np.ones(2, int), True, 1j)),
)
PARTS = {"a": local_opt.constant(4, total_steps=T), "b": PLAN}
TURNS = [
    PLAN,
    {"a": 3},
    {"a": None},
    {"a": PLAN, "b": local_opt.constant(1, total_steps=T + 1)},
    [PLAN],
]
PAIRS = [
    None,
    3,
    "text",
    [],
    [1.0],
    [1.0, 0.5, 0.25],
    [1.0, NAN],
    [INF, 1.0],
    [1.0, -0.5],
    ["1", "0.5"],
    THING,
    {},
]
MADE = local_opt.SyncPlan, local_opt.Compressor, local_opt.corrections.Correction
CALLS = {
    name: call(make, **arguments(make, **USUAL))
    for kind in MADE
    for name, make in returning(kind, local_opt, local_opt.corrections).items()
}
CALLS |= {
    "SyncPlan": call(local_opt.SyncPlan, starts=Arg([0, 2, 4], STARTS), total_steps=T),
    "SyncPlan.after": call(
        PLAN.after,
        step=Arg(3, STEP.bad),
        tree=Arg(jnp.ones((W, 3)), NO_ARRAYS),
        workers=also("workers", W, 3),
        weight=Arg(None, [np.ones(W + 1), "1", THING]),
    ),
    "SyncPlan.syncs_after": call(PLAN.syncs_after, step=STEP),
    "from_function": call(local_opt.from_function, period=Arg(lambda t: 2, PERIODS), total_steps=T),
    "SyncPlan.aligned": call(
        PLAN.aligned, every=Arg(2, real(0, 0.5)), fresh=also("fresh", FRESH, FRESH[:-1], [])
    ),
    "count_collectives": call(
        lambda step: costs.count_collectives(step, jnp.ones(3)),
        step=Arg(jnp.negative, [3, "text", None, THING, {}, lambda: 0]),
    ),
    "communication_time": call(
        costs.communication_time,
        volumes=Arg([1.0, 0.25], [[1.0, 1.0], [2.0, 0.5], [0.25, 1.0], *PAIRS]),
        seconds=Arg([10.0, 7.0], [[1.0, 0.1], [7.0, 10.0], *PAIRS]),
    ),
    "quantize": call(
        local_opt.quantize,
        dtype=Arg("int8", word(jnp.int16, 16)),
        feedback=Arg(1, but_none(real(1.5))),
    ),
    "top_k": call(
        local_opt.top_k,
        density=USUAL["density"],
        bits=Arg(2, [4, *whole()]),
        block=Arg(4096, [100, *whole()]),
        feedback=Arg(0.5, real(0)),
    ),
    "sync_bytes": call(costs.sync_bytes, num_params=100, num_workers=2, compress=None),
    "sync_seconds": call(
        costs.sync_seconds,
        num_params=100,
        num_workers=2,
        compress=None,
        gigabits=Arg(1.0, real(0)),
        efficiency=Arg(1.0, real(0, 1.5)),
        latency=Arg(0.0, real()),
    ),
    "stream_segments": call(
        local_opt.streaming.stream_segments,
        plans_of=Arg(PARTS, [*NO_PLANS, *TURNS]),
        delay=also("delay", 1, 5),
        start=also("start", 0, T + 1),
        before=Arg(PARTS, [p for p in [*NO_PLANS, *TURNS] if p is not None]),
    ),
}


# Steps of two workers, traced.
def transformed(make):
    def run(
        params=X, grads=X, state=None, update_params=X, sync=None, step=None, weight=None, **args
    ):
        opt = make(**args)

        def one(w):
            opt_state = opt.init(varying(params, w)) if state is None else given(state)
            given_params = varying(update_params, w)
            more = {"sync": sync, "step": step, "weight": weight}
            return opt.update(varying(grads, w), opt_state, given_params, **more)

        return over_workers(one)

    return run


def rounded(make):
    def run(params=X, grads=X, state=None, update_params=X, weight=None, **args):
        rounds = make(**args)

        def one(w):
            carried = rounds.init(varying(params, w)) if state is None else given(state)
            updates, carried = rounds.update(varying(grads, w), carried, varying(update_params, w))
            more = {} if weight is None else {"weight": weight}
            return rounds.sync(varying(params, w), carried, **more), updates

        return over_workers(one)

    return run


def streamed(params=X, grads=X, state=None, fragment=0, due=None, weight=None, fragments=1, **args):
    stream = local_opt.streaming.streaming_rounds(fragments=fragments, **args)

    def one(w):
        carried = stream.init(varying(params, w)) if state is None else given(state)
        carried = stream.update(varying(grads, w), carried, varying(params, w))[1]
        if due is not None:
            return stream.communicate(varying(params, w), carried, due, weight=weight)
        carried = stream.start(varying(params, w), carried, fragment=fragment, weight=weight)
        return stream.finish(varying(params, w), carried, fragment=fragment)

    return over_workers(one)


STATES = [3, (), {}, THING, "text", lambda: optax.adam(0.1).init(X)]
STATE = Arg(None, [*STATES, lambda: SGD.init(X)])
AXIS = Arg("worker", but_none(AXES))  # None is the one in scope
INNER = {"inner": SGD, "axis_name": AXIS, "params": X, "grads": X}
POLICIES = word({"trace": "unknown"}, {"nu": "mean"}, {3: "mean"}, {"trace": None})
OPTIONS = {
    "sync_opt_state": Arg("local", POLICIES),
    "outer": None,
    "compress": None,
    "correction": None,
    "specs": None,
    "drift": Arg(False, ["yes", 1, None]),
}
WEIGHT = Arg(None, [NAN, INF, -1, np.float32(-0.5), "3", THING, {}, 1j, jnp.ones(2), [1.0], KEY])
FRAGMENTS = [None, 0, -1, 2, 0.5, NAN, "1", True, THING, {}, {"w": 1}, {"w": -1}, {"w": "0"},
             {"w": 0.0}, {"w": None}, {"v": 0}, {"w": True}, 1j, [0], {"w": NAN}]  # fmt: skip
DUE = [
    3,
    "text",
    [3],
    [("begin", 0, False)],
    [("start", 1, False)],
    [("start", "a", False)],
    [("start", 0)],
    THING,
    {0: 1},
    [None],
]


OUTER = {
    "learning_rate": 0.5,
    "momentum": 0.0,
    "inner": SGD,
    "plan": Arg(PLAN, NO_PLANS),
    "axis_name": AXIS,
    "inner_rate": Arg(0.1, real(0)),
}
CALLS |= {
    name: call(transformed(make), **arguments(make, **OUTER, **OPTIONS))
    for name, make in returning(optax.GradientTransformationExtraArgs, presets).items()
}
CALLS |= {
    "local_steps": call(
        transformed(local_opt.local_steps), **INNER, **OPTIONS, plan=Arg(PLAN, NO_PLANS),
        update_params=X, sync=Arg(None, [3, "yes", THING, 0.5, jnp.ones(2, bool), [], {}]),
        step=Arg(None, [NAN, 0.5, "3", THING, 1j, jnp.ones(2, int), -1, {}]), weight=WEIGHT,
        state=STATE),
    "local_rounds": call(rounded(local_opt.local_rounds), **INNER, **OPTIONS, state=STATE,
                         weight=WEIGHT),
    "parallel_rounds": call(rounded(local_opt.parallel_rounds), **INNER, state=Arg(None, STATES),
                            weight=Arg(None, [1.0, *WEIGHT.bad])),
    "accumulated_rounds": call(rounded(local_opt.accumulated_rounds), **INNER, state=STATE,
                               weight=WEIGHT),
    "streaming_rounds": call(
        streamed, **INNER, state=STATE, fragments=Arg(1, FRAGMENTS), mixing=0.5, outer=None,
        compress=None, specs=None, due=Arg(None, DUE),
        fragment=Arg(0, [1, -1, -2, NAN, 0.5, "0", None, THING, {}, True]), weight=WEIGHT),
    "normalize_by_period": call(
        lambda period, outer, h_base: presets.normalize_by_period(outer, h_base=h_base).update(
            X, outer.init(X), X, period=period),
        outer=Arg(SGD, [None, *OPTIMIZERS]), h_base=2,
        period=Arg(2, [None, NAN, -1, "3", THING, {}, 1j, jnp.ones(2)])),
    "pmean": call(
        lambda tree, axis_name, weight: over_workers(
            lambda w: local_opt.pmean(varying(tree, w), axis_name=axis_name, weight=weight)),
        tree=Arg(X, leaves_of(3)[:-3]), axis_name=AXIS, weight=WEIGHT),
}  # fmt: skip
COMPRESSORS = {"int8": local_opt.quantize("int8"), "top_k": local_opt.top_k(0.5)}
for name, compressor in COMPRESSORS.items():
    make = lambda compress=compressor, **args: local_opt.local_rounds(  # noqa: E731
        SGD, compress=compress, **args
    )
    CALLS[f"local_rounds, {name}"] = call(
        rounded(make),
        axis_name=AXIS,
        params=X,
        correction=also("correction", None, local_opt.corrections.fedprox(0.1)),
    )
for name, args in {"scaffold": (), "fedprox": (0.5,)}.items():
    correction = getattr(local_opt.corrections, name)(*args)
    make = lambda correction=correction: local_opt.local_rounds(  # noqa: E731
        SGD, correction=correction
    )
    more = {"update_params": X} if args else {}
    CALLS[f"local_rounds, {name}"] = call(rounded(make), params=X, grads=X, state=STATE, **more)

# Workers.
ALL = {"w": jnp.ones((W, 3))}
UNEQUAL = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}
UNSTACKED = [
    {"w": jnp.ones(())},
    {"w": jnp.ones((0, 3))},
    {"w": 3.0},
    3,
    {"w": [1.0, 2.0]},
    UNEQUAL,
    *leaves_of(2, 3),
]
UNSTACKED = [t for t in UNSTACKED if not (isinstance(t, dict) and hasattr(t.get("w"), "_impl"))]


def step(params, batch):
    return local_opt.pmean(params), jnp.mean(batch)


ARGS = (ALL["w"], jnp.ones((4, 3)))
FUNCTIONS = wrong_functions(
    None,
    *(
        lambda p, b, make=make: make(p, b)
        for make in (lambda p, b: p, lambda p, b: (p, b, b), lambda p, b: None)
    ),
)
# That arguments are missing Python says itself.
FUNCTIONS = [f for f in FUNCTIONS if getattr(f, "__code__", step.__code__).co_argcount < 4]
INPUTS = [
    "",
    "local",
    ("worker", "batch", "worker"),
    ("wroker", "batch"),
    ("mean", "batch"),
    3,
    None,
    THING,
    {},
    ["worker", 3],
    {"params": "worker"},
    ("worker",),
    "WORKER",
    "worker batch",
    ("key", "batch"),
    ("batch", "worker"),
    (),
]
OUTPUTS = [
    "",
    ("worker", "mean", "mean"),
    ("worker", "avg"),
    ("key", "mean"),
    3,
    None,
    THING,
    ["worker", 3],
    ("worker",),
    {},
    ["worker", "mean"],
    "worker mean",
]
GIVEN = [
    (),
    ARGS[:1],
    (*ARGS, 1),
    (ARGS[0][:1], ARGS[1]),
    (ARGS[0], ARGS[1][:3]),
    ("a", "b"),
    (ARGS[0], jnp.ones(())),
    (ARGS[0], ARGS[1][:0]),
]
BATCHES = {"x": jnp.ones((2, 4, 3))}
NO_BATCHES = [
    {},
    None,
    3,
    THING,
    {"x": jnp.ones(())},
    {"x": jnp.ones((0, 3))},
    {"x": "text"},
    {"x": jnp.ones((2, 3)), "y": jnp.ones(3)},
    "text",
]
CALLS |= {
    "mean_over_workers": call(local_opt.mean_over_workers, tree=Arg(ALL, UNSTACKED)),
    "check_synced": call(local_opt.check_synced, tree=Arg(ALL, UNSTACKED),
                         ulps=Arg(1.0, [v for v in real() if v is not INF])),
    "ElasticSync": call(
        local_opt.elastic.ElasticSync, sync=Arg(lambda x, y: (x, y), [None, 3, "text", THING, {}]),
        timeout=Arg(60.0, real(0)), donate=Arg(True, [None, 3, "yes", THING])),
    "replicate": call(lambda **args: local_opt.replicate(X, **args), workers=W, keys=None),
    "map_workers": call(
        traced(lambda function, workers, x, **specs: local_opt.map_workers(
            function, workers, **specs)(*x)),
        function=Arg(step, FUNCTIONS), workers=also("workers", W, 3), x=Arg(ARGS, GIVEN),
        in_specs=Arg(("worker", "batch"), INPUTS), out_specs=Arg(("worker", "mean"), OUTPUTS),
        axis_name=Arg("worker", ["data", 3])),
    "map_workers, key": call(
        traced(lambda key: local_opt.map_workers(
            jax.random.key_data, W, in_specs="key", out_specs="worker")(key)),
        key=Arg(KEY, [k for k in KEYS if not isinstance(k, list | type(None))])),  # these are trees
}  # fmt: skip
