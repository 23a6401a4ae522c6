"""What syncs cost: collectives, bytes, and their part of a run's time."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from local_opt.formats import LANES, Compressor, check_compressor, rows_of
from syncopate.plans import as_array, check_function, check_number, check_whole

__all__ = ["RunTime", "communication_time", "count_collectives", "sync_bytes", "sync_seconds"]

KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


def count_collectives(step: Callable, *args: Any) -> dict[str, int]:
    """How many collectives of each kind a compiled step holds; the step is not run.

    Collectives inside conditionals count, too; those inside a loop count once. A step of
    `local_steps` with `sync=False` has none of its own: any that remain belong to the model, such
    as BatchNorm over devices, or to a "mean" of `map_workers`.

    Args:
      step: a function of JAX, or one of `jax.jit`.
      args: its arguments, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      {kind: number}, as {"all-reduce": 2}; {} if there are none, as for simulated workers.

    Raises:
      ValueError: for anything but a function of so many arguments.

    Examples:
      >>> import jax
      >>> from syncopate import local_opt
      >>> local_opt.costs.count_collectives(lambda x: x + 1, jax.numpy.ones(3))
      {}
    """
    check_function("step", step, *(f"args[{i}]" for i in range(len(args))))
    lowered: Any = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args)  # type: ignore
    parts = re.split(r"\n(?=\S)", lowered.compile().as_text())
    # libtpu splits a collective into fusions of this name, between a start and a done.
    beside = re.compile(r'^\S*async_collective|"AsyncCollectiveStart"')
    whole = [part for part in parts if '"AsyncCollectiveDone"' in part or not beside.search(part)]
    names = re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", "\n".join(whole))
    return {kind: names.count(kind) for kind in KINDS if kind in names}


def sync_bytes(num_params: int, *, num_workers: int, compress: Compressor | None = None) -> float:
    """Bytes that each worker sends in one sync of the parameters.

    A ring all-reduce sends 8 (W - 1) / W D bytes, in float32 even if parameters are narrower. A
    compressor sends 2 (W - 1) messages of whole rows of 128 numbers, or W - 1 messages of all D
    numbers if it `gathers`.

    Args:
      num_params: D >= 1, how many numbers are averaged.
      num_workers: W >= 1, members of the ring.
      compress: as `quantize("int8")`; None for float32.

    Returns:
      Bytes; 0 for one worker. With a compressor, exactly those of the compiled collectives.

    Raises:
      ValueError: for values out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> local_opt.costs.sync_bytes(1000, num_workers=4)
      6000.0
      >>> bfloat16 = local_opt.quantize("bfloat16")
      >>> local_opt.costs.sync_bytes(2**20, num_workers=4, compress=bfloat16) / 2**20
      3.0

    References:
      Patarasuk, Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009,
      https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    num_params = check_whole("num_params", num_params, 1)
    num_workers = check_whole("num_workers", num_workers, 1)
    check_compressor(compress)
    if compress is None:
        return 2 * (num_workers - 1) / num_workers * num_params * 4.0
    parts = 1 if compress.gathers else num_workers
    message = compress.message_rows(rows_of(compress, num_params, parts) // parts)
    messages = (num_workers - 1) * (1 if compress.gathers else 2)
    return float(messages * message * LANES * np.dtype(compress.dtype).itemsize)


def sync_seconds(
    num_params: int,
    *,
    num_workers: int,
    gigabits: float,
    efficiency: float = 1.0,
    latency: float = 0.0,
    compress: Compressor | None = None,
) -> float:
    """Seconds of one sync of the parameters over a network.

    latency + 8 sync_bytes / (10^9 gigabits efficiency)

    Both defaults are those of a perfect network. For a real one, time syncs of two sizes and solve
    for both. On one public set of measurements the efficiency was 0.91, and no latency was seen.

    Args:
      num_params, num_workers, compress: as in `sync_bytes`.
      gigabits: the speed of a worker's link in 10^9 bits per second, > 0.
      efficiency: the share of it that a sync reaches, in (0, 1].
      latency: seconds of a sync beside its bytes, >= 0.

    Returns:
      Seconds; 0 for one worker.

    Raises:
      ValueError: for values out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> round(local_opt.costs.sync_seconds(30_800_000, num_workers=4, gigabits=1), 4)
      1.4784
    """
    num_bytes = sync_bytes(num_params, num_workers=num_workers, compress=compress)
    gigabits = check_number("gigabits", gigabits, "(0, inf)")
    efficiency = check_number("efficiency", efficiency, "(0, 1]")
    latency = check_number("latency", latency, "[0, inf)")
    return latency + 8 * num_bytes / (1e9 * gigabits * efficiency) if num_bytes else 0.0


class RunTime(NamedTuple):
    """The two parts of a run's time, in the unit of the measurements; see `communication_time`."""

    computation: float  # of a run that never synchronises
    communication: float  # in addition, if it synchronises after every step


def communication_time(volumes: Sequence[float], seconds: Sequence[float]) -> RunTime:
    """The time of computation and of communication, from whole runs that differ in their plans.

    seconds_i = computation + volume_i communication, solved for both, by least squares if there
    are more than two runs.

    Args:
      volumes: syncs per step of each run, in [0, 1]: 1 if workers synchronise after every step, or
        `plan.rounds / plan.total_steps` for a plan. At least two runs, not all equal.
      seconds: the time of each run, > 0, all in one unit. Warm up and repeat the runs, to check
        that their times differ by more than the noise.

    Returns:
      Both parts, in the unit of `seconds`.

    Raises:
      ValueError: for fewer than two runs, equal volumes, or values out of range; or if one part
        would be negative, because a run that communicates more takes less time.

    Examples:
      >>> from syncopate import local_opt  # 10 s with a sync after every step, 7 s with H = 4
      >>> time = local_opt.costs.communication_time([1, 1 / 4], [10, 7])
      >>> round(time.computation, 9), round(time.communication, 9)
      (6.0, 4.0)

    References:
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2024, appendix F,
      https://arxiv.org/abs/2310.14423
    """
    (x, of_x), (y, of_y) = as_array(volumes), as_array(seconds)
    if x.ndim != 1 or x.shape != y.shape or not {x.dtype.kind, y.dtype.kind} <= {*"iuf"}:
        raise ValueError(
            f"volumes is {of_x} and seconds {of_y}: pass two lists of numbers of one length."
        )
    if not ((x >= 0) & (x <= 1)).all():  # also refuses NaN
        raise ValueError(f"volumes is {x.tolist()}: pass syncs per step, in [0, 1].")
    if not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(f"seconds is {y.tolist()}: pass positive, finite times.")
    if len({*x.tolist()}) < 2:
        raise ValueError(
            f"volumes is {x.tolist()}: pass runs of at least two different volumes, such as "
            "constant(1) and constant(8)."
        )
    slope, intercept = np.polyfit(x.astype(float), y.astype(float), 1)
    if min(intercept, slope) < -1e-9 * y.max():  # beyond rounding
        raise ValueError(
            f"seconds is {y.tolist()} for volumes {x.tolist()}, which gives {intercept:.3g} for "
            f"computation and {slope:.3g} for communication: neither can be negative. Measure "
            "longer runs, or more of them."
        )
    return RunTime(max(float(intercept), 0.0), max(float(slope), 0.0))
