"""Examples on a disk, and how packages read them, save a position and go on from it.

    python -m benchmarks.peer_readers TASK

is one of the processes that `benchmarks.input_kills` starts and kills; the task is JSON. Every
reader of an epoch is a function `(Place, saved) -> Reader`: its batches in a shuffled order, and
its position as the package documents it.
"""

import json
import os
import pathlib
import pickle
import signal
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from absl import app

BATCH, PIXELS = 256, 3072
SAVE_EVERY = 10  # batches between two positions


class Place(NamedTuple):
    """Where a process reads: the examples, and which of the readers it is."""

    folder: pathlib.Path
    reader: int = 0
    readers: int = 1


class Reader(NamedTuple):
    """Batches of an epoch, and a function that gives the position after the last one."""

    batches: Iterable
    position: Callable[[], Any]


class Examples:
    """The examples as a random-access source, pickled as its path."""

    def __init__(self, folder: pathlib.Path):
        pixels = np.load(folder / "pixels.npy", mmap_mode="r")
        self._folder, self.arrays = folder, {"x": pixels, "y": np.arange(len(pixels))}

    def __reduce__(self):
        return Examples, (self._folder,)

    def __len__(self) -> int:
        return len(self.arrays["y"])

    def __getitem__(self, index: int) -> dict:
        return {name: array[index] for name, array in self.arrays.items()}

    def __repr__(self) -> str:  # Grain's DataLoader compares it
        return f"Examples({len(self)})"


def write_examples(folder: pathlib.Path, count: int) -> None:
    """Writes random images, with their numbers as labels; also as ArrayRecord and as MDS."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, PIXELS), np.uint8)
    np.save(folder / "pixels.npy", pixels)
    try:
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(str(folder / "array_record"), "group_size:1")
        for number, row in enumerate(pixels):
            writer.write(np.int64(number).tobytes() + row.tobytes())
        writer.close()
    except ImportError as error:
        print(f"ArrayRecord is left out: {error}")
    try:
        from streaming import MDSWriter

        columns = {"x": f"ndarray:uint8:{PIXELS}", "y": "int"}
        with MDSWriter(out=str(folder / "mds"), columns=columns) as out:
            for number, row in enumerate(pixels):
                out.write({"x": row, "y": number})
    except ImportError as error:
        print(f"mosaicml-streaming is left out: {error}")


def decoded(record: bytes) -> dict:
    """An example of the ArrayRecord file."""
    return {"x": np.frombuffer(record, np.uint8, offset=8), "y": np.frombuffer(record, "i8", 1)[0]}


def stacked(examples: list[dict]) -> dict[str, np.ndarray]:
    """A batch of NumPy arrays, for PyTorch's loaders."""
    return {name: np.stack([each[name] for each in examples]) for name in examples[0]}


