"""One lift for the worker axis: a step of one worker becomes a step of all, wherever they are."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from local_opt.workers import AXIS, check_synced, consolidate, count_of

INPUTS = ("owned", "shared", "split", "key")
OUTPUTS = ("owned", "shared", "split", "mean")


def lift(
    function: Callable,
    workers: int | Mesh,
    *,
    inputs: str | Sequence[str],
    outputs: str | Sequence[str],
    axis_name: str = AXIS,
    in_turn: bool = False,
) -> Callable:
    """A function of one worker, for all of them at once.

    y_w = f(x_w) for w = 0 .. W - 1, under the named axis that `local_steps` and orders need.

    What becomes of an argument, all of its leaves alike, is one word:

        owned   leaves [W, ...]; each worker has its own (`owned` makes them)
        shared  the same for all of them
        split   leaves [n, ...], a batch of all: worker w has the w-th n / W rows
        key     one key, from which every worker derives its own

    and of a result: owned; shared, where it is equal on all workers; split, leaves [n, ...] put
    together; mean, of floating leaves over the workers, worker 0's of others. On a mesh a mean is
    an all-reduce in every call: where workers seldom talk, return losses owned. Leaves that are no
    arrays (an equinox model's functions) pass through.

    Args:
      function: of one worker; its collectives name `axis_name`. Where it differentiates by a shared
        argument, the gradient is the worker's own.
      workers: W >= 1, simulated on one device by `jax.vmap`; or a mesh with that axis, one worker
        per place on it, by `jax.shard_map`. Other axes of the mesh are left to the compiler: a
        worker that is several devices.
      inputs: a word for every positional argument: "owned split", or ("owned", "split").
      outputs: a word for every result of a tuple; "owned" alone is of a single result, ("owned",)
        of a tuple of one.
      axis_name: of the workers.
      in_turn: whether simulated workers run one after another, which suits convolutions on CPUs;
        for functions without collectives.

    Returns:
      A function of the same arguments, to be jitted.

    Raises:
      ValueError: for another word, or a mesh without the axis, at construction; from the function,
        for other numbers of arguments or results, or leaves whose leading axis does not fit.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> plan = local_opt.constant(2, total_steps=4)
      >>> optimizer = local_opt.local_steps(optax.sgd(0.5), plan, axis_name="worker")
      >>> def step(x, state, target):
      ...     loss, grad = jax.value_and_grad(lambda x: (x - target[0]) ** 2)(x)
      ...     update, state = optimizer.update(grad, state, x)
      ...     return x + update, state, loss
      >>> step = jax.jit(local_opt.lift(
      ...     step, 2, inputs="owned owned split", outputs="owned owned mean"))
      >>> x, state = local_opt.owned((jnp.zeros(()), optimizer.init(jnp.zeros(()))), 2)
      >>> x, state, loss = step(x, state, jnp.array([1.0, 3.0]))
      >>> x.tolist(), float(loss)
      ([1.0, 3.0], 5.0)

    References:
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2024,
      https://arxiv.org/abs/2310.14423
    """
    count = count_of(workers, axis_name)
    single = isinstance(outputs, str) and len(outputs.split()) == 1
    inputs = _checked_words(inputs, INPUTS, "inputs")
    results = _checked_words(outputs, OUTPUTS, "outputs")
    if in_turn and isinstance(workers, Mesh):
        raise ValueError("in_turn is of simulated workers: pass their number, not a mesh.")
    if in_turn and "shared" in results:
        raise ValueError(f"outputs are {results}: workers in turn share no result.")

    def lifted(*args):
        if len(args) != len(inputs):
            raise ValueError(
                f"{len(args)} arguments came and inputs are {inputs}: give one word for every "
                "positional argument."
            )
        given, fixed = _parted(args, inputs)
        said = []

        def one(*arrays):
            found = function(*map(_joined, arrays, fixed))
            found = (found,) if single else tuple(found)
            if len(found) != len(results):
                raise ValueError(
                    f"the function has {len(found)} results and outputs are {results}: give one "
                    "word for each, or one word, not in a tuple, for a single result."
                )
            arrays, said[:] = _parted(found, results)
            return arrays

        if isinstance(workers, Mesh):
            run = _on_mesh(one, workers, axis_name, inputs, results)
        elif in_turn:
            run = _in_turn(one, inputs)
        else:
            run = jax.vmap(one, _sides(inputs, None, 0), _sides(results, None, 0), axis_name)
        entered = [
            _entered(arrays, word, workers, count, axis_name)
            for arrays, word in zip(given, inputs, strict=True)
        ]
        left = [
            _joined(_left(arrays, word, isinstance(workers, Mesh)), rest)
            for arrays, word, rest in zip(run(*entered), results, said, strict=True)
        ]
        return left[0] if single else tuple(left)

    return lifted


def _sides(words, shared, owned) -> tuple:
    return tuple(shared if word == "shared" else owned for word in words)


def _in_turn(function, inputs):
    """Workers one after another: as fast as training each alone.

    Each worker's own parameters make a batched convolution a grouped one, which CPUs do badly.
    """

    def run(*args):
        def one(owned):
            return function(*(owned.get(i, x) for i, x in enumerate(args)))

        return jax.lax.map(one, {i: x for i, x in enumerate(args) if inputs[i] != "shared"})

    return run


def _on_mesh(function, mesh, axis_name, inputs, results):
    """One worker per place on an axis of a mesh; its other axes are left to the compiler."""

    def each(trees, words, change):
        pairs = zip(trees, words, strict=True)
        alone = ("shared", "split")  # without an axis of workers; of split rows a worker has some
        return tuple(x if word in alone else jax.tree.map(change, x) for x, word in pairs)

    def per_device(*args):
        found = function(*each(args, inputs, lambda x: x[0]))
        return each(found, results, lambda x: x[None])

    whole, rows = PartitionSpec(), PartitionSpec(axis_name)
    # check_vma=True would make jax.grad of shared parameters insert a psum, and the rows would no
    # longer be this worker's own.
    return jax.shard_map(
        per_device, mesh=mesh, axis_names={axis_name}, check_vma=False,
        in_specs=_sides(inputs, whole, rows), out_specs=_sides(results, whole, rows),
    )  # fmt: skip


def owned(tree, workers: int | Mesh, *, axis_name: str = AXIS):
    """The same start for every worker: leaves [W, ...], on the devices of their workers.

    x_w = x for w = 0 .. W - 1, each in memory of its own, so that a step may be given it to keep.

    Args:
      tree: parameters, optimizer state, a whole training state. Whole numbers, as a TrainState's
        step, become arrays; other leaves that are no arrays, as the rate of an equinox dropout,
        stay. On a mesh with further axes arrays that are split over these stay split.
      workers: as of `lift`; axis_name: of the workers.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: where processes bring different numbers: initialise all of them from one key.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> local_opt.owned({"w": jnp.arange(2), "step": 0}, 3)["w"].tolist()
      [[0, 1], [0, 1], [0, 1]]
    """
    count = count_of(workers, axis_name)

    def number(x):
        if isinstance(x, bool) or not isinstance(x, int):
            return x
        return jnp.asarray(x, jnp.result_type(x))  # not a weak type, which the first step changes

    def repeated(arrays):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), arrays)

    (arrays,), (rest,) = _parted([jax.tree.map(number, tree)], ["owned"])
    if not isinstance(workers, Mesh):
        return _joined(jax.jit(repeated)(arrays), rest)
    explicit = AxisType.Explicit in workers.axis_types

    def place(x, *first):
        spec = _spec(x)
        # As long as the shape, as a step's results are there: else its second call would compile.
        spec += (None,) * (jnp.ndim(x) - len(spec)) if explicit else ()
        return NamedSharding(workers, PartitionSpec(*first, *spec))

    if jax.process_count() == 1:  # one copy on each device, and never all of them on one
        given = jax.device_put(arrays, jax.tree.map(place, arrays))
    else:
        given = jax.tree.map(np.asarray, arrays)  # each process's own, and they may differ
    places = jax.tree.map(lambda x: place(x, axis_name), arrays)
    found = jax.jit(repeated, out_shardings=places)(given)
    if jax.process_count() > 1:
        check_synced(found, what="state", ulps=0)
    return _joined(found, rest)


def _parted(trees, words):
    """Trees in two like them: their arrays, and other leaves; None where the other has a leaf."""
    kinds = jax.Array | np.ndarray | np.generic
    numbers = int | float | complex  # these have no axis of workers: shared ones need none

    def is_array(x, word):
        return isinstance(x, kinds) or (word == "shared" and isinstance(x, numbers))

    pairs = list(zip(trees, words, strict=True))
    arrays = [jax.tree.map(lambda x, w=w: x if is_array(x, w) else None, t) for t, w in pairs]
    rest = [jax.tree.map(lambda x, w=w: None if is_array(x, w) else x, t) for t, w in pairs]
    return tuple(arrays), tuple(rest)


def _joined(arrays, rest):
    return jax.tree.map(
        lambda x, other: other if x is None else x, arrays, rest, is_leaf=lambda x: x is None
    )


def _entered(arrays, word, workers, count, axis_name):
    """The arrays of an argument as they are mapped over, on the devices of a mesh."""
    on_mesh = isinstance(workers, Mesh)

    def enter(path, x):
        name, shape = jax.tree_util.keystr(path), jnp.shape(x)
        if word == "key":
            x = _keys(x, count, name)
        if word == "owned" and shape[:1] != (count,):
            raise ValueError(
                f"an owned leaf {name} has the shape {shape} and there are {count} workers: "
                "make it by local_opt.owned(tree, workers), or say that it is shared or split."
            )
        if word == "split":
            if not shape or not shape[0] or shape[0] % count:
                raise ValueError(
                    f"a split leaf {name} has the shape {shape}: its rows must be a multiple of "
                    f"the {count} workers. Take another batch size, or share it."
                )
            x = x if on_mesh else jnp.reshape(x, (count, shape[0] // count, *shape[1:]))
        if not on_mesh or AxisType.Explicit not in workers.axis_types:
            return x
        first = () if word == "shared" else (axis_name,)
        spec = PartitionSpec(*first, *_spec(x)[len(first) :])
        return jax.sharding.reshard(x, NamedSharding(workers, spec))

    return jax.tree_util.tree_map_with_path(enter, arrays)


def _left(arrays, word, on_mesh):
    """The arrays of a result, as its word says."""
    if word == "mean":
        return consolidate(arrays)
    if word == "split" and not on_mesh:
        return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), arrays)
    return arrays


def _keys(x, count, name):
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) or jnp.ndim(x):
        raise ValueError(
            f"the key {name} is {jnp.result_type(x)}{list(jnp.shape(x))}: "
            "pass one typed key, as of jax.random.key(0), or keys of all workers as owned."
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(count))


def _spec(x) -> tuple:
    """How an array is split over a mesh already; () if it is whole."""
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _checked_words(words, known, name) -> tuple[str, ...]:
    found = tuple(words.split()) if isinstance(words, str) else tuple(words)
    if any(word not in known for word in found):
        raise ValueError(f"{name} are {words!r}: pass some of {', '.join(known)}.")
    return found
