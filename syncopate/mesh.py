"""Helpers for workers that span several devices: specs, mesh axes and their types."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree


def axes_of(specs: PyTree[P]) -> tuple[str, ...]:
    """The names of the mesh axes in a tree of specs, in order and without repetition."""
    leaves = jax.tree.leaves(specs)
    if wrong := [s for s in leaves or [specs] if specs is not None and not isinstance(s, P)]:
        raise ValueError(
            f"specs holds {wrong[0]!r}: pass a tree of jax.P like the parameters, or one jax.P for "
            "all leaves; jax.P() for leaves that are whole on every device of a worker."
        )
    return tuple(dict.fromkeys(axis for spec in leaves for axis in axes_in(spec)))


def check_specs(specs: PyTree[P], axis_name: Any) -> tuple[str, ...]:
    """The axes inside a worker; raises ValueError if the workers' axis is among them."""
    axes = axes_of(specs)
    if both := sorted(axis for axis in axes if axis in names_of(axis_name)):
        raise ValueError(
            f"specs names {both}, the workers' axis: specs describe one worker's arrays. Leave out "
            "the leading worker axis."
        )
    return axes


def axis_size(axis_name) -> int:
    """The number of workers on this axis; raises ValueError outside of it."""
    names = names_of(axis_name)
    if names and all(isinstance(name, str) for name in names):
        with contextlib.suppress(NameError):
            return jax.lax.axis_size(axis_name)
    raise ValueError(
        f"axis {axis_name!r} is not in scope: this function runs on each worker. Call it under "
        f"jax.vmap(..., axis_name={axis_name!r}), jax.shard_map over a mesh with this axis, or "
        "local_opt.map_workers; if your workers' axis has another name, pass it as axis_name=."
    )


def beside(axis_name: Any, *, manual_only: bool = False) -> list[str]:
    """The axes of several devices beside the workers' in the mesh in scope; all or only manual."""
    mesh = jax.sharding.get_abstract_mesh()
    names = mesh.manual_axes if manual_only else mesh.axis_names
    return [a for a in names if mesh.shape[a] > 1 and a not in names_of(axis_name)]


def automatic() -> list[str]:
    """The axes of the mesh in scope, of several devices each, that are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return [a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in mesh.manual_axes]


def over_shards(
    axes: Iterable[str], function: Callable, in_specs: PyTree[P], out_specs: PyTree[P]
) -> Callable:
    """`function` under a shard_map over these axes; as it is if they are manual already."""
    axes = tuple(axes)

    def run(*args):
        manual = jax.sharding.get_abstract_mesh().manual_axes
        left = {axis for axis in axes if axis not in manual}
        if not left:
            return function(*args)
        names = jax.sharding.get_abstract_mesh().axis_names
        if unknown := [axis for axis in axes if axis not in names]:
            raise ValueError(
                f"specs names the axes {unknown} and the mesh in scope has {list(names)}: name its "
                "axes, or enter another mesh by jax.set_mesh."
            )
        if len(left) < len(axes):
            raise ValueError(
                f"specs names the axes {list(axes)}, of which only {sorted(left)} are automatic: "
                "make all of a worker's axes manual, or none."
            )
        if left.issubset(jax.sharding.get_abstract_mesh().explicit_axes):
            args = jax.tree.map(jax.reshard, args, like(in_specs, args))
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False
        )(*args)

    return run


def like(specs: PyTree[P], tree: PyTree) -> PyTree[P]:
    """Broadcasts specs, for example one for all leaves, to one for each leaf of a tree."""
    try:
        return jax.tree.broadcast(specs, tree)
    except ValueError as error:
        raise ValueError(
            f"specs {specs} do not have the structure of the arrays ({error}): pass a tree of "
            "jax.P like the parameters, or one jax.P for all leaves."
        ) from error


@contextlib.contextmanager
def at_once():
    """Operations in the `with` block run at once, even while a function is traced for a mesh."""
    scope = jax.sharding.get_abstract_mesh()
    if scope.explicit_axes:  # under which nothing would run at once
        scope = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(scope), jax.ensure_compile_time_eval():
        yield


def varying(tree: PyTree, *others: PyTree) -> PyTree:
    """The tree, typed as varying over all manual axes over which it or the others vary."""
    over = [varying_axes(x) for x in jax.tree.leaves((tree, others))]
    every = frozenset().union(*over)
    return jax.tree.map(lambda x: varying_over(x, every), tree)


def varying_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The array, typed as varying over these axes as well."""
    lacking = tuple(sorted(frozenset(axes) - varying_axes(x)))
    if not lacking:
        return x
    if is_key(x):  # a cast would consume the key
        data = jax.lax.pcast(jax.random.key_data(x), lacking, to="varying")
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.lax.pcast(x, lacking, to="varying")


def varying_as(tree: PyTree, *others: PyTree) -> PyTree:
    """The tree, each leaf typed as varying over its own manual axes and all of the others'."""
    return jax.tree.map(lambda x: varying(x, others), tree)


def varying_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree, each leaf typed as varying over the axes of its counterpart, as a carry must be."""
    return jax.tree.map(varying, tree, like)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes over which an array or ShapeDtypeStruct is typed as varying."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return kind.manual_axis_type.varying if kind.manual_axis_type else frozenset()


def typed_axes(axis_name: Any) -> frozenset[str]:
    """The axes whose types say what varies over them, those of shard_map with check_vma=True."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    indices = [
        jax.eval_shape(functools.partial(jax.lax.axis_index, name))
        for name in names_of(axis_name)
        if name in manual
    ]
    return frozenset().union(*map(varying_axes, indices))


def is_key(x: Any) -> bool:
    """Whether a leaf holds typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_legacy(x: Any) -> bool:
    """Whether a value may be a legacy key of `jax.random.PRNGKey`, as any uint32[2] may."""
    if getattr(x, "dtype", None) != jnp.uint32:  # before the shape, which is traced
        return False
    return x.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape


def typed_key(key: Any) -> Any:
    """A legacy key as a typed one; anything else as it is."""
    return jax.random.wrap_key_data(jax.device_put(key)) if is_legacy(key) else key


def name_of(path: tuple, alone: str = "(the array)") -> str:
    """A leaf of a tree in messages, as "['w']"; a leaf that is the whole tree has no path."""
    return jax.tree_util.keystr(path) or alone


def axes_in(spec: P) -> tuple[str, ...]:
    """The names of the axes in one spec."""
    return tuple(axis for names in spec for axis in names_of(names))


def names_of(names: Any) -> tuple[Any, ...]:
    """A tuple of axis names from None, one name or a tuple."""
    return () if names is None else names if isinstance(names, tuple) else (names,)


def platform() -> str:
    """The platform of the mesh in scope, whose devices need not exist, or else JAX's default."""
    devices = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.config.jax_default_device  # pyright: ignore - made at run time
    chosen = getattr(default, "platform", default)  # a device or a platform's name
    return getattr(devices, "platform", None) or chosen or jax.default_backend()
