"""Two processes read and observe with one order, each the rows of its own workers."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

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


def counted(num_units, **how):
    return ordering.counted(2 * num_units, **how)


def mixed(num_units, *, units_per_step):
    sizes = {"a": 20, "b": 2 * num_units - 20}
    plan = ordering.mixture(
        sizes, weights=sizes, batch_size=2 * units_per_step, total_steps=9, exhausted="repeat"
    )
    return plan.order(workers=2)


MAKERS = ordering.cd_grab, ordering.grab, ordering.global_reshuffling, counted, mixed


def all_of(workers, saved=lambda name, state: state):
    """The whole runs of all orders; each also goes on from its middle, by what was saved there."""
    results = {}
    for make in MAKERS:
        whole, _ = batches(workers, make)
        some, state = batches(workers, make, stop=6)
        rest, _ = batches(workers, make, saved(make.__name__, state))
        assert some + rest == whole
        results[make.__name__] = whole
    return results


def main():
    folder, *named = sys.argv[1:]
    given = dict(argument.removeprefix("--").split("=") for argument in named)
    rank, count = int(given["process_id"]), int(given["num_processes"])
    jax.distributed.initialize(given["coordinator_address"], num_processes=count, process_id=rank)

    def saved(name, state):
        """As docs/use/checkpoints.md saves it."""
        with ocp.CheckpointManager(pathlib.Path(folder, name)) as manager:
            manager.save(1, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            return manager.restore(1, args=ocp.args.StandardRestore(like))

    result = all_of(jax.make_mesh((jax.device_count(),), ("worker",)), saved)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
