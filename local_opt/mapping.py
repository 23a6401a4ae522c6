"""A step of one worker as a step of all of them, simulated on one device or on a mesh."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from local_opt import nnx
from local_opt.replication import fold_in_workers, spec_of
from local_opt.workers import LEAVES, wide_type
from syncopate.mesh import is_key, names_of, typed_key
from syncopate.workers import count_of

REDUCE = {"mean": jnp.mean, "sum": jnp.sum}  # over the workers
INPUTS = ("worker", "replicated", "batch", "key")
RESULTS = ("worker", "replicated", "batch", *REDUCE)
WITHOUT_AXIS = ("replicated", "batch")  # these have no axis of workers on one device
NUMBERS = int | float | complex
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def map_workers(
    function: Callable,
    workers: int | Mesh | None = None,
    *,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_name: str | None = None,
    in_turn: bool = False,
) -> Callable:
    """Maps a function of one worker, such as a training step, over all workers.

    y_w = f(x_w) for w = 0 .. W - 1, under the named axis that `local_steps` and orders need.

    Specs are prefix trees, as in `jax.shard_map`, whose leaves are these words:

        worker      leaves [W, ...], one entry per worker, as `local_opt.replicate` makes them
        replicated  the same for all workers; for a result this must be provable
        batch       leaves [n, ...], one batch for all: worker w has the w-th n / W rows
        key         arguments only: one key, typed or legacy; worker w gets fold_in(key, w), typed
        mean        results only: the mean over the workers, as for losses
        sum         results only: the sum over the workers, as for counts

    On a mesh, "mean" and "sum" take an all-reduce in every call. If workers seldom synchronise,
    return losses as "worker". Leaves that are not arrays, such as the functions of an equinox
    model, pass through. A legacy key, uint32[2], is treated as a key only under "key"; under other
    words it is two numbers.

    If the function updates modules, optimizers or metrics of flax.nnx in place, the caller's
    objects are updated. Compile the result with `nnx.jit`; under `jax.jit`, return the objects.

    Args:
      function: a function of one worker. Its gradients with respect to a replicated argument are
        this worker's, not a sum over the workers.
      workers: W >= 1, simulated on one device by `jax.vmap`; or a mesh, by `jax.shard_map`, with
        one worker per position on its workers' axis; None for the mesh of `jax.set_mesh` where the
        result is called. Other axes, automatic or explicit, are inside a worker.
      in_specs: one entry per positional argument, as ({"x": "worker", "step": "replicated"},
        "batch"), or one word for all of them. Keyword arguments are replicated.
      out_specs: one entry per result, as ("worker", "mean") for a tuple of two.
      axis_name: the workers' axis. None for the only axis of a mesh; if there are several or none,
        "worker".
      in_turn: whether simulated workers run one after another, which is faster for convolutions on
        CPUs; only for functions without collectives.

    Returns:
      A function of the same arguments, to be jitted. On a mesh of several axes it compiles itself.

    Raises:
      ValueError: at construction, if words or a mesh do not fit. From a call, if arguments or
        results do not fit, if no mesh is in scope, or if a "replicated" result or object of
        flax.nnx differs between workers. Also if equality cannot be proved, as after callbacks or
        collectives over groups of workers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(2, total_steps=4)
      >>> optimizer = local_opt.local_steps(optax.sgd(0.5), plan)
      >>> def step(x, state, target):
      ...     loss, grad = jax.value_and_grad(lambda x: (x - target[0]) ** 2)(x)
      ...     update, state = optimizer.update(grad, state, x)
      ...     return x + update, state, loss
      >>> step = jax.jit(local_opt.map_workers(
      ...     step, 2, in_specs=("worker", "worker", "batch"),
      ...     out_specs=("worker", "worker", "mean")))
      >>> x, state = local_opt.replicate((jnp.zeros(()), optimizer.init(jnp.zeros(()))), 2)
      >>> x, state, loss = step(x, state, jnp.array([1.0, 3.0]))
      >>> x.tolist(), float(loss)
      ([1.0, 3.0], 5.0)

    References:
      Rush et al., DrJAX: Scalable and Differentiable MapReduce Primitives in JAX, 2024,
      https://arxiv.org/abs/2403.07128
    """
    fixed = None if workers is None else count_of(workers, axis_name)
    in_specs = tuple(in_specs) if type(in_specs) is list else in_specs  # like `jax.vmap`
    _check_words("in_specs", in_specs, INPUTS)
    words = _check_words("out_specs", out_specs, RESULTS)
    _check_function(function, in_specs)
    if in_turn and (fixed is None or fixed.mesh is not None):
        raise ValueError("in_turn is for simulated workers: pass their number, not a mesh.")
    if in_turn and "replicated" in words:
        raise ValueError("in_turn cannot prove a result 'replicated': say 'worker' in out_specs.")

    def run(inputs, over, arrays):
        graph = inputs.tree(arrays).objects
        kinds = sorted({*words, *(graph.graph.of_objects if graph else ())})

        def one(arrays):
            call = inputs.tree(arrays)
            objects = nnx.merge(call.objects)
            args, kwargs = nnx.put((call.args, call.kwargs), objects)
            return _results(function(*args, **kwargs), out_specs, kinds, call.objects, objects)

        how = _on_mesh if over.mesh is not None else _in_turn if in_turn else _simulated
        results, arrays = how(one, _enter(inputs, arrays, over), kinds, over)
        return results, _leave(arrays, over.mesh)

    compiled = jax.jit(run, static_argnums=(0, 1))

    @functools.wraps(function, updated=())
    def mapped(*args, **kwargs):
        over = fixed or count_of(None, axis_name)
        taken = nnx.take(_Call(args, kwargs), _words(in_specs, args, kwargs))
        inputs, arrays = _split(taken.tree._replace(objects=taken.objects), taken.words, INPUTS)
        # JAX leaves axes of a mesh to the compiler only inside a compiled program.
        several = over.mesh is not None and len(over.mesh.shape) > 1
        alone = several and not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))
        try:
            call = functools.partial(
                compiled if alone and hash(inputs) is not None else run, inputs
            )
        except TypeError:  # a leaf has no hash: compile for this call
            call = jax.jit(functools.partial(run, inputs), static_argnums=0)
        results, arrays = call(over, arrays)
        returned = results.tree(arrays)
        nnx.update(taken, returned.objects)
        return nnx.put(returned.result, taken.given)

    return mapped


class _Call(NamedTuple):
    args: tuple
    kwargs: dict
    objects: Any = None  # objects of flax.nnx, taken out of both


class _Returned(NamedTuple):
    result: Any
    objects: dict  # the arrays of the call's objects afterwards


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Skeleton:
    """A tree without its arrays."""

    words: tuple[str, ...]  # one for every leaf
    names: tuple[str, ...]
    rest: tuple[Any, ...]  # (type, value) of other leaves, since 1 == True; None for an array
    structure: Any

    def names_of(self, word: str) -> list[str]:
        """The names of the arrays with this word."""
        leaves = zip(self.words, self.names, self.rest, strict=True)
        return [name for of, name, rest in leaves if of == word and rest is None]

    def tree(self, arrays: dict[str, list]) -> Any:
        """The tree, with these arrays."""
        left = {word: iter(leaves) for word, leaves in arrays.items()}
        leaves = zip(self.words, self.rest, strict=True)
        return self.structure.unflatten(
            next(left[word]) if rest is None else rest[1] for word, rest in leaves
        )


def _split(tree, words, kinds) -> tuple[_Skeleton, dict[str, list]]:
    """A tree without its arrays, and the arrays grouped by their words."""
    arrays, names, rest = {word: [] for word in kinds}, [], []
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for (path, x), word in zip(leaves, words, strict=True):
        is_array = isinstance(x, LEAVES | NUMBERS if word in REDUCE else LEAVES)
        of_object = getattr(path[0], "name", None) == "objects"
        names.append(path[-1].key if of_object else jax.tree_util.keystr(path).removeprefix("."))
        rest.append(None if is_array else (type(x), x))
        if is_array:
            arrays[word].append(x)
    return _Skeleton(tuple(words), tuple(names), tuple(rest), structure), arrays


def _words(in_specs, args, kwargs) -> list[str]:
    """The words of all leaves of a call."""
    if type(in_specs) is tuple and len(in_specs) != len(args):
        raise ValueError(
            f"the call has {len(args)} positional arguments and in_specs is {in_specs}: give one "
            "entry for each. Keyword arguments are replicated and have none."
        )
    words = _broadcast("in_specs", in_specs, args)
    for (path, x), word in zip(jax.tree.leaves_with_path(args), words, strict=True):
        needed = word == "key" or (word != "replicated" and len(path) == 1)
        if needed and not isinstance(x, LEAVES):
            raise ValueError(
                f"args{jax.tree_util.keystr(path)} is {x!r}, and {word!r} in in_specs: pass an "
                "array, or say 'replicated'."
            )
    return words + ["replicated"] * len(jax.tree.leaves(kwargs))


def _broadcast(name, specs, tree) -> list[str]:
    """The words of all leaves of a tree."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(specs, tree))
    except ValueError as error:
        why = " ".join(str(error).split()).replace("broadcast_prefix prefix_tree", name)
        raise ValueError(f"{name} is {specs!r}, which is not a prefix tree: {why}") from None


