"""A small problem for local steps: workers with their own least squares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import local_opt
from experiments.compare import rows
from syncopate import mesh
from tests.plain_loop import Streaming, history

W = 4
RATE, MOMENTUM = 0.05, 0.9
PLAN = local_opt.SyncPlan([0, 1, 3, 6, 10], 13)  # rounds of 1, 2, 3, 4, 3 steps
COMPRESSORS = {name: make() for name, make in rows.COMPRESSORS.items()}
SGD = optax.sgd(RATE, momentum=MOMENTUM)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)  # DiLoCo's outer optimizer


def of_one(function):
    """A per-worker function of a shard_map, whose arguments and results have an axis in front."""

    def per_device(*args):
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    return per_device


def on_mesh(function, workers=W, check_vma=True):
    """A per-worker function, one worker per device; everything has a leading worker axis."""
    over = jax.make_mesh((workers,), ("worker",), (AxisType.Auto,), devices=jax.devices()[:workers])
    spec, run = PartitionSpec("worker"), of_one(function)
    return jax.shard_map(run, mesh=over, in_specs=spec, out_specs=spec, check_vma=check_vma)


RUNS = {
    "vmap": functools.partial(jax.vmap, axis_name="worker"),
    "shard_map": on_mesh,
    "shard_map, no vma": functools.partial(on_mesh, check_vma=False),
}
vmap = RUNS["vmap"]


def copies(tree, workers=W):
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * workers), tree)


def distance(tree, other):
    """|tree - other| / |other|."""
    a, b = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)])
        for t in (tree, other)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def assert_bitwise_equal(tree, other):
    """Checks that structure, types and numbers are equal, keys included."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def assert_workers_bitwise_equal(tree):
    for x in jax.tree.leaves(tree):
        np.testing.assert_array_equal(x, np.stack([x[0]] * len(x)))


# Least squares: worker w at step t has 1/2 |A_w x - b_wt|^2, x of 6 numbers in two leaves.

RNG = np.random.default_rng(0)
MATRICES = RNG.normal(size=(W, 5, 6)).astype(np.float32)
TARGETS = RNG.normal(size=(14, W, 5)).astype(np.float32)
PLACES = [0, 1], [2, 3, 4, 5]  # of b and of w, in the order of the reference
START = {"w": jnp.asarray(RNG.normal(size=(2, 2)), jnp.float32), "b": jnp.zeros(2)}


def flat(params):
    """[..., 6] in the order of the reference: b, then w."""
    w, b = np.asarray(params["w"]), np.asarray(params["b"])
    return np.concatenate([b, w.reshape(*w.shape[:-2], 4)], axis=-1)


def square_loss(params, matrix, target):
    x = jnp.concatenate([params["b"], params["w"].reshape(-1)])
    return 0.5 * jnp.sum((matrix @ x - target) ** 2)


def square_gradient(w, t, x):
    return MATRICES[w].T @ (MATRICES[w] @ x - TARGETS[t, w])


def square_step(opt, **options):
    def step(params, state, matrix, target):
        grads = jax.grad(square_loss)(params, matrix, target)
        updates, state = opt.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return step


def run_all(made, run=vmap, plan=PLAN, *, workers=W, targets=TARGETS, **more):
    """[T, W, 6], parameters of all workers after every step, and the last state: in one program.

    made: a transformation, or `Rounds` that are synchronised by the plan; more: {name: [T, W] or
    [T]}, extra arguments of an update, of which `weight` is that of a sync.
    """
    total, planned = plan.total_steps, not isinstance(made, local_opt.Rounds)
    at_sync = not planned and not made.in_step
    more = {name: np.stack([x] * workers) if x.ndim == 1 else x.T for name, x in more.items()}

    @jax.jit
    @run
    def all_steps(params, matrix, targets, more):
        def body(carry, now):
            due, target, more = now
            weight = {"weight": more.pop("weight", None)} if at_sync else {}
            params, state = square_step(made, **more)(*carry, matrix, target)
            if not planned:
                synced = made.sync(params, state, **weight)
                carry = jax.tree.map(lambda a, b: jnp.where(due, a, b), synced, (params, state))
                params, state = carry
            carry = mesh.varying((params, state), matrix)
            return carry, carry[0]

        due = jnp.asarray(plan.syncs_after(np.arange(total)))
        start = mesh.varying((params, made.init(params)), matrix)
        (_, state), history = jax.lax.scan(body, start, (due, targets, more))
        return history, state

    targets = np.swapaxes(targets[:total, :workers], 0, 1)
    history, state = all_steps(copies(START, workers), MATRICES[:workers], targets, more)
    return np.swapaxes(flat(history), 0, 1), state


def ends_of(plan) -> list[int]:
    """One past the last step of each round."""
    return (plan.starts + plan.periods).tolist()


def run_rounds(rounds, plan, run=vmap):
    """As `run_all`, driven by the host."""
    step, params, history = jax.jit(run(square_step(rounds))), copies(START), []
    sync = jax.jit(run(rounds.sync))
    state = jax.jit(run(rounds.init))(params)
    for start, length in zip(plan.starts, plan.periods, strict=True):
        for t in range(start, start + length):
            params, state = step(params, state, MATRICES, TARGETS[t])
            if t == start + length - 1:
                params, state = sync(params, state)
                assert_workers_bitwise_equal(params)
            history.append(flat(params))
    return np.stack(history), state


@functools.cache
def streamed(stream, run):
    """(init, step, communicate) of a stream: one program for each event."""

    def step(params, state, matrix, target, weight, lost):
        params, state = square_step(stream)(params, state, matrix, target)
        if weight is None:
            return params, state
        return jax.tree.map(lambda x: jnp.where(weight == 0, x + lost, x), params), state

    def communicate(params, state, weight, event):
        sent = lambda x, s, w: stream.communicate(x, s, (event,), weight=w)  # noqa: E731
        return RUNS[run](sent)(params, state, weight)

    run_all = [jax.jit(RUNS[run](function)) for function in (stream.init, step)]
    return *run_all, jax.jit(communicate, static_argnums=3)


def run_segments(stream, segments, run="vmap", weights=None, lost=0.0, begin=None):
    """As `run_all`, of fragments: (history, parameters, state).

    weights [13, W]: of a worker in every step, None for equal ones; `lost` is added to the
    parameters of a worker after a step with weight 0; begin: parameters and state to go on from.
    """
    init, step, communicate = streamed(stream, run)
    params, state = begin or (copies(START), init(copies(START)))
    history, weights = [], [None] * 13 if weights is None else weights
    for at, end, due in segments:
        for event in due:
            params, state = communicate(params, state, weights[at - 1], event)
            assert_workers_bitwise_equal((state.anchor, state.outer))
        if history:
            history[-1] = flat(params)
        for t in range(at, end):
            more = weights[t], jnp.full(W, lost)
            params, state = step(params, state, MATRICES, TARGETS[t], *more)
            history.append(flat(params))
    return np.stack(history), params, state


def plain_sgd(rate=RATE):
    """A step of SGD of the plain loop, without a state."""
    return lambda w, t, x, state: (x - rate * square_gradient(w, t, x), state)


def expected_stream(ends, delay, mixing, outer, weights=None, rate=RATE):
    """As `run_segments`, by the plain loop: fragments are b and w, sent after the ends of each."""
    first, more = flat(START).astype(np.float64), {"mixing": mixing, "weights": weights}
    stream = Streaming(first, PLACES, ends, 13, delay=delay, outer=outer, **more)
    return history(plain_sgd(rate), first, [()] * W, 13, dict.fromkeys(range(13), stream))
