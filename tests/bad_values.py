"""Bad values by the kind of an argument, and what comes of a call with one of them."""

import dis
import functools
import inspect
import itertools
import os
import signal
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from local_opt import corrections

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(ordering.__file__)))
OURS = tuple(os.path.join(ROOT, name, "") for name in "ordering local_opt syncopate models".split())
NAN, INF = float("nan"), float("inf")
SECONDS = 20  # a call that takes longer hangs
KEY = jax.random.key(0)
X = {"w": jnp.ones(3)}  # parameters
T = 8  # steps of a plan


class Foreign:
    """An array of another library, as PyTorch's: it has a shape and a dtype of its own."""

    class dtype:
        itemsize = 4

    def __init__(self, *shape):
        self.shape, self.ndim = shape, len(shape)

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, dtype or np.float32)

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"a foreign array {list(self.shape)}"


class Thing:
    def __repr__(self):
        return "a thing"


THING = Thing()
NOTHING = [None, 3, "text", THING, {}]  # that no array, tree of arrays, order or source is
NO_NUMBER = ["3", 1j, [2], np.arange(2, 4), jnp.ones(2), {}, Foreign(), THING]


def at_least(least):
    """For numbers of at least `least`."""
    return [NAN, INF, -INF, least - 1, -7, 0.5, True, None, *NO_NUMBER, -2.7]


def whole(least=1):
    """For whole numbers of at least `least`."""
    return [*at_least(least), 2.5, np.float32(1.5), 7.3]


def real(*more):
    """For finite numbers >= 0."""
    return [NAN, INF, -INF, -1, -0.5, True, None, *NO_NUMBER, -2.7, *more]


def but_none(values):
    return [value for value in values if value is not None]


def one_number(values):
    """Without arrays and lists, where these are taken as well."""
    return [value for value in values if not isinstance(value, list | np.ndarray)]


def word(*more):
    return ["", "unknown", "REPLICATED", 3, 0.5, THING, ["unknown"], None, "xbzyac", *more]


def two_arguments(first, second):
    return first


def wrong_functions(*more):
    return [3, "text", THING, {"a": 1}, lambda: 0, lambda a, b, c, d, e: a, *more]


def leaves_of(*shape):
    """Trees of a leaf that is no array of numbers, in place of {"w": float[shape]}."""
    texts = np.full(shape, "a")
    return [
        "text",
        THING,
        {"w": "text"},
        {"w": THING},
        {"w": texts},
        {"w": texts.astype(object)},
        {"w": jnp.broadcast_to(KEY, shape)},
        {"w": Foreign(*shape)},
    ]


KEYS = [
    0,
    jax.random.split(jax.random.PRNGKey(0)),
    np.zeros(3, np.uint32),
    "0",
    0.5,
    None,
    THING,
    [KEY],
    jax.random.split(KEY, 2),
]
AXES = ["data", "", 3, None, 0.5, ["worker"], ("worker", "data"), THING]
SCHEDULES = [
    -1.0, NAN, INF, "3", 1j, None, [0.5] * 3, np.ones((T, 2)), np.ones(9), THING, {},
    np.array(["a"] * T), optax.cosine_decay_schedule, lambda: 0.5, two_arguments, lambda t: NAN,
    lambda t: "a", lambda t: None, lambda t: -0.5, lambda t: np.ones(2), lambda t: 1j,
    lambda t: t > 0, -2.7,
]  # fmt: skip
OPTIMIZERS = [
    0.1,
    optax.sgd,
    "sgd",
    optax.sgd(0.1).init,
    optax.constant_schedule(0.1),
    {},
    THING,
    optax.GradientTransformation,
    [optax.sgd(0.1)],
]
PARAMS = [{}, None, {"w": [1.0, "a"]}, *leaves_of(3)]
LIKE_PARAMS = [
    {},
    None,
    {"v": jnp.ones(3)},
    {"w": jnp.ones(4)},
    {"w": jnp.ones((3, 1))},
    {"w": jnp.ones(())},
    {"w": jnp.ones(3), "b": jnp.ones(1)},
    jnp.ones(3),
    [jnp.ones(3)],
    {"w": "text"},
    {"w": None},
    {"w": THING},
    {"w": 1j * jnp.ones(3)},
]
FRESH = np.arange(T) % 2 == 0
NOT_FRESH = [
    3,
    "text",
    [1, 0],
    np.ones((2, 2), bool),
    FRESH.astype(float),
    THING,
    {},
    KEY,
    [False, True],
    [True, None],
    np.array(["a"] * T),
    Foreign(T),
]
SPECS = [3, "worker", THING, jax.P("worker"), {"w": 3}]
COMPRESSORS = [3, "int8", THING, {}, local_opt.quantize, jnp.int8, ("int8",)]
CORRECTIONS = [3, "scaffold", corrections.scaffold, corrections.fedprox, THING, {}, optax.sgd(0.1)]
RULES = [3, "greedy", ordering.baselines.self_balancing_walk, THING, {}, (), ordering.grab(4)]

