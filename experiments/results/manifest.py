"""What a checkpoint must hold, written inside it: hashes of all leaves, settings, plans, data.

Every process hashes the shards that it holds, from a copy, while orbax writes them. Its manifest is
part of the checkpoint, so that there is none without, and carries a hash of itself.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

ITEM = "manifest"  # the folder inside a checkpoint
CHANGED = "not what was saved"


@functools.cache
def save_args() -> type:
    """The class of orbax's arguments: `save_args()(text_of)`, text_of: () -> str, called beside."""
    import orbax.checkpoint as ocp  # takes long to import

    class Handler(ocp.AsyncCheckpointHandler):
        """Writes the text of every process into a file of its own."""

        async def async_save(self, directory, args):
            async def write():
                path = directory / f"{jax.process_index()}.json"
                path.write_text(args.text_of())

            return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name=ITEM)]

        def save(self, directory, args):
            (directory / f"{jax.process_index()}.json").write_text(args.text_of())

        def restore(self, directory, args=None):
            return read(os.path.dirname(directory))

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):
        text_of: Callable[[], str]

    return Args


def text_of(state, about: Mapping) -> Callable[[], str]:
    """`() -> the manifest of this process`; the state is copied before this returns.

    Args:
      state: of arrays; about: what else is known of the run, JSON values.
    """
    copies = {
        name: (leaf.shape, dtype, {k: np.array(v) for k, v in shards_of(leaf).items()})
        for name, (leaf, dtype) in leaves_of(state).items()
    }

    empty = empty_nodes(state)

    def text():
        leaves = {
            name: {
                "shape": shape,
                "dtype": dtype,
                "shards": {k: hash_of(v) for k, v in own.items()},
            }
            for name, (shape, dtype, own) in copies.items()
        }
        content = {**about, "processes": jax.process_count(), "leaves": leaves, "empty": empty}
        return json.dumps({"content": content, "sha256": _text_hash(content)})

    return text


def read(checkpoint: str) -> dict:
    """The manifest of a checkpoint, with the shards of all processes.

    Raises:
      ValueError: where a file is missing or has changed.
    """
    folder = pathlib.Path(checkpoint, ITEM)
    first = _read_one(folder / "0.json")
    for number in range(1, first["processes"]):
        for name, leaf in _read_one(folder / f"{number}.json")["leaves"].items():
            first["leaves"][name]["shards"] |= leaf["shards"]
    return first


def _read_one(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
        content, known = found["content"], found["sha256"]
    except FileNotFoundError:
        raise ValueError(f"{ITEM}/{path.name} is missing") from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{ITEM}/{path.name} is broken ({error})") from error
    if _text_hash(content) != known:
        raise ValueError(f"{ITEM}/{path.name} is {CHANGED}")
    return content


def check_leaves(manifest: Mapping, state) -> None:
    """Raises ValueError, naming the leaf, unless every shard here is what was saved.

    Shards that were saved in other pieces are not compared; on the host there is but one piece.
    """
    known, found = manifest["leaves"], leaves_of(state)
    if manifest["empty"] != (empty := empty_nodes(state)):
        raise ValueError(f"empty nodes are {empty}, saved were {manifest['empty']}")
    if known.keys() != found.keys():
        raise ValueError(f"leaves are missing or new: {sorted(known.keys() ^ found.keys())}")
    for name, (leaf, dtype) in found.items():
        saved = known[name]
        if [*leaf.shape] != saved["shape"] or dtype != saved["dtype"]:
            raise ValueError(
                f"{name} is {dtype}{[*leaf.shape]}, saved as {saved['dtype']}{saved['shape']}"
            )
        own = shards_of(leaf, saved["shards"])
        if any(hash_of(own[k]) != h for k, h in saved["shards"].items() if k in own):
            raise ValueError(f"{name} is {CHANGED}")


def check_orders(state, dealt: int | None) -> None:
    """Raises ValueError unless the current orders visit what they should, each unit once.

    Args:
      state: on the host, of all workers; dealt: None: every row of int[W, M] is a permutation of
        0 .. M - 1; else all rows together are distinct numbers below it.
    """
    orders = {k: np.asarray(v) for k, (v, _) in leaves_of(state).items() if k.startswith("orders/")}
    checked = [(name, rows) for name, rows in orders.items() if name.endswith("/current")]
    # Of dealt units every worker knows the orders of all.
    checked += [(k, rows) for k, v in orders.items() if k.endswith("/everyone") for rows in v]
    for name, rows in checked:
        limit = rows.shape[1] if dealt is None else dealt
        for row in rows if dealt is None else [rows.reshape(-1)]:
            if len(np.unique(row)) < row.size or row.min() < 0 or row.max() >= limit:
                raise ValueError(f"{name} does not visit every unit once: numbers below {limit}")


def leaves_of(state) -> dict:
    """{name: (array, its type)}; of typed keys their numbers."""

    def data(x):
        typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return (jax.random.key_data(x) if typed else x), str(x.dtype)

    named = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): data(x) for k, x in named}


def empty_nodes(state) -> list[str]:
    """The names of nodes without leaves, by which a tree is told too."""

    def empty(node):
        return node is None or (isinstance(node, tuple | list | dict) and not node)

    named = jax.tree_util.tree_leaves_with_path(state, is_leaf=empty)
    names = (jax.tree_util.keystr(k, simple=True, separator="/") for k, x in named if empty(x))
    return sorted(names)


def shards_of(leaf, wanted=()) -> dict:
    """{its place, as "0:2,0:11": array}, of what this process holds of an array.

    Args:
      wanted: places of an array on the host.
    """
    if not isinstance(leaf, jax.Array):
        return {place: leaf[_slices(place)] for place in wanted}
    return {_place(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def _place(index, shape) -> str:
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def _slices(place: str) -> tuple:
    return tuple(slice(*map(int, part.split(":"))) for part in place.split(",") if part)


def hash_of(array) -> str:
    """Of the bytes alone; shape and type stand beside it."""
    flat = np.ascontiguousarray(array).reshape(-1)  # a view as bytes needs an axis
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def _text_hash(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
