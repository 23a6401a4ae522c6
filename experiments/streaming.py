"""An epoch whose batches come through tf.data, in the order's sequence, ahead of the steps."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from experiments import finite, processes, steps

# Chunks before an epoch's end at which the next epoch's front is opened.
LOOK_AHEAD = 4


class Known(NamedTuple):
    """What `prefetch_next_epoch` looks at, copied, for the step donates its state."""

    current: jax.Array
    next: jax.Array
    left: jax.Array


def epoch(
    run: Callable,
    chunk: Callable,
    order: ordering.Ordering,
    source,
    *,
    sizes: tuple[int, int, int],
    shown: int,
    example: tuple,
    sharding=None,
    total: int | None = None,
    transform: Callable | None = None,
) -> Callable:
    """`(train, orders, key, front) -> (train, orders, metrics, front of the next epoch)`.

    The host dispatches chunk after chunk without waiting for one: it fetches the metrics of a
    chunk when the next has been dispatched, and the front of the next order from a state that is
    a chunk old.

    Args:
      run, chunk, order: as for a resident epoch.
      source: arrays with W M unit_size examples, worker by worker: those of own workers.
      sizes: (W, M, unit_size) of this process's own W; shown: units per worker and chunk.
      example: (train, orders) at a start, to compile the chunks with before the clock runs.
      sharding: of arrays with a leading worker axis; total: workers of all processes, if not W.
      transform: see `ordering.input.batches`.
    """
    num_workers, num_units, unit_size = sizes
    total = num_workers if total is None else total
    num_chunks = -(-num_units // shown)
    owned = (False, True, True, True, False)
    take = jax.jit(run(chunk, owned_in=owned, owned_out=(False, True, True)), donate_argnums=(0, 1))
    next_epoch = jax.jit(
        run(lambda o: (order.next_epoch(o),), owned_in=(True,), owned_out=(True,)),
        donate_argnums=0,
    )
    know = jax.jit(lambda orders: Known(*(jnp.copy(getattr(orders, f)) for f in Known._fields)))

    def read(orders, first_chunk):
        indices, size = ordering.input.step_indices(
            orders, units_per_step=shown, unit_size=unit_size, num_units=num_units
        )
        stream = ordering.input.batches(
            source, indices, batch_size=size, first_batch=first_chunk, transform=transform
        )
        return ordering.input.prefetch_to_device(
            (by_worker(batch) for batch in stream), sharding=sharding
        )

    def by_worker(batch):
        split = (num_workers, -1, unit_size)
        batch = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:]), batch)
        # Several processes cannot hand over an array that none of them has as a whole.
        return processes.place_rows(batch, sharding, total) if processes.several() else batch

    def compile_chunks(train, orders):
        orders = next_epoch(orders)[0]
        know(orders)
        for size in sorted({shown, num_units % shown} - {0}):
            count = num_workers * size * unit_size
            batch = jax.tree.map(lambda x, n=count: np.repeat(x[:1], n, axis=0), source)
            batch = jax.device_put(by_worker(batch), sharding)
            train, orders, _ = take(
                train, orders, batch, orders.current[:, :size], jax.random.key(0)
            )

    compile_chunks(*example)

    def streamed(train, orders, key, front=None):
        metrics, dispatched, known, following = [], None, None, None
        first_step = int(train.step)  # the host stands at an epoch's start anyway

        def fetch(chunk_metrics):
            done = sum(m.loss.shape[1] for m in metrics)
            metrics.append(processes.on_host(chunk_metrics))
            finite.stop_if_not_finite(metrics[-1], first_step + done)

        begun = jax.tree.map(processes.own, know(orders)) if processes.several() else orders
        for number, batch in enumerate(ordering.input.read_epoch(read, begun, front)):
            units = orders.current[:, number * shown : (number + 1) * shown]
            train, orders, out = take(train, orders, batch, units, key)
            if dispatched is not None:
                fetch(dispatched)
            dispatched = processes.gathered(out)
            if known is not None and following is None:
                following = ordering.input.prefetch_next_epoch(read, known, units_per_step=shown)
            if number == max(0, num_chunks - LOOK_AHEAD):
                known = jax.tree.map(processes.own, know(orders))
        fetch(dispatched)
        (orders,) = next_epoch(orders)
        joined = jax.tree.map(lambda *m: np.concatenate(m, axis=1), *metrics)
        return train, orders, steps.StepMetrics(*joined), following

    return streamed