def _results(tree, out_specs, kinds, before, objects) -> tuple[_Skeleton, dict[str, list]]:
    """Splits one worker's result like `_split`, together with the objects it was given."""
    words, changed = _broadcast("out_specs", out_specs, tree), {}
    if before is not None:
        tree = nnx.places_of(tree, words, before.graph, objects)
        changed, word_of = nnx.changes(before, objects)
        words = _broadcast("out_specs", out_specs, tree) + jax.tree.leaves(word_of)
    results, arrays = _split(_Returned(tree, changed), words, kinds)
    for word, leaves in arrays.items():
        for name, x in zip(results.names_of(word), leaves, strict=True):
            if word == "batch" and not jnp.ndim(x):
                raise ValueError(f"{name} is 'batch' in out_specs and has no rows: say 'worker'.")
            if word in REDUCE and is_key(x):
                raise ValueError(
                    f"{name} is a key, which has no {word}: say 'worker' in out_specs."
                )
    return results, arrays


def _simulated(one, arrays, words, over):
    """All workers at once, on one device."""
    vmap = functools.partial(jax.vmap, axis_name=over.axis_name, axis_size=over.count)
    try:
        return vmap(one, (_each(INPUTS, None, 0),), (0, _each(words, None, 0)))(arrays)
    except ValueError:
        if "replicated" in words:  # JAX does not say which of them has an axis
            _refuse(_differing(one, arrays, over))
        raise


