"""Times epochs of input in sequence, shuffled by the loader, and in an order of CD-GraB.

    pip install -e ".[experiments,data]" torch torchdata mosaicml-streaming array_record
    python -m benchmarks.input_peers --examples=16384 --processes=0

Examples are 3,072 bytes and a label, in memory (mapped files), as an ArrayRecord file or as MDS. A
call opens a loader and reads an epoch in batches of 256: on the host, but for `read_epochs`, whose
batches are on the device. The order is that of CD-GraB with four workers after an epoch; in another
package's loader it is read by the adapter that the row names. Before the timing, all must deliver
every example once and unchanged, and in the right place unless they shuffle. All take turns. `times
shuffled` is relative to the shuffle of the same loader and storage, `times ours` to `read_epochs`
in the order. With --processes=N the loaders of Grain, torchdata and mosaicml start N processes in
every epoch.
"""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import ordering
from benchmarks import peer_readers, timing
from benchmarks.peer_readers import BATCH, PIXELS, Examples

WORKERS = 4
SEQUENCE, SHUFFLED, ORDERED = HOW = ("in sequence", "shuffled", "in CD-GraB's order")
OURS = ("arrays", "ordering.data.read_epochs", ORDERED)


class Data(NamedTuple):
    """The examples, the orders of the workers, and how many processes a loader starts."""

    folder: pathlib.Path
    orders: np.ndarray
    processes: int

    @property
    def indices(self) -> np.ndarray:
        """The examples by batch and place, as the orders name them."""
        return ordering.data.step_indices(self.orders, units_per_step=BATCH // WORKERS)[0]


def cd_grab_orders(units: int) -> np.ndarray:
    """int32[W, M], the orders of CD-GraB after an epoch of random gradients."""
    size = BATCH // WORKERS
    order = ordering.cd_grab(units, units_per_step=size)

    def epoch(key):
        def step(state, key):
            rows = jax.random.normal(key, (size, 8))
            return order.observe(state, rows), None

        state, keys = order.init(key, jnp.zeros(8)), jax.random.split(key, units // size)
        return order.next_epoch(jax.lax.scan(step, state, keys)[0]).current

    keys = jax.random.split(jax.random.key(0), WORKERS)
    return np.asarray(jax.jit(jax.vmap(epoch, axis_name="worker"))(keys))


def _orders(data: Data, how: str) -> np.ndarray:
    """Orders for our readers."""
    if how == SEQUENCE:
        return np.arange(data.orders.size)[None]
    if how == SHUFFLED:
        return np.random.default_rng(0).permutation(data.orders.size)[None]
    return data.orders


def read_epochs(data, how, source=None):
    arrays, orders = Examples(data.folder).arrays, _orders(data, how)
    workers, num_units = orders.shape
    order = ordering.baselines.shuffle_once(num_units, units_per_step=BATCH // workers)
    state = ordering.init_workers(order, jax.random.key(0), None, workers)
    return ordering.data.read_epochs(
        source or arrays,
        order,
        jax.random.key(0),
        workers=workers,
        num_epochs=1,
        state=ordering.data.ReadState(state._replace(current=orders, next=orders)),
    )


def of_tf_data(data, how):
    import tensorflow as tf

    arrays = Examples(data.folder).arrays
    if how == ORDERED:
        examples = ordering.data.tf_dataset(arrays, data.indices)
    else:
        arrays = {k: np.asarray(x) for k, x in arrays.items()}
        examples = tf.data.Dataset.from_tensor_slices(arrays)
    if how == SHUFFLED:
        examples = examples.shuffle(len(arrays["y"]), seed=0)
    return examples.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def of_grain(data, how, array_record=False):
    import grain

    source, options = grain.MapDataset.source(Examples(data.folder)), grain.ReadOptions(0)
    if array_record:
        file = grain.sources.ArrayRecordDataSource(str(data.folder / "array_record"))
        source = grain.MapDataset.source(file).map(peer_readers.decoded)
        options = grain.ReadOptions()
    if how == ORDERED:
        source = ordering.data.grain_dataset(source, data.indices)
    elif how == SHUFFLED:
        source = source.shuffle(seed=0)
    steps = source.batch(BATCH).to_iter_dataset(options)
    if data.processes:
        steps = steps.mp_prefetch(grain.MultiprocessingOptions(data.processes))
    return steps


def of_torchdata(data, how):
    from torchdata.stateful_dataloader import StatefulDataLoader

    words = {"batch_size": BATCH, "shuffle": how == SHUFFLED}
    if how == ORDERED:
        words = {"batch_sampler": peer_readers.lists_of(data.orders, BATCH // WORKERS)}
    if data.processes:
        words["multiprocessing_context"] = "forkserver"
    return StatefulDataLoader(
        Examples(data.folder), collate_fn=peer_readers.stacked, num_workers=data.processes, **words
    )


def of_mosaicml(data, how):
    import streaming

    dataset = streaming.StreamingDataset(
        local=str(data.folder / "mds"),
        batch_size=BATCH,
        shuffle=how == SHUFFLED,
        num_canonical_nodes=1,
    )
    if how == ORDERED:
        return read_epochs(data, how, dataset)
    return streaming.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=data.processes, collate_fn=peer_readers.stacked
    )


LOADERS = {  # {(storage, loader, what reads an order in it): (Data, how) -> batches}
    ("arrays", "ordering.data.read_epochs", ""): read_epochs,
    ("arrays", "tf.data", "tf_dataset"): of_tf_data,
    ("arrays", "Grain", "grain_dataset"): of_grain,
    ("arrays", "torchdata StatefulDataLoader", "step_indices"): of_torchdata,
    ("ArrayRecord", "Grain", "grain_dataset"): functools.partial(of_grain, array_record=True),
    ("MDS", "mosaicml-streaming", "read_epochs"): of_mosaicml,
}


def ways_of(data: Data) -> dict[tuple, Callable]:
    """{(storage, loader, how): () -> batches} of the loaders that are installed."""
    ways = {}
    for (storage, loader, _), read in LOADERS.items():
        for how in HOW:
            way = functools.partial(read, data, how)
            try:
                next(iter(way()))
            except ImportError as error:
                print(f"{loader} is left out: {error}")
                break
            ways[storage, loader, how] = way
    return ways


def check(data: Data, ways: dict[tuple, Callable]) -> None:
    """Raises AssertionError for a way that delivers other examples, or in another order."""
    pixels = np.load(data.folder / "pixels.npy", mmap_mode="r")
    for (*_, how), read in ways.items():
        labels = []
        for batch in read():
            places = np.asarray(batch["y"]).reshape(-1)
            labels.append(places)
            np.testing.assert_array_equal(
                np.asarray(batch["x"]).reshape(-1, PIXELS), pixels[places]
            )
        labels, whole = np.concatenate(labels), np.arange(len(pixels))
        if how == SHUFFLED:
            labels = np.sort(labels)
        np.testing.assert_array_equal(labels, data.indices if how == ORDERED else whole)


def rows(folder: pathlib.Path, count: int, processes: int, repeats: int) -> Iterator[dict]:
    """Rows of every loader, in turns; the first ones are ours."""
    data = Data(folder, cd_grab_orders(count // WORKERS), processes)
    ways = ways_of(data)
    check(data, ways)
    adapters = {key[:2]: key[2] for key in LOADERS}
    calls = {way: functools.partial(_read, read) for way, read in ways.items()}
    for way, seconds, times in timing.compared(calls, repeats):
        storage, loader, how = way
        by = f" by {adapters[way[:2]]}" if how == ORDERED and adapters[way[:2]] else ""
        middle, low, high = times[storage, loader, SHUFFLED]
        yield {
            "examples in": storage,
            "loader": loader,
            "epoch": how + by,
            "thousand examples/s": f"{count / seconds / 1e3:.1f}",
            "times shuffled": f"{middle:.2f}",
            "interval": f"{low:.2f} to {high:.2f}",
            "times ours": f"{times[OURS][0]:.2f}",
        }


def _read(read: Callable) -> None:
    for _ in read():
        pass


def main(argv):
    del argv
    values = flags.FLAGS
    if values.examples % BATCH:
        raise app.UsageError(f"--examples is {values.examples}: pass a multiple of {BATCH}.")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        peer_readers.write_examples(folder, values.examples)
        timing.print_rows(rows(folder, values.examples, values.processes, values.repeats))


if __name__ == "__main__":
    flags.DEFINE_integer("examples", 16_384, "number of examples, a multiple of 256")
    flags.DEFINE_integer("processes", 0, "of the loaders that start processes")
    flags.DEFINE_integer("repeats", 7, "timed epochs of every loader")
    app.run(main)
