"""Two processes read and observe with one order, each the rows of its own workers."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ordering

ROWS = np.random.default_rng(0).normal(size=(26, 4)).astype(np.float32)


def batches(workers, make, state=None, stop=None):
    """([(numbers of this process's workers, and those workers)], the state then)."""
    order = make(13, units_per_step=3)
    reads = ordering.data.read_epochs(
        (np.arange(26), ROWS),
        order,
        jax.random.key(0),
        like=jnp.zeros(4),
        workers=workers,
        num_epochs=2,
        state=state,
    )
    results = []
    for numbers, rows in reads:
        shards = getattr(numbers, "addressable_shards", ())
        results.append([(s.index[0].start or 0, np.asarray(s.data).tolist()) for s in shards])
        reads.observe(rows)
        if len(results) == stop:
            break
    return results, reads.state()


def all_of(workers):
    """The whole runs of three orders; each also goes on from its middle."""
    results = {}
    for make in (ordering.cd_grab, ordering.grab, ordering.global_reshuffling):
        whole, _ = batches(workers, make)
        some, state = batches(workers, make, stop=6)
        rest, _ = batches(workers, make, state)
        assert some + rest == whole
        results[make.__name__] = whole
    return results


def main():
    folder, *named = sys.argv[1:]
    given = dict(argument.removeprefix("--").split("=") for argument in named)
    rank, count = int(given["process_id"]), int(given["num_processes"])
    jax.distributed.initialize(given["coordinator_address"], num_processes=count, process_id=rank)
    result = all_of(jax.make_mesh((jax.device_count(),), ("worker",)))
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