def _in_turn(one, arrays, words, over):
    """One worker after another: `jax.vmap` would group convolutions, which is slow on CPUs."""
    del words
    same = {"replicated": arrays["replicated"]}
    mapped = {word: leaves for word, leaves in arrays.items() if word not in same}

    def body(_, x):
        results, arrays = one(x | same)
        for name in results.names_of("replicated"):
            raise ValueError(
                f"{name} is 'replicated' in in_specs and the function changes it, but in_turn "
                "cannot prove it equal on all workers: say 'worker', and pass what "
                "local_opt.replicate makes of it."
            )
        return None, (results, arrays)

    return jax.lax.scan(body, None, mapped, over.count)[1]


def _on_mesh(one, arrays, words, over):
    """One worker per position on an axis of a mesh; other axes are left to the compiler."""
    whole, rows = PartitionSpec(), PartitionSpec(over.axis_name)
    # XLA fails on programs whose only used arguments are empty arrays.
    passed = jax.tree.map(lambda x: x if x.size or is_key(x) else None, arrays)

    def of_worker(word, x, of_all):
        if x is not None:
            return x if word in WITHOUT_AXIS else x[0]
        first = {"replicated": of_all.shape[:1], "batch": (of_all.shape[0] // over.count,)}
        return jnp.zeros((*first.get(word, ()), *of_all.shape[1:]), of_all.dtype)

    def per_device(passed):
        given = {
            word: [of_worker(word, *x) for x in zip(passed[word], arrays[word], strict=True)]
            for word in passed
        }
        results, by_word = _proved(one, given, over) if "replicated" in words else one(given)
        return results, {
            word: x if word in WITHOUT_AXIS else [jnp.expand_dims(a, 0) for a in x]
            for word, x in by_word.items()
        }

    # With check_vma=True JAX refuses a worker's scans that start from zeros, and sums gradients
    # with respect to replicated arguments over the workers.
    return jax.shard_map(
        per_device,
        mesh=over.mesh,
        axis_names={over.axis_name},
        check_vma=False,
        in_specs=(_each(INPUTS, whole, rows),),
        out_specs=(whole, _each(words, whole, rows)),
    )(passed)


def _each(words, replicated, other) -> dict:
    return {word: replicated if word == "replicated" else other for word in words}


def _proved(one, arrays, over):
    """The results of a worker on a mesh; raises unless the replicated ones are equal on all.

    Without this check, one worker's value would silently stand for all. `jax.vmap` knows which
    values depend on the worker, and fails at operations that need several devices.
    """
    jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(arrays)  # traced once for both

    def again(arrays):
        leaves = core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    if not shapes[1]["replicated"]:  # as for a replicated object that the step does not change
        return again(arrays)

    def of_all(arrays):
        many = jax.tree.map(lambda x: jax.lax.broadcast(x, (over.count,)), arrays)
        return many | {"replicated": arrays["replicated"]}

    names, why = [], "it calls the host"
    try:
        jax.eval_shape(lambda x: names.extend(_differing(again, of_all(x), over)), arrays)
        proved = not any(str(effect).endswith("IO") for effect in jaxpr.effects)
    except Exception as error:  # JAX raises several types for what it cannot map
        proved, why = False, repr(error).partition(r"\n")[0]
    _refuse(names)
    if not proved:
        raise ValueError(
            f"{_place(shapes[0].names_of('replicated')[0])}, and is not proved to be equal on all "
            f"workers ({why}): say 'worker', 'mean' or 'sum'."
        )
    return again(arrays)


def _differing(one, arrays, over) -> list[str]:
    """The replicated results that depend on the worker."""
    names = []

    def note(name, x):
        @jax.custom_batching.custom_vmap
        def same(x):
            return x

        @same.def_vmap
        def of_workers(size, mapped, x):
            del size
            names.append(name)
            return x, mapped[0]

        return same(x)

    def noted(arrays):
        results, arrays = one(arrays)
        return list(map(note, results.names_of("replicated"), arrays["replicated"]))

    how = {"axis_name": over.axis_name, "axis_size": over.count}
    jax.eval_shape(jax.vmap(noted, (_each(INPUTS, None, 0),), **how), arrays)
    return names


def _refuse(differing) -> None:
    if differing:
        raise ValueError(
            f"{_place(differing[0])} and differs between workers: make it equal, as by "
            "jax.lax.pmean or local_opt.pmean, or say 'worker', 'mean' or 'sum'."
        )


def _place(name: str) -> str:
    """Where a replicated array stands in the specs."""
    if name.startswith("result"):
        return f"{name} is 'replicated' in out_specs"
    return f"{name} is 'replicated' in in_specs, is changed by the function"


def _enter(inputs, arrays, over) -> dict[str, list]:
    """The arrays of all arguments, as they are mapped over."""
    count, axis_name, mesh = over

    def enter(word, name, x):
        x = typed_key(x) if word == "key" else x
        shape = jnp.shape(x)
        if word == "key":
            if not is_key(x) or shape:
                raise ValueError(
                    f"{name} is 'key' in in_specs and {jnp.result_type(x)}{list(shape)}: pass one "
                    "key, as jax.random.key(0), or keys of all workers as 'worker'."
                )
            x = fold_in_workers(jnp.broadcast_to(x, (count,)))
        if word == "worker" and shape[:1] != (count,):
            raise ValueError(
                f"{name} is 'worker' in in_specs and has the shape {shape}, and there are {count} "
                "workers: make it by local_opt.replicate(tree, workers), after jnp.asarray for a "
                "Python number, or say 'replicated' or 'batch'."
            )
        if word == "batch":
            if not shape or not shape[0] or shape[0] % count:
                raise ValueError(
                    f"{name} is 'batch' in in_specs and has the shape {shape}: its rows must be a "
                    f"multiple of the {count} workers. Take another batch size, or 'replicated'."
                )
            x = jnp.reshape(x, (count, shape[0] // count, *shape[1:])) if mesh is None else x
        if mesh is None or axis_name not in mesh.explicit_axes:
            return x
        first = () if word == "replicated" else (axis_name,)
        rest = [s if {*names_of(s)} <= {*mesh.explicit_axes} else None for s in spec_of(x)]
        spec = PartitionSpec(*first, *rest[len(first) :])
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return {
        word: [enter(word, *leaf) for leaf in zip(inputs.names_of(word), leaves, strict=True)]
        for word, leaves in arrays.items()
    }


def _leave(arrays, mesh) -> dict[str, list]:
    """The arrays of the results, from those of all workers."""

    def leave(word, x):
        if word == "batch" and mesh is None:
            return jnp.reshape(x, (-1, *x.shape[2:]))
        if word not in REDUCE:
            return x
        # Floating leaves are summed in float32 and keep their type; others behave as in `jnp`.
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return REDUCE[word](x, axis=0)
        return REDUCE[word](x.astype(wide_type(x.dtype)), axis=0).astype(x.dtype)

    return {word: [leave(word, x) for x in leaves] for word, leaves in arrays.items()}


def _check_words(name, specs, allowed) -> list[str]:
    """The words of a prefix tree, each once."""
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    for path, word in leaves:
        if not isinstance(word, str) or word not in allowed:
            place = name + jax.tree_util.keystr(path)
            raise ValueError(f"{place} is {word!r}: pass one of {', '.join(allowed)}.")
    return sorted({word for _, word in leaves})


def _check_function(function, in_specs) -> None:
    if not callable(function):
        raise ValueError(f"function is {function!r}: pass the step of one worker, a function.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    most = (
        np.inf if inspect.Parameter.VAR_POSITIONAL in kinds else sum(map(POSITIONAL.count, kinds))
    )
    if type(in_specs) is tuple and len(in_specs) > most:
        raise ValueError(
            f"in_specs is {in_specs} and the function takes {signature}: give one entry for each "
            "positional argument. Keyword arguments are replicated."
        )
