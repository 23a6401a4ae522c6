"""One lift for the worker axis: a step of one worker becomes a step of all, wherever they are."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from local_opt import runners
from local_opt.workers import Part, check_same_start, consolidate, explicit, joined, parted
from syncopate import plans

INPUTS = ("owned", "shared", "split", "key")
OUTPUTS = ("owned", "shared", "split", "mean")


def lift(
    function: Callable,
    workers: int | Mesh,
    *,
    inputs: str | Sequence[str],
    outputs: str | Sequence[str],
    axis_name: str = runners.AXIS,
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
    an all-reduce in every call; where workers seldom talk, return losses owned and take their mean
    when they are looked at. Leaves that are no arrays (an equinox model's functions) pass through.

    Args:
      function: of one worker; its collectives name `axis_name`. Where it differentiates by a shared
        argument, the gradient is the worker's own.
      workers: W >= 1, simulated on one device by `jax.vmap`; or a mesh with that axis, one worker
        per place on it, by `jax.shard_map`. Other axes of the mesh are left to the compiler: a
        worker that is several devices. Explicit, Auto: both do.
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
    run = _runner(workers, axis_name, in_turn)

    def lifted(*args):
        if len(args) != len(inputs):
            raise ValueError(
                f"{len(args)} arguments came and inputs are {inputs}: give one word for every "
                "positional argument."
            )
        given = [parted(arg, kind) for arg, kind in zip(args, inputs, strict=True)]
        said = []

        def one(*arrays):
            found = function(*map(joined, arrays, given))
            found = (found,) if single else tuple(found)
            if len(found) != len(results):
                raise ValueError(
                    f"the function has {len(found)} results and outputs are {results}: give one "
                    "word for each, or one word, not in a tuple, for a single result."
                )
            said[:] = [parted(result, kind) for result, kind in zip(found, results, strict=True)]
            return tuple(part.arrays for part in said)

        entered = [
            _entered(part, kind, workers, count, axis_name)
            for part, kind in zip(given, inputs, strict=True)
        ]
        left = run(
            one,
            owned_in=[kind != "shared" for kind in inputs],
            owned_out=[kind != "shared" for kind in results],
        )(*entered)
        left = tuple(
            joined(_left(arrays, kind), part)
            for arrays, kind, part in zip(left, results, said, strict=True)
        )
        return left[0] if single else left

    return lifted


def owned(tree, workers: int | Mesh, *, axis_name: str = runners.AXIS):
    """The same start for every worker: leaves [W, ...], on the devices of their workers.

    x_w = x for w = 0 .. W - 1, each in memory of its own, so that a step may be given it to keep.

    Args:
      tree: parameters, optimizer state, a whole training state; numbers become arrays, and other
        leaves that are no arrays stay. On a mesh with further axes arrays that are split over these
        stay split.
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
        if isinstance(x, bool) or not isinstance(x, int | float):
            return x
        return jnp.asarray(x, jnp.result_type(x))  # not a weak type, which the first step changes

    def repeated(arrays):
        return [jnp.broadcast_to(x, (count, *x.shape)) for x in arrays]

    part = parted(jax.tree.map(number, tree), "owned")
    if not isinstance(workers, Mesh):
        return joined(jax.jit(repeated)(part.arrays), part)
    specs = [_spec(x) for x in part.arrays]
    if AxisType.Explicit in workers.axis_types:
        # As long as the shapes, as a step's results are there: else its second call would compile.
        longer = zip(specs, part.arrays, strict=True)
        specs = [(*spec, *[None] * (x.ndim - len(spec))) for spec, x in longer]
    places = [NamedSharding(workers, PartitionSpec(axis_name, *spec)) for spec in specs]
    if jax.process_count() == 1:  # one copy on each device, and never all of them on one
        whole = [NamedSharding(workers, PartitionSpec(*spec)) for spec in specs]
        given = jax.device_put(part.arrays, whole)
        return joined(jax.jit(repeated, out_shardings=places)(given), part)
    found = [_from_host(x, count, place) for x, place in zip(part.arrays, places, strict=True)]
    check_same_start(found, what="state")
    return joined(found, part)


