"""The mean over the workers of a tree, or of its changes, inside vmap or shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from local_opt.checks import ARRAYS, check_kind
from local_opt.groups import after_all, groups_of
from local_opt.weights import checked_weight, scaled, weighed, wide_type
from local_opt.wires import LANES, Wire, rows_of
from local_opt.workers import AXIS, AxisName
from syncopate import mesh

JOINED = 2**20  # numbers of an array that is rather copied than sent alone: 4 MB take gloo 5 ms


def synchronize(
    tree: PyTree, *, axis_name: AxisName = AXIS, weight: ArrayLike | None = None
) -> PyTree:
    """Overwrites every floating leaf with its mean over the workers.

    x <- 1/W sum_w x_w, or with weights v_w, x <- sum_w v_w x_w / sum_w v_w. Sums are taken in
    float32 (float64 leaves in float64), cast back, and bitwise equal on all workers; they must fit
    that type, |x_w| < 3e38 / W. Integers, booleans and PRNG keys stay this worker's own.

    Args:
      tree: this worker's arrays.
      axis_name: the workers' axis or axes, bound by `jax.vmap` or `jax.shard_map`.
      weight: v_w >= 0 and finite, one number of this worker, as of its tokens, or a bool; None for
        equal weights. An array of a worker with weight zero is not read, so it may be NaN. Where
        all weights are zero, or one is negative or not finite, the mean is NaN.

    Returns:
      A tree of the same shapes and dtypes.

    Raises:
      ValueError: outside of the workers' axis, for leaves that are no arrays, a weight that is not
        one number, or a tree that is equal on all workers by its type, as a gradient that JAX has
        added up over them.

    Examples:
      >>> import jax, jax.numpy as jnp, local_opt
      >>> jax.vmap(local_opt.synchronize, axis_name="worker")(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]
      >>> mean = jax.vmap(lambda x, v: local_opt.synchronize(x, weight=v), axis_name="worker")
      >>> mean(jnp.array([1.0, 2.0, jnp.nan, 6.0]), jnp.array([200, 100, 0, 100])).tolist()
      [2.5, 2.5, 2.5, 2.5]
    """
    _check_axis(axis_name)
    check_kind(tree, np.generic, ARRAYS)
    check_own(tree, axis_name, all_of=True)
    return averaged(tree, axis_name, weight)[0]


def averaged(tree: PyTree, axis_name: AxisName, weight: ArrayLike | None) -> tuple:
    """(the tree's mean, this worker's weight by the mean weight or None): see `synchronize`."""
    _check_axis(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves, share = [jnp.asarray(x) for x in leaves], None
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    wide = [leaves[i].astype(wide_type(leaves[i].dtype)) for i in places]
    if weight is None:
        means = _means(wide, axis_name)
    else:
        weight = scaled(checked_weight(weight), axis_name)
        # Together, so that processes on CPUs send the weight in the vector of the leaves.
        *means, total = _means([*(weighed(x, weight) for x in wide), weight], axis_name)
        means = [m / total.astype(m.real.dtype) for m in means]
        share = weight / total
    for i, mean in zip(places, means, strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves), share


def _check_axis(axis_name):
    """Raises ValueError outside of the axis; () is one worker without an axis."""
    if axis_name != ():
        mesh.axis_size(axis_name)


def check_own(tree: PyTree, axis_name: AxisName, *, all_of: bool = False) -> None:
    """Raises ValueError for a floating leaf that is typed as equal on all workers, or if all are.

    JAX has added up such a gradient over the workers: it is W times their mean. Where types say
    nothing, as under `check_vma=False` and `jax.vmap`, nothing is refused.
    """
    typed = mesh.typed_axes(axis_name)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    floating = [(path, x) for path, x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    equal = [(path, typed - mesh.varying_axes(x)) for path, x in floating]
    equal = [(jax.tree_util.keystr(path), sorted(axes)) for path, axes in equal if axes]
    if equal and (len(equal) == len(floating) or not all_of):
        name, axes = equal[0]
        raise ValueError(
            f"leaf {name or '(the array)'} is typed as equal on all workers of {axes}, as are "
            "parameters under in_specs=jax.P() and their gradients, which JAX has added up over "
            f"the workers. Before the gradient call params = jax.lax.pcast(params, {tuple(axes)}, "
            "to='varying'), or give parameters a leading worker axis and in_specs=jax.P('worker')."
        )


def _means(arrays, axis_name):
    """The mean of each array over the workers; processes on CPUs send small ones as one vector."""
    names, manual = mesh.names_of(axis_name), jax.sharding.get_abstract_mesh().manual_axes
    simulated = [name for name in names if name not in manual]
    # Over axes inside a worker a compiler would gather the vector's shards.
    if mesh.platform() != "cpu" or mesh.beside(axis_name):
        return lax.pmean(arrays, axis_name)
    if simulated == list(names):
        return [_simulated_mean(x, names) for x in arrays]
    if jax.process_count() == 1 or simulated:
        return lax.pmean(arrays, axis_name)
    # CPUs send array after array, and each waits for the other processes.
    groups = {}  # by dtype, or alone
    for i, x in enumerate(arrays):
        groups.setdefault(x.dtype if x.size <= JOINED else i, []).append(i)
    means = list(arrays)
    for places in groups.values():
        own = [arrays[i] for i in places]
        vector = lax.pmean(jnp.concatenate([x.reshape(-1) for x in own]), axis_name)
        for i, mean in zip(places, _leaves(vector, own), strict=True):
            means[i] = mean
    return means


def _simulated_mean(x, names):
    """The mean of an array over workers of one device, a CPU."""
    count = lax.axis_size(names)
    for name in names:
        rows = lax.all_gather(x, name)  # XLA takes ten times as long for a sum as for a product
        x = jnp.tensordot(jnp.ones(len(rows), x.dtype), rows, 1, precision="highest")
    return x / count


def synchronize_changes(
    tree: PyTree,
    *,
    axis_name: AxisName = AXIS,
    anchor: PyTree,
    wire: Wire,
    lost: PyTree = (),
    specs: PyTree[P] | None = None,
    share: Float[Array, ""] | None = None,
) -> tuple[PyTree, PyTree]:
    """Adds the workers' mean change to an anchor; the changes are sent in a narrow format.

    c_w = s_w (x_w - a) + f e_w; x <- a + Q(1/W sum_w Q(c_w)); e_w <- what both roundings lost of
    c_w. s_w = 1, or the share of a worker with weight v_w, W v_w / sum_u v_u.

    With feedback f = 1 nothing is lost for good: W x + sum_w e_w is as without rounding, also under
    weights, as changes are weighed before they are rounded: a worker with weight zero still sends
    what it has lost of changes that counted, and keeps what is lost of that. Each worker averages
    one slice of the blocks, with its own changes unrounded, and keeps W times what the second
    rounding loses. With a wire that `gathers`, every worker averages everything, and there is no
    second rounding. Sums are taken in float32.

    Args:
      tree: x_w, this worker's arrays, real and floating.
      anchor: a, a tree like it and equal on all workers: `tree` after the last sync.
      wire: the format Q, with its feedback f.
      lost: e_w of the last call; `nothing_lost` at first.
      specs: as in `local_rounds`; each device then exchanges its shards alone.
      share: s_w, as `averaged` finds it; None is 1.

    Returns:
      (tree, lost): x, bitwise equal on all workers, and e_w.

    References:
      Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
      Error-Compensated Compression, 2019, https://arxiv.org/abs/1905.05957
    """
    why = f"the wire ({wire.rule}) sends real floating numbers only. Keep it outside, or wire=None."
    check_kind(tree, jnp.floating, why)
    _check_axis(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    anchors, losses = jax.tree.leaves(anchor), jax.tree.leaves(lost)
    if not leaves:
        return tree, lost
    if specs is None:
        check_alone(axis_name, wire)
    of = jax.tree.leaves(mesh.like(P() if specs is None else specs, tree))

    def send(leaves, anchors, losses, share):
        # Leaves that are whole on all devices of a worker go apart, to be rounded alike on all.
        new, lost = list(leaves), list(losses)
        for group in _by_axes(of):
            args = [[x[i] for i in group if x] for x in (leaves, anchors, losses)]
            sent = _sent(wire, axis_name, share, *args)
            for all_of, found in zip((new, lost), sent, strict=True):
                for i, x in zip(group, found, strict=False):
                    all_of[i] = x
        return new, lost

    of_all = of, of, of[: len(losses)], P()
    send = mesh.over_shards(mesh.check_specs(specs, axis_name), send, of_all, of_all[1:3])
    new, losses = send(leaves, anchors, losses, share)
    return jax.tree.unflatten(treedef, new), jax.tree.unflatten(jax.tree.structure(lost), losses)


def _sent(wire, axis_name, share, leaves, anchors, losses):
    """Lists of the leaves after the sync, and of what is lost."""
    exchange, done = _gathered if wire.gathers else _in_halves, []
    changes, means, lost = {}, [[] for _ in leaves], [[] for _ in leaves]
    new, new_lost = list(leaves), list(losses)
    for group in groups_of([x.size for x in leaves], wire, axis_name):
        after = after_all(done, axis_name)
        for i, start, _ in group:
            if start == 0:
                anchors[i] = after(anchors[i])
                change = _change(wire, share, leaves[i], anchors[i], losses[i : i + 1])
                changes[i] = change.reshape(-1)
            else:
                changes[i] = after(changes[i])
        pieces = [changes[i][start:end] for i, start, end in group]
        # Without the barriers a compiler may compute all of it again for every leaf.
        rows = lax.optimization_barrier(_rows(pieces, wire, axis_name))
        mean, lost_rows = lax.optimization_barrier(exchange(wire, rows, axis_name))
        done = [mean, lost_rows]
        parts = zip(group, _leaves(mean, pieces), _leaves(lost_rows, pieces), strict=True)
        for (i, _, end), mean_piece, lost_piece in parts:
            means[i].append(mean_piece)
            lost[i].append(lost_piece)
            if end == leaves[i].size:
                x, moved = leaves[i], jnp.concatenate(means[i]).reshape(leaves[i].shape)
                new[i] = (_float32(anchors[i]) + moved).astype(x.dtype)
                if wire.feedback:
                    new_lost[i] = jnp.concatenate(lost[i]).reshape(x.shape)
                done += [new[i], *new_lost[i : i + 1]]
    return new, new_lost


def _change(wire, share, x, anchor, lost):
    """What a worker sends of a leaf, before it is rounded; `lost` holds one array or none."""
    change = _float32(x) - _float32(anchor)
    if share is not None:
        change = weighed(change, share)
    return change + wire.feedback * lost[0] if wire.feedback else change


def nothing_lost(tree: PyTree, wire: Wire | None) -> PyTree:
    """The `lost` of `synchronize_changes` before the first sync: zeros, or () without feedback."""
    if wire is None or not wire.feedback:
        return ()
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)


def _in_halves(wire, rows, axis_name):
    """The mean of the rows, and what is lost: each worker averages a slice and sends it to all."""
    num_workers, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    each = len(rows) // num_workers
    decode = functools.partial(wire.decode, r=each)
    slices = rows.reshape(num_workers, each, -1)
    messages = jax.vmap(wire.encode)(slices)
    swapped = lax.all_to_all(messages, axis_name, 0, 0) if axis_name != () else messages
    received = jax.vmap(decode)(swapped)
    own, rounded = (lax.dynamic_index_in_dim(x, mine, keepdims=False) for x in (slices, messages))
    mean = (jnp.sum(received, axis=0) + own - decode(rounded)) / num_workers  # its own unrounded
    message = wire.encode(mean)
    lost = lax.dynamic_update_index_in_dim(
        slices - jax.vmap(decode)(messages), num_workers * (mean - decode(message)), mine, 0
    )
    found = lax.all_gather(message, axis_name, tiled=True).reshape(num_workers, *message.shape)
    return jax.vmap(decode)(found).reshape(rows.shape), lost.reshape(rows.shape)


def _gathered(wire, rows, axis_name):
    """The mean of the rows, and what is lost: each worker receives the rows of all workers."""
    num_workers = lax.axis_size(axis_name)
    message = wire.encode(rows)
    found = lax.all_gather(message, axis_name, tiled=True).reshape(num_workers, *message.shape)

    def add(w, total):
        return total + wire.decode(found[w], len(rows))

    lost = rows - wire.decode(message, len(rows))
    # One worker after another: all at once would take W copies of the parameters.
    return lax.fori_loop(1, num_workers, add, wire.decode(found[0], len(rows))) / num_workers, lost


def _rows(arrays, wire, axis_name):
    """[r, 128], the arrays concatenated and padded with zeros to equal slices."""
    flat, size = [x.reshape(-1) for x in arrays], sum(x.size for x in arrays)
    parts = 1 if wire.gathers else lax.axis_size(axis_name)
    total = rows_of(wire, size, parts) * LANES
    return jnp.concatenate([*flat, jnp.zeros(total - size, jnp.float32)]).reshape(-1, LANES)


def _leaves(rows, like):
    vector, found, start = rows.reshape(-1), [], 0
    for x in like:
        found.append(vector[start : start + x.size].reshape(x.shape))
        start += x.size
    return found


def _float32(x):
    return jnp.asarray(x).astype(jnp.float32)


def check_alone(axis_name: AxisName, wire: Wire) -> None:
    """Raises ValueError if the mesh in scope has axes beside the workers' and no specs came."""
    if others := mesh.beside(axis_name):
        raise ValueError(
            f"the wire ({wire.rule}) sends leaves as one vector, for which a compiler would gather "
            f"shards over the mesh axes {others} beside the workers' {axis_name!r}. Pass specs=, "
            "how parameters are split over these axes, or specs=jax.P() if they are not."
        )


def _by_axes(specs) -> list[list[int]]:
    """The numbers of the specs, grouped by the axes that they name."""
    groups = {}
    for i, spec in enumerate(specs):
        groups.setdefault(frozenset(mesh.axes_in(spec)), []).append(i)
    return list(groups.values())