# By the name of the argument.
KINDS = {
    name: values for names, values in (
        ("units_per_step block_size factor max_factor depth unit_size batch_size ahead "
         "period h_base num_params num_workers workers size num_features lags horizon "
         "width heads patch mlp_ratio stem_channels head_channels stem_stride context "
         "minibatches", whole()),
        ("num_units total_steps", [*whole(), 2**31, 2**63]),
        ("num_classes vocab_size", whole(2)), ("num_pairs num_epochs", at_least(1)),
        ("step offset first_step first_load seed delay start warmup_steps axis",
         whole(0)),
        ("total h_max team_size", but_none(whole())),
        ("strength l2", real()),
        ("bound alpha power learning_rate", real(0)),
        ("delta", real(0.0, 1.0, 7)), ("momentum mixing", real(1.0, 7)),
        ("timeout", [v for v in real(0) if v is not None and v is not INF]),
        ("key", KEYS), ("axis_name", AXES), ("params", PARAMS), ("lr", SCHEDULES),
        ("p", [2.0, 0.0, lambda t: 0.0, *SCHEDULES]),
        ("eps", [2.0, 0.0, lambda t: 0.0, *but_none(SCHEDULES)]), ("rule", RULES),
        ("inner", [None, *OPTIMIZERS]), ("outer", OPTIMIZERS), ("compress", COMPRESSORS),
        ("specs", SPECS), ("correction", CORRECTIONS), ("grads update_params", LIKE_PARAMS),
        ("how", word()), ("gathers keys", but_none(word())), ("fresh", NOT_FRESH),
        ("pool gelu norm stem", word()), ("dtype", word(jnp.float16, "float64")),
    ) for name in names.split()
}  # fmt: skip
# What else a message may call an argument.
NAMES = {
    "rows": "gradient",
    "grads": "gradient updates",
    "update_params": "parameters",
    "x": "shape y",
    "params": "leaves leaf",
    "batches": "load batch",
    "loads": "source",
    "batch": "gradient loss",
    "tree": "leaf rows params",
    "indices": "index",
    "gradients": "gradient",
    "function": "results words out_specs",
    "before": "plans",
    "source": "example",
    "parts": "example",
    "plans_of": "plan",
    "to_sketch": "rows key",
    "vectors": "array",
}


class Arg(NamedTuple):
    """A valid value, and bad ones in place of those of the name."""

    valid: Any
    bad: list


def also(name: str, valid: Any, *more: Any) -> Arg:
    """The bad values of the name, and more that are bad in this call."""
    return Arg(valid, [*more, *KINDS[name]])


class Call(NamedTuple):
    run: Callable  # of all arguments, by name
    valid: dict[str, Any]
    bad: dict[str, list]


def call(run: Callable, **args: Any) -> Call:
    results = {n: a if isinstance(a, Arg) else Arg(a, KINDS[n]) for n, a in args.items()}
    return Call(
        run, {n: a.valid for n, a in results.items()}, {n: a.bad for n, a in results.items()}
    )


# (a valid value, bad ones) of arguments that neither KINDS nor a row knows.
BY_TYPE = {
    int: (2, [NAN, INF, 0.5, *NO_NUMBER]),
    float: (0.5, [NAN, *NO_NUMBER]),
    bool: (False, []),
    str: ("", []),
}


def arguments(function: Callable, **usual: Any) -> dict[str, Arg]:
    """Those of a signature: by the `usual` ones, or by the name, the default and the type."""
    result = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, default = parameter.annotation, parameter.default
        valid, bad = BY_TYPE.get(kind, (None, []))
        if default is not parameter.empty:
            valid = default
        bad = KINDS.get(name, bad)
        if name in usual:
            valid, bad = usual[name] if isinstance(usual[name], Arg) else (usual[name], bad)
        optional = default is None or type(None) in typing.get_args(kind)
        result[name] = Arg(valid, but_none(bad) if optional else bad)
    return result


def described(value: Any) -> str:
    """A lambda by its line, an array by its type and shape."""
    if isinstance(value, types.FunctionType) and value.__name__ == "<lambda>":
        code = value.__code__
        return f"lambda of {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return " ".join(str(value).split())[:60]


class Outcome(NamedTuple):
    kind: str  # "refused", "unnamed", "raw" or "accepted"
    text: str


class Hung(Exception):
    pass


def _hung(*_):
    raise Hung(f"longer than {SECONDS} s")


def outcome(run: Callable, name: str, value: Any) -> Outcome:
    """A refusal is raised by a `raise` of ours and names the argument, its value or its type."""
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")
            return Outcome("accepted", repr(run()))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        # RuntimeErrors are those of loading; ImportErrors name a library that is not installed.
        if not isinstance(error, ValueError | RuntimeError | ImportError) or not _is_ours(error):
            return Outcome("raw", text)
        names = [
            name,
            name.rstrip("s"),
            *name.split("_"),
            *NAMES.get(name, "").split(),
            str(value),
            repr(value)[:40],
            type(value).__name__,
            *(f"{entry} is" for entry in (value if isinstance(value, dict) else ())),
        ]
        named = any(word and word.lower() in text.lower() for word in names)
        return Outcome("refused" if named else "unnamed", text)
    finally:
        signal.alarm(0)


def _is_ours(error):
    """Whether the innermost frame of an error is a `raise` of our packages."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    ours = os.path.abspath(code.co_filename).startswith(OURS)
    return ours and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def outcomes(calls: dict[str, Call], most: int | None = None) -> Iterator[tuple[str, Outcome]]:
    """A description and the outcome for every call with every bad value, or for `most` each.

    Few of them begin at another value for every argument, so that all kinds are tried.
    """
    places = itertools.count()
    for name, (run, valid, bad) in calls.items():
        for arg, values in bad.items():
            start = next(places) % max(1, len(values)) if most else 0
            for value in (values[start:] + values[:start])[:most]:
                result = outcome(functools.partial(run, **valid | {arg: value}), arg, value)
                yield f"{name}({arg}={described(value)})", result


def variants(value: Any) -> list:
    """A number as NumPy and JAX have it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [np.int64(value), np.int32(value), np.array(value), jnp.asarray(value)]
    if isinstance(value, float):
        return [np.float64(value), np.float32(value), np.array(value), jnp.asarray(value)]
    return []
