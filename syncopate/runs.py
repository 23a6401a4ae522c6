"""Stretches of steps, held as runs of equal ones: memory grows with their changes, not with T."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np


class Runs(NamedTuple):
    """The stretches that divide T steps. A run is as many equal ones in a row as there are.

    Three numbers of 4 bytes per run, and so 12 bytes for any number of equal stretches.
    """

    starts: np.ndarray  # int32[m], the first step of each run
    lengths: np.ndarray  # int32[m], the steps of each of its stretches; no two neighbours are equal
    before: np.ndarray  # int32[m], the stretches before it
    total_steps: int  # T

    @classmethod
    def of(cls, lengths: object, counts: object, total_steps: int) -> Self:
        """So many stretches of each length in turn, at least T steps; cut at the end of step T."""
        steps, times = np.array(lengths, np.int64), np.array(counts, np.int64)
        starts, before = np.cumsum(steps * times) - steps * times, np.cumsum(times) - times
        kept = np.flatnonzero((times > 0) & (starts < total_steps))
        steps, starts, before = steps[kept], starts[kept], before[kept]
        whole, rest = divmod(int(total_steps - starts[-1]), int(steps[-1]))
        if rest and whole:  # the last stretch is shorter, and a run of its own
            starts, steps = np.append(starts, total_steps - rest), np.append(steps, rest)
            before = np.append(before, before[-1] + whole)
        elif rest:
            steps[-1] = rest
        changes = np.flatnonzero(np.diff(steps, prepend=0))
        starts, steps, before = (x[changes].astype(np.int32) for x in (starts, steps, before))
        for numbers in (starts, steps, before):
            numbers.setflags(write=False)
        return cls(starts, steps, before, int(total_steps))

    @classmethod
    def between(cls, starts: np.ndarray, total_steps: int) -> Self:
        """The stretches from each of these steps, int[n] from 0 on, to the next or to the end."""
        lengths = np.diff(starts, append=total_steps)
        return cls.of(lengths, np.ones_like(lengths), total_steps)

    @property
    def counts(self) -> np.ndarray:
        """int64[m], the stretches of each run."""
        return np.diff(self.starts, append=self.total_steps).astype(np.int64) // self.lengths

    @property
    def num_stretches(self) -> int:
        last = (self.total_steps - int(self.starts[-1])) // int(self.lengths[-1])
        return int(self.before[-1]) + last

    def all_lengths(self) -> np.ndarray:
        """int64[n], the steps of every stretch."""
        return np.repeat(self.lengths.astype(np.int64), self.counts)

    def all_starts(self) -> np.ndarray:
        """int64[n], the first step of every stretch."""
        lengths = self.all_lengths()
        return np.cumsum(lengths) - lengths

    def number_at(self, step: int | np.ndarray) -> np.ndarray:
        """int64: the number of the stretch that a step (or each of an array) lies in."""
        run = self._run_at(step)
        return self.before[run] + (step - self.starts[run]) // self.lengths[run]

    def length_at(self, step: int | np.ndarray) -> np.ndarray:
        """int64: the length of the stretch that a step lies in."""
        return self.lengths[self._run_at(step)].astype(np.int64)

    def start_at(self, step: int | np.ndarray) -> np.ndarray:
        """int64: the first step of the stretch that a step lies in."""
        run = self._run_at(step)
        return step - (step - self.starts[run]) % self.lengths[run]

    def _run_at(self, step):
        return np.searchsorted(self.starts, step, side="right") - 1


def ends_after(runs: Runs, step: jax.Array) -> jax.Array:
    """bool: whether a stretch ends after a traced step; true beyond the last one."""
    place = _place(runs.starts, step)
    # From the host's arrays only here, as a traced array could not leave its trace.
    start, length = (jnp.asarray(x)[place] for x in (runs.starts, runs.lengths))
    return ((step + 1 - start) % length == 0) | (step >= runs.total_steps)


def _place(bounds, value):
    """The last of the bounds that is not above a traced value, or the first: by bisection."""
    place, last = jnp.zeros_like(value), len(bounds) - 1
    for bit in reversed(range(last.bit_length())):  # unrolled, and nothing for a single run
        further = place + 2**bit
        at = jnp.asarray(bounds)[jnp.minimum(further, last)]
        place = jnp.where((further <= last) & (at <= value), further, place)
    return place