def count_of(workers: int | Mesh, axis_name: str) -> int:
    """W, of a number or a mesh.

    Raises:
      ValueError: for a number below 1, or a mesh without the axis.
    """
    if isinstance(workers, Mesh):
        if axis_name not in workers.shape:
            raise ValueError(
                f"the mesh has the axes {workers.axis_names} and the workers' is {axis_name!r}: "
                "pass axis_name=, or make the mesh with that axis."
            )
        return workers.shape[axis_name]
    if not plans.is_whole(workers) or workers < 1:
        raise ValueError(f"workers is {workers!r}: pass a whole number >= 1, or a mesh.")
    return int(workers)


def _entered(part: Part, kind, workers, count, axis_name) -> list:
    """The arrays of an argument as `runners` take them, on the devices of a mesh."""
    found = part.arrays
    if kind == "key":
        found = [_keys(x, count, path) for x, path in zip(found, part.paths, strict=True)]
    elif kind == "split":
        found = [_split(x, count, path) for x, path in zip(found, part.paths, strict=True)]
    elif kind == "owned":
        for x, path in zip(found, part.paths, strict=True):
            if jnp.shape(x)[:1] != (count,):
                raise ValueError(
                    f"an owned leaf {jax.tree_util.keystr(path)} has the shape {jnp.shape(x)} and "
                    f"there are {count} workers: make it by local_opt.owned(tree, workers), or say "
                    "that it is shared or split."
                )
    if not isinstance(workers, Mesh) or AxisType.Explicit not in workers.axis_types:
        return found
    first = () if kind == "shared" else (axis_name,)
    specs = [PartitionSpec(*first, *_spec(x)[len(first) :]) for x in found]
    return [
        jax.sharding.reshard(x, NamedSharding(workers, spec))
        for x, spec in zip(found, specs, strict=True)
    ]


def _left(arrays, kind) -> list:
    """The arrays of a result, as its word says."""
    if kind == "mean":
        return consolidate(arrays)
    if kind == "split":
        return [_reshaped(x, (-1, *x.shape[2:]), (*_spec(x)[:1], *_spec(x)[2:])) for x in arrays]
    return arrays


def _reshaped(x, shape, spec):
    """`x.reshape(shape)`, split by `spec` if the axes of its mesh are explicit."""
    if (sharding := explicit(x)) is None:
        return jnp.reshape(x, shape)
    return jnp.reshape(x, shape, out_sharding=sharding.update(spec=PartitionSpec(*spec)))


def _split(x, count, path):
    size = jnp.shape(x)[0] if jnp.ndim(x) else 0
    if not size or size % count:
        raise ValueError(
            f"a split leaf {jax.tree_util.keystr(path)} has the shape {jnp.shape(x)}: its rows "
            f"must be a multiple of the {count} workers. Take another batch size, or share it."
        )
    spec = _spec(x)
    return _reshaped(x, (count, size // count, *jnp.shape(x)[1:]), (*spec[:1], None, *spec[1:]))


def _keys(x, count, path):
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) or jnp.ndim(x):
        raise ValueError(
            f"the key {jax.tree_util.keystr(path)} is {jnp.result_type(x)}{list(jnp.shape(x))}: "
            "pass one typed key, as of jax.random.key(0), or keys of all workers as owned."
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(count))


def _runner(workers, axis_name, in_turn) -> Callable:
    if isinstance(workers, Mesh):
        if in_turn:
            raise ValueError("in_turn is of simulated workers: pass their number, not a mesh.")
        return runners.over_mesh(workers, axis_name=axis_name)
    if in_turn:
        return runners.in_turn
    return lambda function, **sides: runners.simulate(function, axis_name=axis_name, **sides)


def _spec(x) -> tuple:
    """How an array is split over a mesh already; () if it is whole."""
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _from_host(x, count, sharding):
    """This process's numbers, for its own workers."""
    host = np.asarray(x)
    rows = np.broadcast_to(host, (count, *host.shape))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def _checked_words(words, known, name) -> tuple[str, ...]:
    found = tuple(words.split()) if isinstance(words, str) else tuple(words)
    if any(word not in known for word in found):
        raise ValueError(f"{name} are {words!r}: pass some of {', '.join(known)}.")
    return found
