"""The mean change of all workers, sent in a narrow format, group by group of leaves."""

import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from local_opt.formats import LANES, Compressor, rows_of
from local_opt.mean import moved_from, pieces_of, weighed
from local_opt.workers import AxisName, check_kind
from syncopate import mesh
from syncopate.workers import AXIS

# A group has GROUP numbers, or 1 / GROUPS of all if that is more. To compress it takes a few copies
# of the group.
GROUP, GROUPS = 2**22, 16


def synchronize_changes(
    tree: PyTree,
    *,
    axis_name: AxisName = AXIS,
    anchor: PyTree,
    compressor: Compressor,
    residual: PyTree = (),
    specs: PyTree[P] | None = None,
    relative_weight: Float[Array, ""] | None = None,
) -> tuple[PyTree, PyTree]:
    """The workers' mean change from an anchor; the changes are sent in a narrow format.

    c_w = s_w (x_w - a) + f e_w; d = Q(1/W sum_w Q(c_w)); e_w <- what both roundings lost of c_w.
    s_w is 1, or the relative weight W v_w / sum_u v_u if workers have weights v_w.

    With feedback f = 1 nothing is lost for good: W d + sum_w e_w is as without rounding. This holds
    under weights, too: a worker with weight zero still sends its residual of earlier changes. Each
    worker averages one slice of the blocks, with its own changes unrounded, and keeps W times what
    the second rounding loses. If the compressor `gathers`, every worker averages everything, and
    there is no second rounding. With specs, each device exchanges only its shards.

    `residual` is `no_residual` at first, and the weight is as in `averaged`. Returns d, which is
    float32 and bitwise equal on all workers, and e_w.

    References:
      Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
      Error-Compensated Compression, 2019, https://arxiv.org/abs/1905.05957
    """
    why = (
        f"the compressor ({compressor.rule}) sends real floating numbers only. Keep it outside, or "
        "compress=None."
    )
    check_kind(tree, jnp.floating, why)
    tree = jax.tree.map(jnp.asarray, tree)
    leaves, treedef = jax.tree.flatten(tree)
    anchors, residuals = jax.tree.leaves(anchor), jax.tree.leaves(residual)
    if not leaves:
        return tree, residual
    if specs is None and (others := mesh.beside(axis_name)):
        raise ValueError(
            f"the compressor ({compressor.rule}) sends leaves as one vector, for which a compiler "
            f"would gather shards over the mesh axes {others} beside the workers' {axis_name!r}. "
            "Pass specs=, how parameters are split over these axes, or specs=jax.P() if they are "
            "not."
        )
    of, by_axes = jax.tree.leaves(mesh.like(P() if specs is None else specs, tree)), {}
    for i, spec in enumerate(of):
        by_axes.setdefault(frozenset(mesh.axes_in(spec)), []).append(i)

    def send(leaves, anchors, residuals, weight):
        # Leaves that every device of a worker holds whole form a group, to be rounded equally.
        new, residual = list(leaves), list(residuals)
        for group in by_axes.values():
            args = [[x[i] for i in group if x] for x in (leaves, anchors, residuals)]
            sent = _sent(compressor, axis_name, weight, *args)
            for all_of, values in zip((new, residual), sent, strict=True):
                for i, x in zip(group, values, strict=False):
                    all_of[i] = x
        return new, residual

    of_all = of, of, of[: len(residuals)], P()
    send = mesh.over_shards(mesh.axes_of(specs), send, of_all, of_all[1:3])
    new, residuals = send(leaves, anchors, residuals, relative_weight)
    kept = jax.tree.unflatten(jax.tree.structure(residual), residuals)
    return jax.tree.unflatten(treedef, new), kept


def _sent(compressor, axis_name, weight, leaves, anchors, residuals):
    """Lists of the leaves' mean changes, and of their residuals."""
    exchange, done = _gathered if compressor.gathers else _in_halves, []
    parts = 1 if compressor.gathers else lax.axis_size(axis_name)
    changes, means, left = {}, [[] for _ in leaves], [[] for _ in leaves]
    new, new_residuals = list(leaves), list(residuals)
    for group in groups_of([x.size for x in leaves], compressor, axis_name):
        after = after_all(done, axis_name)
        for i, start, _ in group:
            if start == 0:
                anchors[i] = after(anchors[i])
                change = moved_from(anchors[i], leaves[i]).astype(jnp.float32)
                change = change if weight is None else weighed(change, weight)
                if compressor.feedback:
                    change += compressor.feedback * residuals[i]
                changes[i] = change.reshape(-1)
            else:
                changes[i] = after(changes[i])
        pieces = [changes[i][start:end] for i, start, end in group]
        size = sum(x.size for x in pieces)
        fill = rows_of(compressor, size, parts) * LANES - size  # so that slices hold whole blocks
        # Without the barriers a compiler may repeat the whole computation for every leaf.
        flat = jnp.concatenate([*pieces, jnp.zeros(fill, jnp.float32)])
        rows = lax.optimization_barrier(flat.reshape(-1, LANES))
        mean, residual_rows = lax.optimization_barrier(exchange(compressor, rows, axis_name))
        done = [mean, residual_rows]
        cuts = zip(group, pieces_of(mean, pieces), pieces_of(residual_rows, pieces), strict=True)
        for (i, _, end), mean_piece, residual_piece in cuts:
            means[i].append(mean_piece)
            left[i].append(residual_piece)
            if end == leaves[i].size:
                new[i] = jnp.concatenate(means[i]).reshape(leaves[i].shape)
                if compressor.feedback:
                    new_residuals[i] = jnp.concatenate(left[i]).reshape(leaves[i].shape)
                done += [new[i], *new_residuals[i : i + 1]]
    return new, new_residuals


