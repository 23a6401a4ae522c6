"""What plans of parts will cost before they run: bytes, the link they need, what steps hide."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from local_opt.forecast import check_positive, sync_bytes
from local_opt.part_plans import START, PartPlans
from local_opt.wires import Wire

SPEEDS = (1, 10, 25, 100, 400)  # Gb/s


class PartsForecast(NamedTuple):
    """The predicted cost of a run; all bytes and seconds are of one worker."""

    syncs: int  # of all parts, over the run
    volume: float  # bytes, as a share of sending all parts after every step
    sent_bytes: float  # over the run
    peak_bytes_per_second: float  # that a link must carry for steps to hide everything
    compute_seconds: float
    hidden_seconds: float  # of communication, behind steps
    waited_seconds: float  # of communication that steps wait for
    total_seconds: float  # computed and waited


def forecast_parts(
    plans: PartPlans,
    sizes: Mapping[str, int],
    *,
    num_workers: int,
    step_seconds: float,
    gigabits_per_second: float,
    wires: Mapping[str, Wire | None] | Wire | None = None,
    latency_seconds: float = 0.0,
) -> PartsForecast:
    """Bytes and seconds of a run whose parts are synchronised by plans of their own.

    A part of B bytes takes l + 8 B / (10^9 g) seconds of the link from its start on, or from
    when the link is free; the step at its finish waits for what is left of them. The peak is
    max over steps of sum B / (max(tau, 1) s) over the parts on their way.

    Args:
      plans: of the run; tau is their delay.
      sizes: {part: numbers in it >= 1}, as `fragment_sizes` returns, or the same D for a field.
      num_workers: W >= 1; one worker sends nothing and waits for nobody.
      step_seconds: s > 0, seconds to compute one step, without communication.
      gigabits_per_second: g > 0, speed of a link in 10^9 bits per second.
      wires: {part: its wire}, parts without one in float32; or one for all; see `sync_bytes`.
      latency_seconds: l >= 0, seconds that a sync takes beside the transfer.

    Returns:
      A `PartsForecast`.

    Raises:
      ValueError: for values out of range, or sizes of other parts than the plans'.

    Example:
      >>> import local_opt
      >>> plans = local_opt.PartPlans({"0": local_opt.constant(4, total_steps=8)}, delay=2)
      >>> cost = dict(num_workers=2, step_seconds=0.5, gigabits_per_second=32)
      >>> found = local_opt.forecast_parts(plans, {"0": 10**9}, **cost)  # 1 s per sync
      >>> found.hidden_seconds, found.waited_seconds, found.total_seconds
      (1.0, 1.0, 5.0)

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed
      Free Lunch, 2025, https://arxiv.org/abs/2501.18512
    """
    check_positive("step_seconds", step_seconds)
    check_positive("gigabits_per_second", gigabits_per_second)
    if not (np.isfinite(latency_seconds) and latency_seconds >= 0):
        raise ValueError(f"latency_seconds is {latency_seconds!r}: pass a finite number >= 0.")
    if set(sizes) != set(plans.plans):
        raise ValueError(
            f"sizes are of {sorted(sizes)} and the plans of {sorted(plans.plans)}: name the same "
            "parts."
        )
    wire_of = dict.fromkeys(sizes, wires) if isinstance(wires, Wire | None) else wires
    sent = {
        part: sync_bytes(size, num_workers=num_workers, wire=wire_of.get(part))
        for part, size in sizes.items()
    }
    seconds = {
        part: latency_seconds + 8 * b / (1e9 * gigabits_per_second) if b else 0.0
        for part, b in sent.items()
    }
    syncs = {part: plan.rounds for part, plan in plans.plans.items()}
    busy = sum(syncs[part] * seconds[part] for part in sizes)
    waited = _waited(plans, seconds, float(step_seconds))
    total_bytes = float(sum(syncs[part] * sent[part] for part in sizes))
    every = plans.total_steps * sum(sync_bytes(n, num_workers=num_workers) for n in sizes.values())
    compute = plans.total_steps * float(step_seconds)
    return PartsForecast(
        sum(syncs.values()),
        total_bytes / every if every else 0.0,
        total_bytes,
        _peak(plans, sent) / step_seconds,
        compute,
        busy - waited,
        waited,
        compute + waited,
    )


def describe_parts(
    plans: PartPlans,
    sizes: Mapping[str, int],
    *,
    num_workers: int,
    step_seconds: float,
    wires: Mapping[str, Wire | None] | Wire | None = None,
    latency_seconds: float = 0.0,
    speeds: Sequence[float] = SPEEDS,
) -> str:
    """The plans and their prices on one screen, a row for each speed of a link.

    total = T s + what is waited for; see `forecast_parts`.

    Args:
      plans, sizes, num_workers, step_seconds, wires, latency_seconds: as of `forecast_parts`.
      speeds: of links, in 10^9 bits per second.

    Returns:
      A text of several lines.

    Raises:
      ValueError: as `forecast_parts`.

    Example:
      >>> import local_opt
      >>> plans = local_opt.PartPlans({"0": local_opt.constant(4, total_steps=8)}, delay=2)
      >>> cost = dict(num_workers=2, step_seconds=0.5, speeds=[32])
      >>> print(local_opt.describe_parts(plans, {"0": 10**9}, **cost).split("\\n", 5)[-1])
      sends 8.000 GB per worker in 2 syncs, 25.000% of every step's; peak 4.000 GB/s hides all
            Gb/s    hidden s    waited s     total s
              32        1.00        1.00        5.00
    """
    cost = dict(
        num_workers=num_workers,
        step_seconds=step_seconds,
        wires=wires,
        latency_seconds=latency_seconds,
    )
    found = [forecast_parts(plans, sizes, gigabits_per_second=g, **cost) for g in speeds]
    one = found[0]
    lines = [
        plans.describe(),
        f"sends {one.sent_bytes / 1e9:.3f} GB per worker in {one.syncs} syncs, {one.volume:.3%} of "
        f"every step's; peak {one.peak_bytes_per_second / 1e9:.3f} GB/s hides all",
        f"{'Gb/s':>10}{'hidden s':>12}{'waited s':>12}{'total s':>12}",
    ]
    for g, f in zip(speeds, found, strict=True):
        numbers = (f.hidden_seconds, f.waited_seconds, f.total_seconds)
        lines.append(f"{g:>10g}" + "".join(f"{x:>12.2f}" for x in numbers))
    return "\n".join(lines)


def _waited(plans, seconds, step_seconds):
    """Seconds that steps wait: event by event, one transfer on the link at a time."""
    waited, free, arrives = 0.0, 0.0, {}
    for event in plans.events_from(0):
        now = event.step * step_seconds + waited
        if event.action == START:
            free = max(free, now) + seconds[event.part]
            arrives[event.part] = free
        else:
            waited += max(0.0, arrives[event.part] - now)
    return waited


def _peak(plans, sent):
    """Bytes per step, of all parts that are on their way in the busiest one."""
    length = max(plans.delay, 1)
    change = np.zeros(plans.total_steps + length + 1)
    for part, plan in plans.plans.items():
        np.add.at(change, plan.ends, sent[part] / length)
        np.add.at(change, plan.ends + length, -sent[part] / length)
    return float(np.cumsum(change).max())