def grain_hosts(place, saved):
    import grain

    shuffled = grain.MapDataset.source(Examples(place.folder)).shuffle(seed=0)
    part = shuffled[place.reader :: place.readers].batch(BATCH // place.readers)
    return _of_grain(part.to_iter_dataset(), saved)


def grain_processes(place, saved):
    import grain

    read = grain.MapDataset.source(Examples(place.folder)).shuffle(seed=0).batch(BATCH)
    processes = grain.MultiprocessingOptions(place.readers)
    return _of_grain(read.to_iter_dataset().mp_prefetch(processes), saved)


def grain_data_loader(place, saved):
    from grain import python as grain

    source = Examples(place.folder)
    sampler = grain.IndexSampler(len(source), shuffle=True, num_epochs=1, seed=0)
    words = {"operations": [grain.Batch(BATCH)], "worker_count": place.readers}
    return _of_grain(grain.DataLoader(data_source=source, sampler=sampler, **words), saved)


def grain_elastic(place, saved):
    import grain

    iterator = grain.experimental.ElasticIterator(
        grain.MapDataset.source(Examples(place.folder)).shuffle(seed=0),
        BATCH,
        grain.sharding.ShardOptions(place.reader, place.readers),
    )
    return _of_grain(iterator, saved)


def _of_grain(dataset, saved):
    batches = iter(dataset)
    if saved is not None:
        batches.set_state(saved)
    return Reader(batches, batches.get_state)


def torchdata_hosts(place, saved):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    source = Examples(place.folder)
    sampler = StatefulDistributedSampler(source, place.readers, place.reader, shuffle=True)
    size = BATCH // place.readers
    return _of_torch(StatefulDataLoader(source, size, sampler=sampler, collate_fn=stacked), saved)


def torchdata_processes(place, saved):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(0)
    words = {"num_workers": place.readers, "collate_fn": stacked}
    loader = StatefulDataLoader(Examples(place.folder), BATCH, shuffle=True, **words)
    return _of_torch(loader, saved)


def mosaicml_hosts(place, saved):
    host, count = str(place.reader), str(place.readers)
    os.environ |= {"RANK": host, "LOCAL_RANK": host, "WORLD_SIZE": count}
    os.environ |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "localhost"}
    return _of_mosaicml(place, saved, BATCH // place.readers, 0)


def mosaicml_processes(place, saved):
    return _of_mosaicml(place, saved, BATCH, place.readers)


def _of_mosaicml(place, saved, size, processes):
    import streaming
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # of a process that was killed
    local = str(place.folder / "mds")
    dataset = streaming.StreamingDataset(local=local, shuffle=True, batch_size=size)
    words = {"num_workers": processes, "collate_fn": stacked}
    return _of_torch(streaming.StreamingDataLoader(dataset, batch_size=size, **words), saved)


def _of_torch(loader, saved):
    if saved is not None:
        loader.load_state_dict(saved)
    return Reader(loader, loader.state_dict)


def _order_of(count, workers):
    """An order of all examples over the workers, and its first state."""
    import jax

    import ordering

    units = count // workers
    order = ordering.global_order(ordering.cd_grab(units, units_per_step=BATCH // workers), units)
    keys = jax.random.split(jax.random.key(0), workers)
    return order, jax.vmap(order.init, (0, None), axis_name="worker")(keys, np.zeros(4, "f"))


def ours_hosts(place, saved):
    """`read_epochs` of one worker in each process; `resize` where their number has changed."""
    import jax

    import ordering
    from ordering.resizing import resize

    source, done = Examples(place.folder).arrays, 0
    count, size = len(source["y"]), BATCH // place.readers
    order, state = _order_of(count, place.readers)
    if saved is not None:
        before, done = saved["orders"], saved["load"] * size
        sizes = {"units_per_step": BATCH // len(before.current), "visited": done}
        state, _ = resize(before, state, order, **sizes)
    one = ordering.baselines.shuffle_once(state.current.shape[1], units_per_step=size)
    one, key = one._replace(is_global=True, total=count), jax.random.key(0)
    part = {"current": state.current[place.reader], "next": state.next[place.reader]}
    part = ordering.data.ReadState(one.init(key, None)._replace(**part), units=done)
    reads = ordering.data.read_epochs(source, one, key, num_epochs=1, state=part)
    orders = jax.tree.map(np.asarray, state)
    return Reader(reads, lambda: {"orders": orders, "load": reads.state().units // size})


def ours_in_grain(place, saved):
    """`grain_dataset`, read by Grain's processes; the position is the number of steps."""
    import grain

    import ordering

    source, done = Examples(place.folder), saved or 0
    steps = ordering.data.grain_dataset(source, _one_order(source)).batch(BATCH)[done:]
    processes = grain.MultiprocessingOptions(place.readers)
    return _counted(steps.to_iter_dataset().mp_prefetch(processes), done)


def ours_in_torch(place, saved):
    """Lists of `step_indices`, read by a DataLoader's processes; the position counts the steps."""
    from torch.utils.data import DataLoader

    source, done = Examples(place.folder), saved or 0
    steps = lists_of(_one_order(source), BATCH)
    loader = DataLoader(
        source,
        batch_sampler=steps[done:],
        num_workers=place.readers,
        collate_fn=stacked,
        multiprocessing_context="forkserver",
    )
    return _counted(loader, done)


def lists_of(orders, units_per_step):
    """The indices of every step, as a batch sampler of PyTorch gives them."""
    from ordering.data import step_indices

    indices, size = step_indices(orders, units_per_step=units_per_step)
    return [indices[i : i + size].tolist() for i in range(0, len(indices), size)]


def _one_order(source):
    return np.asarray(_order_of(len(source), 1)[1].current[0])


def _counted(batches, done):
    at = [done]

    def counted():
        for at[0], batch in enumerate(batches, done + 1):
            yield batch

    return Reader(counted(), lambda: at[0])


WAYS = {  # {name: (what readers are, function)}
    "Grain, get_state": ("hosts", grain_hosts),
    "Grain, get_state, mp_prefetch": ("processes", grain_processes),
    "Grain's DataLoader": ("processes", grain_data_loader),
    "Grain's ElasticIterator": ("hosts", grain_elastic),
    "StatefulDataLoader, StatefulDistributedSampler": ("hosts", torchdata_hosts),
    "StatefulDataLoader": ("processes", torchdata_processes),
    "mosaicml StreamingDataLoader, ranks": ("hosts", mosaicml_hosts),
    "mosaicml StreamingDataLoader": ("processes", mosaicml_processes),
    "read_epochs, resize": ("hosts", ours_hosts),
    "grain_dataset, mp_prefetch": ("processes", ours_in_grain),
    "step_indices, DataLoader": ("processes", ours_in_torch),
}


def read(way: str, place: Place, log: pathlib.Path, saved: str, kill_at: int) -> None:
    """Reads an epoch; writes the labels of every batch into the log, and positions beside it.

    The process kills itself by SIGKILL after `kill_at` batches, unless that is 0.
    """
    state = pickle.loads(pathlib.Path(saved).read_bytes())[1] if saved else None
    reader = WAYS[way][1](place, state)
    with open(log, "ab") as labels:
        for step, batch in enumerate(reader.batches, 1):
            pickle.dump(np.array(batch["y"]), labels)
            labels.flush()
            if step % SAVE_EVERY == 0:
                log.with_suffix(".saved").write_bytes(pickle.dumps((step, reader.position())))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def main(argv):
    task = json.loads(argv[1])
    place = Place(pathlib.Path(task["folder"]), task["reader"], task["readers"])
    read(task["way"], place, pathlib.Path(task["log"]), task["saved"], task["kill_at"])


if __name__ == "__main__":
    app.run(main)