def no_residual(tree: PyTree, compressor: Compressor | None) -> PyTree:
    """The `residual` of the first `synchronize_changes`: zeros, or () without feedback."""
    if compressor is None or not compressor.feedback:
        return ()
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)


def _in_halves(compressor, rows, axis_name):
    """The mean of the rows, and the residual: each worker averages a slice and sends it to all."""
    num_workers, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    each = len(rows) // num_workers
    decode = functools.partial(compressor.decode, r=each)
    slices = rows.reshape(num_workers, each, -1)
    messages = jax.vmap(compressor.encode)(slices)
    swapped = _swapped(messages, axis_name)
    received = jax.vmap(decode)(swapped)
    exact, rounded = (lax.dynamic_index_in_dim(x, mine, keepdims=False) for x in (slices, messages))
    mean = (jnp.sum(received, axis=0) + exact - decode(rounded)) / num_workers
    message = compressor.encode(mean)
    residual = lax.dynamic_update_index_in_dim(
        slices - jax.vmap(decode)(messages), num_workers * (mean - decode(message)), mine, 0
    )
    halves = _collected(message, axis_name)
    return jax.vmap(decode)(halves).reshape(rows.shape), residual.reshape(rows.shape)


def _swapped(messages, axis_name):
    """Exchanges messages [W, ...], one to each worker, for those [W, ...] from each worker."""
    names, manual = mesh.names_of(axis_name), jax.sharding.get_abstract_mesh().manual_axes
    if set(names) <= set(manual):
        return lax.all_to_all(messages, axis_name, 0, 0) if names else messages
    # Under jax.vmap JAX swaps one axis at a time, and only values that may differ by worker.
    differs = 0 * lax.axis_index(names).astype(messages.dtype)
    sizes = [lax.axis_size(name) for name in names]
    swapped = (messages + differs).reshape(*sizes, *messages.shape[1:])
    for i, name in enumerate(names):
        swapped = lax.all_to_all(swapped, name, i, i)
    return swapped.reshape(messages.shape)


def _collected(message, axis_name):
    """[W, ...], the messages of all workers."""
    names, shape = mesh.names_of(axis_name), (lax.axis_size(axis_name), *message.shape)
    if set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        return lax.all_gather(message, axis_name, tiled=True).reshape(shape)
    for name in reversed(names):  # under jax.vmap JAX gathers over one axis at a time
        message = lax.all_gather(message, name)
    return message.reshape(shape)


def _gathered(compressor, rows, axis_name):
    """The mean of the rows, and the residual: each worker receives the rows of all workers."""
    num_workers = lax.axis_size(axis_name)
    message = compressor.encode(rows)
    gathered = _collected(message, axis_name)

    def add(w, total):
        return total + compressor.decode(gathered[w], len(rows))

    residual = rows - compressor.decode(message, len(rows))
    # One worker after another: all at once would take W copies of the parameters.
    total = lax.fori_loop(1, num_workers, add, compressor.decode(gathered[0], len(rows)))
    return total / num_workers, residual


def groups_of(
    sizes: Sequence[int], compressor: Compressor, axis_name: AxisName
) -> list[list[tuple]]:
    """Groups of (leaf, start, end): parts of the leaves that are sent one after the other.

    All groups together send as many bytes as one group would, because all but the last fill whole
    rows. Every worker's slice has a multiple of 128 rows, whose scales fill rows, too. If the
    compressor gathers, a group has a multiple of 2048 blocks, whose tables fill rows.
    """
    times = 16 if compressor.gathers else lax.axis_size(axis_name)
    unit = times * compressor.multiple * LANES * LANES
    size = -(-max(GROUP, sum(sizes) // GROUPS) // unit) * unit
    groups, seen = [], 0
    for i, length in enumerate(sizes):
        start = 0
        while start < length:
            if seen % size == 0:
                groups.append([])
            end = min(length, start + size - seen % size)
            groups[-1].append((i, start, end))
            seen, start = seen + end - start, end
    return groups


def after_all(done: Collection[Array], axis_name: AxisName) -> Callable:
    """A function that returns its array, to be computed only after the arrays in `done`.

    Compilers drop barriers before they schedule a program, and would then hold the changes of all
    groups at once. Instead, a zero that the compiler cannot predict is computed from `done` and
    added to the array.
    """
    zero = (lax.axis_index(axis_name) // lax.axis_size(axis_name)).astype(jnp.uint32)
    for x in done:
        zero &= lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)

    def after(x):
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        raw = lax.bitcast_convert_type(x, unsigned) ^ zero.astype(unsigned)
        return lax.bitcast_convert_type(raw, x.dtype)

    return after if done else lambda x: x
