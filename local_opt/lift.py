"""A step of one worker as a step of all of them, simulated or on a mesh, and their same start."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from local_opt.workers import check_synced, wide_type
from syncopate.mesh import is_key, is_legacy, name_of, names_of, typed_key
from syncopate.workers import count_of

INPUTS = ("owned", "shared", "split", "key")
OVER = {"mean": jnp.mean, "sum": jnp.sum}  # the workers
OUTPUTS = ("owned", "shared", "split", *OVER)
ARRAYS, NUMBERS = jax.Array | np.ndarray | np.generic, int | float | complex
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
KEYS = (None, "fold", "copy")


def lift(
    function: Callable,
    workers: int | Mesh | None = None,
    roles: str | None = None,
    *,
    in_roles: Sequence[PyTree] | None = None,
    out_roles: PyTree | None = None,
    axis_name: str | None = None,
    in_turn: bool = False,
) -> Callable:
    """Makes a function of one worker, as a training step, one of all workers at once.

    y_w = f(x_w) for w = 0 .. W - 1, under the named axis that `local_steps` and orders need.

    One word per argument says what its leaves are:

        owned   leaves [W, ...], each worker's own, as `local_opt.replicate` makes them
        shared  the same for all workers
        split   leaves [n, ...], a batch of all: worker w gets the w-th n / W rows
        key     one key, typed or legacy; every worker gets a typed one of its own, fold_in(key, w)

    and of a result:

        owned   leaves [W, ...], of each worker
        shared  one worker's, where all have the same; what differs is refused
        split   leaves [n, ...], the workers' rows put together
        mean    over the workers, as of losses
        sum     over the workers, as of counts

    On a mesh a mean and a sum are an all-reduce in every call: where workers seldom talk, return
    losses as owned. Leaves that are not arrays (an equinox model's functions) pass through. Legacy
    keys, uint32[2], are only known as "key": owned by two workers they are a number of each.

    Args:
      function: of one worker. Gradients by a shared argument are the worker's own.
      workers: W >= 1, simulated on one device by `jax.vmap`; or a mesh, one worker per position on
        that axis, by `jax.shard_map`; None for the mesh of `jax.set_mesh` where the result is
        called. Other axes, automatic or explicit, are inside a worker.
      roles: a word for every parameter, in the order of the signature, an arrow, and a word for
        every result of a tuple, or one for a single result: "owned split -> owned mean".
        Keyword-only parameters without a word are shared, and a default needs none.
      in_roles, out_roles: instead of the text, prefix trees of words, as specs of `jax.shard_map`:
        in_roles=({"params": "owned", "step": "shared"}, "split"). A tuple of out_roles is for a
        tuple of results, ("owned",) for a tuple of one.
      axis_name: the workers' axis; None for a mesh's only one, and "worker" of several or none.
      in_turn: whether simulated workers run one after another, which is faster for convolutions on
        CPUs; for functions without collectives.

    Returns:
      A function with the name, signature and docstring of `function`, to be jitted.

    Raises:
      ValueError: at construction for words or a mesh that do not fit; from a call for arguments or
        results that do not, a shared result that differs between workers, or no mesh in scope.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(2, total_steps=4)
      >>> optimizer = local_opt.local_steps(optax.sgd(0.5), plan)
      >>> def step(x, state, target):
      ...     loss, grad = jax.value_and_grad(lambda x: (x - target[0]) ** 2)(x)
      ...     update, state = optimizer.update(grad, state, x)
      ...     return x + update, state, loss
      >>> step = jax.jit(local_opt.lift(
      ...     step, 2, "owned owned split -> owned owned mean"))
      >>> x, state = local_opt.replicate((jnp.zeros(()), optimizer.init(jnp.zeros(()))), 2)
      >>> x, state, loss = step(x, state, jnp.array([1.0, 3.0]))
      >>> x.tolist(), float(loss)
      ([1.0, 3.0], 5.0)

    References:
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2024,
      https://arxiv.org/abs/2310.14423
    """
    fixed = None if workers is None else count_of(workers, axis_name)
    inputs, outputs = _trees(roles, in_roles, out_roles)
    single = type(outputs) not in (tuple, list)
    outputs = (outputs,) if single else tuple(outputs)
    results = set(jax.tree.leaves(outputs))
    entries = ["out_roles"] if single else [f"out_roles[{i}]" for i in range(len(outputs))]
    names = [f"result {i}" for i in range(len(outputs))]
    if in_turn and (fixed is None or fixed[2] is not None):
        raise ValueError("in_turn is for simulated workers: pass their number, not a mesh.")
    if in_turn and "shared" in results:
        raise ValueError(f"out_roles are {outputs}: with in_turn no result is shared; take owned.")
    bind = _binding(function, inputs)

    @functools.wraps(function, updated=())
    def lifted(*args, **kwargs):
        count, axis, mesh = fixed or count_of(None, axis_name)
        values, prefixes, numbers, call = bind(args, kwargs)
        for value, prefix in zip(values, prefixes, strict=True):
            if prefix == "key" and not jax.tree.leaves(parted(value)[0]):
                raise ValueError(f"key is {value!r}: pass one typed key, as jax.random.key(0).")
        places = [f"in_roles[{i}]" for i in numbers]
        given, arguments = _by_word(values, prefixes, places, [f"argument {i}" for i in numbers])
        own = [arrays for word, arrays in given.items() if word != "shared"]
        if mesh is None and not jax.tree.leaves(own):
            raise ValueError(f"in_roles are {inputs}, and no argument holds an array to map over.")
        whole = []  # makes the results from their arrays, once the function is traced

        def one(given):
            found = call(arguments(given))
            found = (found,) if single else found
            if not isinstance(found, tuple | list) or len(found) != len(outputs):
                many = isinstance(found, tuple | list)
                count = f"{len(found)} results" if many else f"a {type(found).__name__} as result"
                raise ValueError(
                    f"the function has {count} and out_roles are {outputs}: give one word for each "
                    "of a tuple, or one word, not in a tuple, for a single result."
                )
            arrays, results_of = _by_word(found, outputs, entries, names)
            whole[:] = [results_of]
            if any(not jnp.ndim(x) for x in arrays.get("split", {}).values()):
                raise ValueError("a split result is a number, without rows: take 'owned'.")
            return arrays

        if mesh is not None:
            run = _on_mesh(one, mesh, axis, given, results)
            traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(given))
            if len(mesh.shape) > 1 and not traced:
                run = jax.jit(run)  # JAX 0.10 leaves axes to the compiler there alone
        elif in_turn:
            run = _in_turn(one)
        else:
            run = jax.vmap(one, (_sides(given, None, 0),), _sides(results, None, 0), axis)
        if "shared" in results:
            _check_shared(one, given, mesh, count, axis)
        found = run(_entered(given, mesh, count, axis))
        left = whole[0](_left(found, mesh is not None))
        return left[0] if single else tuple(left)

    return lifted


def _binding(function, inputs) -> Callable:
    """(args, kwargs) -> values, the words and numbers of their parameters, the function of them."""
    if not callable(function):
        raise ValueError(f"function is {function!r}: pass the step of one worker, not called.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: its arguments have no names
        signature = inspect.Signature([Parameter("arguments", Parameter.VAR_POSITIONAL)])
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    by_position = [name for name, kind in kinds.items() if kind in BY_POSITION]
    named = list(by_position)
    if Parameter.VAR_POSITIONAL not in kinds.values():
        named += [name for name, kind in kinds.items() if kind == Parameter.KEYWORD_ONLY]
        if len(inputs) > len(named):
            raise ValueError(
                f"in_roles has {len(inputs)} words and the function takes {signature}: give one "
                "word for each of its parameters, in their order."
            )
    words_of = dict.fromkeys(by_position) | dict(zip(named, inputs, strict=False))
    number_of = {name: i for i, name in enumerate(kinds)}

    def bind(args, kwargs):
        bound = signature.bind(*args, **kwargs)
        values, count = [*bound.args, *bound.kwargs.values()], len(bound.args)
        words = list(inputs[:count]) + [None] * (count - len(inputs))
        words += [words_of.get(name, "shared") for name in bound.kwargs]
        if None in words:
            raise ValueError(
                f"{len(values)} arguments came for {signature} and in_roles are {inputs}: give one "
                "word for every parameter that may be given by position."
            )

        def call(arguments):
            by_name = dict(zip(bound.kwargs, arguments[count:], strict=True))
            return function(*arguments[:count], **by_name)

        numbers = [*range(count), *(number_of.get(name, name) for name in bound.kwargs)]
        return values, words, numbers, call

    return bind


def _sides(words, shared, owned) -> dict:
    return {word: shared if word == "shared" else owned for word in words}


def _in_turn(function):
    """Workers one after another: vmap makes grouped convolutions, which are slow on CPUs."""

    def run(given):
        own = {word: arrays for word, arrays in given.items() if word != "shared"}
        return jax.lax.map(lambda own: function(given | own), own)

    return run


def _on_mesh(function, mesh, axis_name, words, results):
    """One worker per position on an axis of a mesh; other axes are left to the compiler."""

    def each(given, change):
        alone = ("shared", "split")  # without a worker axis
        return {w: x if w in alone else jax.tree.map(change, x) for w, x in given.items()}

    def per_device(given):
        found = function(each(given, lambda x: x[0]))
        return each(found, lambda x: jnp.expand_dims(x, 0))

    whole, rows = PartitionSpec(), PartitionSpec(axis_name)
    # With check_vma=True JAX refuses scans of one worker that start from zeros, and shared results
    # that it cannot prove equal, and adds up gradients of shared parameters over the workers.
    return jax.shard_map(
        per_device, mesh=mesh, axis_names={axis_name}, check_vma=False,
        in_specs=(_sides(words, whole, rows),), out_specs=_sides(results, whole, rows),
    )  # fmt: skip


def _check_shared(function, given, mesh, count, axis_name):
    """Raises ValueError for a shared result that depends on the worker, while a call is traced.

    On a mesh nobody would see it: one worker's would stand for all. `jax.vmap` knows it.
    """
    differ = []

    def note(name, x):
        @jax.custom_batching.custom_vmap
        def same(x):
            return x

        @same.def_vmap
        def of_workers(size, mapped, x):
            del size
            differ.append(name)
            return x, mapped[0]

        return same(x)

    def noted(given):
        return [note(name, x) for (_, name), x in function(given)["shared"].items()]

    enter = functools.partial(_entered, mesh=None, count=count, axis_name=axis_name)
    # Without their shardings: explicit ones differ between leaves, and vmap would refuse them.
    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)  # noqa: E731
    shapes = jax.tree.map(plain, jax.eval_shape(enter, given))
    scope = contextlib.nullcontext()
    if mesh is not None:
        scope = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with scope:
        try:
            jax.eval_shape(jax.vmap(noted, (_sides(given, None, 0),), 0, axis_name), shapes)
        except Exception:  # the call itself fails, too, and says why; or it needs the mesh
            return
    if differ:
        raise ValueError(
            f"{differ[0]} is said to be shared and differs between workers: make it equal, as by "
            "jax.lax.pmean or local_opt.pmean, or say owned, mean or sum."
        )


def _entered(given, mesh, count, axis_name):
    """The arrays of all arguments, as they are mapped over."""

    def enter(word, name, x):
        x = typed_key(x) if word == "key" else x
        shape = jnp.shape(x)
        if word == "key":
            if not is_key(x) or shape:
                raise ValueError(
                    f"the key, {name}, is {jnp.result_type(x)}{list(shape)}: "
                    "pass one typed key, as of jax.random.key(0), or keys of all workers as owned."
                )
            x = folded(jnp.broadcast_to(x, (count,)))
        if word == "owned" and shape[:1] != (count,):
            raise ValueError(
                f"{name} is owned and has the shape {shape}, and there are {count} workers: make "
                "it by local_opt.replicate(tree, workers), where numbers of Python must be arrays, "
                "by jnp.asarray, or say that it is shared or split."
            )
        if word == "split":
            if not shape or not shape[0] or shape[0] % count:
                raise ValueError(
                    f"{name} is split and has the shape {shape}: its rows must be a multiple of "
                    f"the {count} workers. Take another batch size, or share it."
                )
            x = jnp.reshape(x, (count, shape[0] // count, *shape[1:])) if mesh is None else x
        if mesh is None or axis_name not in mesh.explicit_axes:
            return x
        first = () if word == "shared" else (axis_name,)
        rest = [s if {*names_of(s)} <= {*mesh.explicit_axes} else None for s in spec_of(x)]
        spec = PartitionSpec(*first, *rest[len(first) :])
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return {
        word: {(i, name): enter(word, name, x) for (i, name), x in arrays.items()}
        for word, arrays in given.items()
    }


def _left(found, on_mesh):
    """The arrays of the results, as they leave."""

    def leave(word, name, x):
        if word == "split" and not on_mesh:
            return jnp.reshape(x, (-1, *x.shape[2:]))
        if word not in OVER:
            return x
        if is_key(x):
            raise ValueError(f"a key has no {word}, as {name} should: take 'owned'.")
        # Floating leaves are added up in float32 and keep their type; others are as in `jnp`.
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return OVER[word](x, axis=0)
        return OVER[word](x.astype(wide_type(x.dtype)), axis=0).astype(x.dtype)

    return {
        word: {(i, name): leave(word, name, x) for (i, name), x in arrays.items()}
        for word, arrays in found.items()
    }


def _trees(roles, in_roles, out_roles) -> tuple[tuple, PyTree]:
    """A prefix tree of words for each argument, and that of the results."""
    names = "in_roles", "out_roles"
    if {in_roles is None, out_roles is None} != {roles is not None}:
        raise ValueError("pass roles, as 'owned split -> owned mean', or in_roles and out_roles.")
    if roles is not None:
        names = "a word before the arrow of roles", "a word after the arrow of roles"
        sides = [side.split() for side in roles.split("->")] if isinstance(roles, str) else []
        if len(sides) != 2 or not sides[1]:
            raise ValueError(f"roles is {roles!r}: pass words, one arrow ->, and words.")
        in_roles, out_roles = sides
        out_roles = out_roles[0] if len(out_roles) == 1 else out_roles
    if type(in_roles) not in (tuple, list):
        raise ValueError(f"in_roles are {in_roles!r}: pass a tuple, one entry per parameter.")
    for name, tree, known in zip(names, (in_roles, out_roles), (INPUTS, OUTPUTS), strict=True):
        for path, word in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(word, str) or word not in known:
                place = name if roles is not None else name + jax.tree_util.keystr(path)
                raise ValueError(f"{place} is {word!r}: pass one of {', '.join(known)}.")
    return tuple(in_roles), out_roles


def _by_word(trees, prefixes, places, names) -> tuple[dict, Callable]:
    """{word: {(number, name): array}} of the leaves of trees, and what makes trees of it again."""
    found, rest, order = {word: {} for word in jax.tree.leaves(prefixes)}, {}, []
    for tree, prefix, place, name in zip(trees, prefixes, places, names, strict=True):
        try:
            words = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
        except ValueError:
            raise ValueError(_misfit(prefix, tree, place)) from None
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, x), word in zip(leaves, words, strict=True):
            leaf = len(order), f"{name}{jax.tree_util.keystr(path)}"
            order.append(leaf)
            kinds = ARRAYS | NUMBERS if word in OVER else ARRAYS
            (found[word] if isinstance(x, kinds) else rest)[leaf] = x
    structure = jax.tree.structure(list(trees))

    def whole(found):
        leaves = functools.reduce(dict.__or__, found.values(), rest)
        return structure.unflatten(leaves[leaf] for leaf in order)

    return found, whole


def _misfit(prefix, tree, place) -> str:
    """Why a prefix tree does not fit."""
    keystr = jax.tree_util.keystr
    said = [path for path, _ in jax.tree_util.tree_leaves_with_path(prefix)]
    there = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path in there:
        if not any(path[: len(of)] == of for of in said):
            leaf = f"the leaf {keystr(path)}" if path else f"a leaf, {type(tree).__name__}"
            return f"{place} is {prefix!r}, without a word for {leaf}: add it, or pass one for all."
    for of in said:
        if not any(path[: len(of)] == of for path in there):
            return f"{place}{keystr(of)} is a word for a leaf that is not there: leave it out."
    kinds = f"{type(prefix).__name__} and the tree of {type(tree).__name__}"
    return f"{place} is of type {kinds}, or a node in them differs: pass nodes of the same types."


@jax.transfer_guard("allow")
def replicate(
    tree: PyTree,
    workers: int | Mesh | None = None,
    *,
    axis_name: str | None = None,
    keys: str | None = None,
) -> PyTree:
    """The same start for every worker: leaves [W, ...], on the devices of their workers.

    x_w = x for w = 0 .. W - 1, in new memory, so that a step may donate it.

    A random key in the tree, as for dropout in the state of a `flax.nnx` model, is copied, too, so
    that all workers drop the same units. `keys="fold"` gives each worker its own, fold_in(key, w);
    legacy keys, which may be any two numbers, are refused with it.

    Args:
      tree: parameters, optimizer state, a whole training state. Whole numbers, as a step, become
        arrays; other leaves that are not arrays stay. Arrays that are split over other axes of a
        mesh stay split.
      workers, axis_name: as in `lift`.
      keys: "fold" for each worker's own, "copy" for the same on all; None copies and warns.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: for unknown `keys`, legacy ones to fold, no mesh in scope, or if processes have
        different values.

    Warns:
      UserWarning: if a key is copied and `keys` is None.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> local_opt.replicate({"w": jnp.arange(2), "step": 0}, 3)["w"].tolist()
      [[0, 1], [0, 1], [0, 1]]
      >>> key = local_opt.replicate(jax.random.key(0), 2, keys="fold")
      >>> bool(key[0] == key[1])
      False
    """
    count, axis_name, mesh = count_of(workers, axis_name)
    if keys not in KEYS:
        raise ValueError(f"keys is {keys!r}: pass 'fold', for a key of each worker, or 'copy'.")

    def number(x):
        if isinstance(x, bool) or not isinstance(x, int):
            return x
        return jnp.asarray(x, jnp.result_type(x))  # not a weak type, which the first step changes

    def repeated(arrays):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), arrays)

    arrays, rest = parted(jax.tree.map(number, tree))
    found = _spread(repeated, arrays, mesh, axis_name)
    if mesh is not None and jax.process_count() > 1:
        check_synced(found, what="state", ulps=0)
    of_keys = jax.tree.map(lambda x: x if is_key(x) else None, arrays)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    legacy = [name_of(path) for path, x in leaves if is_legacy(x)]
    if legacy and keys == "fold":
        raise ValueError(
            f"leaf {legacy[0]} is uint32[2], a legacy key or any two numbers: make a key typed by "
            "jax.random.wrap_key_data, and keep other numbers in another type."
        )
    if keys is None and (named := legacy + [name_of(path) for path, x in leaves if is_key(x)]):
        warnings.warn(
            f"every worker gets the same key {', '.join(named)}, and will drop the same units: "
            "pass keys='fold' for a key of each worker's own, or keys='copy' to keep them equal.",
            stacklevel=3,  # beyond the transfer guard
        )
    if keys == "fold":
        own = _spread(lambda x: jax.tree.map(folded, repeated(x)), of_keys, mesh, axis_name)
        found = joined(own, found)
    return joined(found, rest)


def _spread(function, arrays, mesh, axis_name):
    """The result of a function that adds a worker axis, on the devices of the workers."""
    if mesh is None:
        return jax.jit(function)(arrays)

    def place(x, *first):
        spec = spec_of(x)
        # As long as the shape, as a step's results are there: else its second call would compile.
        spec += (None,) * (jnp.ndim(x) - len(spec)) if mesh.explicit_axes else ()
        return NamedSharding(mesh, PartitionSpec(*first, *spec))

    if jax.process_count() == 1:  # one copy per device, never all on one
        given = jax.device_put(arrays, jax.tree.map(place, arrays))
    else:  # each process's own, which may differ
        given = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), arrays)
    places = jax.tree.map(lambda x: place(x, axis_name), arrays)
    return jax.jit(function, out_shardings=places)(given)


def parted(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The tree's arrays, and its other leaves; None in place of the other kind."""
    arrays = jax.tree.map(lambda x: x if isinstance(x, ARRAYS) else None, tree)
    return arrays, jax.tree.map(lambda x: None if isinstance(x, ARRAYS) else x, tree)


def joined(arrays: PyTree, rest: PyTree) -> PyTree:
    """The inverse of `parted`."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, arrays, rest, is_leaf=lambda x: x is None
    )


def folded(keys: Key[Array, "W ..."]) -> Key[Array, "W ..."]:
    """fold_in(key_w, w), the keys of worker w."""

    def of_worker(keys, worker):
        flat = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
        return flat.reshape(keys.shape)

    return jax.vmap(of_worker)(keys, jnp.arange(len(keys)))


def spec_of(x: Any) -> tuple:
    """How an array is split over a mesh; () if it is whole."""
    sharding = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
