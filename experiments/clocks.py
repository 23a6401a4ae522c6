"""Simulated clocks of workers that step, fail and merge: when each merge is, and who is late.

Everything is arrays over repetitions S and workers W, with a loop over the rounds; 1.2 million
chips are a rate of failures per worker. What is simulated, and what is assumed, is in
docs/results/quorum.md.
"""

from typing import NamedTuple

import numpy as np

import local_opt


class Clock(NamedTuple):
    """What happened in R rounds.

    Fields:
      seconds: float64[R, S], when each merge was.
      done: float64[R, S, W], the share of the round that each worker had done by then, 1 in time.
      stepping: float64[S, W], the seconds in which each worker stepped, until the last merge.
    """

    seconds: np.ndarray
    done: np.ndarray
    stepping: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """float64[S]: seconds of steps / seconds, mean over the workers."""
        return self.stepping.mean(axis=-1) / self.seconds[-1]


def drawn(draw: np.random.Generator, every: float, until: float, shape: tuple) -> np.ndarray:
    """float64[*shape, J]: times of independent failures, `every` seconds on average; a Poisson
    process up to `until` and a little further."""
    mean = until / every
    count = int(mean + 10 * mean**0.5 + 20)
    return np.cumsum(draw.exponential(every, (*shape, count)), axis=-1)


def run(
    work: np.ndarray, failures: np.ndarray, *, pause: float, least: int, grace: float = 0.0,
    overlap: float = 0.0,
) -> Clock:  # fmt: skip
    """Simulates R rounds.

    A worker steps, pauses where it fails and goes on with what it had. A merge is by
    `local_opt.quorum`. Workers that were in time then begin the next round. They may have stepped
    on while they waited, for a share of a round, and this is part of the next one. Late workers
    leave the round unfinished and begin the next one from the merge, or from the end of a pause.

    Args:
      work: [R, S, W], seconds of steps of each worker's round.
      failures: [S, W, J], increasing, in seconds of the worker's own steps; inf for none.
      pause: seconds after a failure.
      least, grace: of the quorum; W and 0 wait for all.
      overlap: share of a round in [0, 1) that a worker steps on while it waits for a merge.
    """
    now = np.zeros(work.shape[1])  # [S]
    begun = np.zeros(work.shape[1:])  # [S, W]: where the round began, in seconds of steps
    busy = np.zeros(work.shape[1:])  # [S, W]: seconds of steps and pauses, without waiting
    began = failures + pause * np.arange(failures.shape[-1])  # of each pause, in busy seconds
    seconds, done = np.empty(work.shape[:2]), np.empty(work.shape)

    def after(steps):
        """Busy seconds after so many seconds of steps."""
        return steps + pause * np.sum(failures < steps[..., None], axis=-1)

    def steps_in(busy):
        """Seconds of steps in so many busy seconds."""
        past = np.sum(began < busy[..., None], axis=-1)
        last = np.take_along_axis(failures, np.maximum(past - 1, 0)[..., None], axis=-1)[..., 0]
        return np.where(past > 0, np.maximum(busy - pause * past, last), busy)

    for r, length in enumerate(work):
        end = begun + length
        ready = after(end)
        arrivals = now[:, None] + ready - busy
        merge = local_opt.quorum(arrivals, least=least, grace=grace)
        in_time = merge.weights > 0
        left = np.where(in_time, np.minimum(
            ready + merge.seconds[:, None] - arrivals, after(end + overlap * length)
        ), busy + merge.seconds[:, None] - now[:, None])  # fmt: skip
        reached = steps_in(left)
        done[r] = np.where(in_time, 1.0, np.maximum(reached - begun, 0) / length)
        begun, busy = np.where(in_time, end, reached), left
        now = seconds[r] = merge.seconds
    return Clock(seconds, done, steps_in(busy))
