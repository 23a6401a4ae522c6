"""The cost of a plan: predicted before a run, and split from the times of measured runs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from local_opt.formats import LANES, Wire, check_wire, rows_of
from local_opt.plans import SyncPlan
from local_opt.streaming import check_turns, stream_segments
from syncopate.plans import as_array, check_number, check_whole


class Forecast(NamedTuple):
    """The predicted cost of a run; see `forecast`."""

    rounds: int
    volume: float
    sent_bytes: float
    compute_seconds: float
    communication_seconds: float
    hidden_seconds: float
    total_seconds: float
    peak_bytes_per_second: float


class CommunicationTime(NamedTuple):
    """The two parts of a run's time; see `communication_time`."""

    compute: float
    communication: float


def sync_bytes(num_params: int, *, num_workers: int, wire: Wire | None = None) -> float:
    """Bytes that each worker sends in one sync of the parameters.

    8 (W - 1) / W D for a ring all-reduce in float32. A narrow wire sends 2 (W - 1) messages of
    whole rows of 128 numbers, or W - 1 messages of all D if it gathers.

    Args:
      num_params: D >= 1, numbers that are averaged.
      num_workers: W >= 1, members of the ring.
      wire: as `WIRES["int8"]`; None for float32.

    Returns:
      Bytes; 0 for one worker. With a wire, exactly those of the compiled collectives.

    Raises:
      ValueError: for values out of range.

    Examples:
      >>> import local_opt
      >>> local_opt.sync_bytes(1000, num_workers=4)
      6000.0
      >>> wires = (local_opt.WIRES[name] for name in ("bfloat16", "int8", "int4", "top_k"))
      >>> [local_opt.sync_bytes(2**20, num_workers=4, wire=wire) / 2**20 for wire in wires]
      [3.0, 1.5234375, 0.7734375, 0.1640625]

    References:
      Patarasuk, Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009,
      https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    num_params = check_whole("num_params", num_params, 1)
    num_workers = check_whole("num_workers", num_workers, 1)
    check_wire(wire)
    if wire is None:
        return 2 * (num_workers - 1) / num_workers * num_params * 4.0
    parts = 1 if wire.gathers else num_workers
    message = wire.message_rows(rows_of(wire, num_params, parts) // parts)
    messages = (num_workers - 1) * (1 if wire.gathers else 2)
    return float(messages * message * LANES * np.dtype(wire.dtype).itemsize)


def sync_seconds(
    num_params: int,
    *,
    num_workers: int,
    gigabits_per_second: float,
    wire: Wire | None = None,
    latency_seconds: float = 0.0,
) -> float:
    """Seconds of one sync: the latency and the transfer of `sync_bytes`; 0 for one worker."""
    sent = sync_bytes(num_params, num_workers=num_workers, wire=wire)
    speed = check_number("gigabits_per_second", gigabits_per_second, "(0, inf)")
    latency = check_number("latency_seconds", latency_seconds, "[0, inf)")
    return latency + 8 * sent / (1e9 * speed) if sent else 0.0


def forecast(
    plan: SyncPlan | Mapping[str, SyncPlan],
    *,
    num_params: int | Mapping[str, int],
    num_workers: int,
    step_seconds: float,
    gigabits_per_second: float,
    wire: Wire | Mapping[str, Wire] | None = None,
    latency_seconds: float = 0.0,
    delay: int = 0,
) -> Forecast:
    """Bytes and seconds of a run that synchronises by a plan, or its parts by several plans.

    total = T s + sum over syncs of (l + 8 B / (10^9 g)), less what steps hide; B = `sync_bytes`.
    With a delay, transfers take turns on the link, and the step at a part's finish, `delay` steps
    after its start, waits for the rest. The peak is the largest sum of B / (max(delay, 1) s) over
    the parts in transit in one step.

    Workers are assumed equally fast, computing or communicating but, without a delay, never both,
    and a ring as fast as one worker's link. Data-parallel training can hide communication behind
    the backward pass, so for H = 1 this is an upper bound. With several GPUs per machine in one
    ring, W counts GPUs and g is the machine's link; if they average within the machine first, W
    counts machines. With several network cards, g is their sum.

    Args:
      plan: the plan; or {part: its plan}, for fragments or fields of the state.
      num_params: D >= 1, numbers that are averaged; or {part: numbers in it}.
      num_workers: W >= 1; one worker sends nothing.
      step_seconds: s > 0, seconds to compute one step on one worker, without communication.
      gigabits_per_second: g > 0, speed of a link in 10^9 bits per second.
      wire: see `sync_bytes`; or {part: its wire}, other parts in float32.
      latency_seconds: l >= 0, of a sync.
      delay: >= 0, steps from start to finish of a sync; 0 if workers wait for it.

    Returns:
      A record for one worker: `rounds` (of all parts), `volume` (numbers sent, as a share of all
      numbers after every step), `sent_bytes`, `compute_seconds`, `communication_seconds` (of the
      link), `hidden_seconds` (of these, behind steps), `total_seconds`, and `peak_bytes_per_second`
      (that a link must carry to hide everything).

    Raises:
      ValueError: for values out of range, or `num_params` of other parts than the plans'.

    Examples:
      >>> import local_opt
      >>> cost = dict(num_workers=2, step_seconds=0.5, gigabits_per_second=32)  # 1 s per sync
      >>> plan = local_opt.constant(4, total_steps=100)
      >>> local_opt.forecast(plan, num_params=10**9, **cost).total_seconds
      75.0
      >>> local_opt.forecast(local_opt.every_step(100), num_params=10**9, **cost).total_seconds
      150.0
      >>> plans = {"0": local_opt.constant(4, total_steps=8)}
      >>> found = local_opt.forecast(plans, num_params={"0": 10**9}, delay=2, **cost)
      >>> found.hidden_seconds, found.total_seconds
      (1.0, 5.0)

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed
      Free Lunch, 2025, https://arxiv.org/abs/2501.18512
    """
    step_seconds = check_number("step_seconds", step_seconds, "(0, inf)")
    plans = {"": plan} if isinstance(plan, SyncPlan) else plan
    steps = check_turns(plans, delay)
    sizes = num_params if isinstance(num_params, Mapping) else {"": num_params}
    wires = wire if isinstance(wire, Mapping) else dict.fromkeys(plans, wire)
    if set(sizes) != set(plans) or not set(wires) <= set(plans):
        raise ValueError(
            f"num_params are of {list(sizes)}, wires of {list(wires)} and the plans of "
            f"{list(plans)}: name the same parts."
        )
    sent, seconds = {}, {}
    for part, size in sizes.items():
        own = wires.get(part)
        sent[part] = sync_bytes(size, num_workers=num_workers, wire=own)
        seconds[part] = sync_seconds(
            size, num_workers=num_workers, wire=own,
            gigabits_per_second=gigabits_per_second, latency_seconds=latency_seconds,
        )  # fmt: skip
    rounds = {part: each.rounds for part, each in plans.items()}
    busy = sum(rounds[part] * seconds[part] for part in plans)
    waited = _waited(plans, delay, seconds, step_seconds) if delay else busy
    compute = steps * step_seconds
    numbers = sum(rounds[part] * int(size) for part, size in sizes.items())
    return Forecast(
        sum(rounds.values()),
        numbers / (steps * sum(map(int, sizes.values()))),
        float(sum(rounds[part] * sent[part] for part in plans)),
        compute,
        busy,
        busy - waited,
        compute + waited,
        _peak(plans, delay, sent) / step_seconds,
    )


def _waited(plans, delay, seconds, step_seconds):
    """Seconds that steps wait, with one transfer on the link at a time."""
    waited, free, arrives = 0.0, 0.0, {}
    segments = stream_segments(plans, delay=delay)
    for step, action, part in ((s.begin, e.action, e.fragment) for s in segments for e in s.due):
        now = step * step_seconds + waited
        if action == "start":
            free = max(free, now) + seconds[part]
            arrives[part] = free
        else:
            waited += max(0.0, arrives[part] - now)
    return waited


def _peak(plans, delay, sent):
    """Bytes per step of all parts in transit in the busiest step."""
    length = max(delay, 1)
    if len(plans) == 1 and length == 1:
        return max(sent.values())
    at, change = [], []
    for part, plan in plans.items():
        for shift, sign in ((0, 1), (length, -1)):
            at.append(plan.ends + shift)
            change.append(np.full(plan.rounds, sign * sent[part] / length))
    steps, place = np.unique(np.concatenate(at), return_inverse=True)
    changes = np.zeros(len(steps))
    np.add.at(changes, place, np.concatenate(change))
    return float(np.cumsum(changes).max())


def communication_time(volumes: Sequence[float], times: Sequence[float]) -> CommunicationTime:
    """Splits the measured times of runs into computation and communication.

    time = C + M volume, by least squares; with two runs of volumes 1 and 1 / H this is
    M = H / (H - 1) (T_para - T_H).

    The runs may only differ in when they synchronise. M may be negative: then these times show no
    cost of communication.

    Args:
      volumes: syncs per step of each run, in (0, 1] (`SyncPlan.volume`); at least two different.
      times: of the same runs, > 0, in any one unit.

    Returns:
      A record of `compute` (C, of a run that never synchronises) and `communication` (M, of a run
      that synchronises after every step), in the unit of `times`.

    Raises:
      ValueError: for fewer than two runs, equal volumes, volumes outside (0, 1], or times that
        are not positive and finite.

    Examples:
      >>> import local_opt  # hours of a run that synchronises every step, and of one with H = 4
      >>> found = local_opt.communication_time([1, 0.25], [10.0, 7.0])
      >>> round(found.communication, 6), round(found.compute, 6)
      (4.0, 6.0)

    References:
      Gu, Lyu, Arora, Zhang, Huang, A Quadratic Synchronization Rule for Distributed Deep
      Learning, 2024, Appendix F, https://arxiv.org/abs/2310.14423
    """
    (x, of_x), (y, of_y) = as_array(volumes), as_array(times)
    if x.ndim != 1 or x.shape != y.shape or not {x.dtype.kind, y.dtype.kind} <= set("iuf"):
        raise ValueError(
            f"volumes are {of_x} and times {of_y}: pass two lists of numbers of equal length."
        )
    # Written so that nan fails too.
    if not ((x > 0) & (x <= 1)).all():
        raise ValueError(f"volumes are {x.tolist()}: each must lie in (0, 1], as syncs per step.")
    if not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(f"times are {y.tolist()}: each must be positive and finite.")
    if len(set(x.tolist())) < 2:
        raise ValueError(
            f"volumes are {x.tolist()}: computation and communication can only be told apart from "
            "runs with different volumes. Time another plan, too."
        )
    slope = np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2)
    return CommunicationTime(float(y.mean() - slope * x.mean()), float(slope))
