"""Slow versions of merges by a quorum, one worker and one event at a time."""

import copy
import math

import numpy as np


def merge(arrivals, least, grace, tokens, steps=None):
    """(seconds, weights) of one merge: workers come one after another until time is up."""
    order = sorted(range(len(arrivals)), key=lambda w: arrivals[w])
    counted, deadline, seconds = [], math.inf, None
    for worker in order:
        if arrivals[worker] > deadline:
            seconds = deadline
            break
        counted.append(worker)
        seconds = arrivals[worker]
        if len(counted) == least:
            deadline = seconds + grace
    weights = [0.0] * len(arrivals)
    for worker in counted:
        quality = 1.0 if steps is None else tokens[worker] / steps[worker]
        weights[worker] = tokens[worker] * quality
    return seconds, weights


class Worker:
    """A worker that steps, fails and pauses."""

    def __init__(self, failures, pause):
        self.failures, self.pause = [t for t in failures if t < math.inf], pause
        self.steps, self.left = 0.0, 0.0  # seconds of steps so far, of a pause that is not over

    def next_failure(self, until):
        due = self.failures and self.failures[0] < until
        return self.failures[0] if due else None

    def step_until(self, target):
        """Steps to a number of seconds of steps; returns the seconds that it takes."""
        seconds, self.left = self.left, 0.0
        while (failure := self.next_failure(target)) is not None:
            seconds += failure - self.steps + self.pause
            self.steps = self.failures.pop(0)
        seconds += target - self.steps
        self.steps = target
        return seconds

    def go_on(self, seconds, limit=math.inf):
        """Steps or pauses for so many seconds, at most to a limit of seconds of steps."""
        while seconds > 0:
            rest = min(self.left, seconds)
            self.left, seconds = self.left - rest, seconds - rest
            failure = self.next_failure(limit)
            if failure is not None and failure - self.steps < seconds:
                seconds -= failure - self.steps
                self.steps, self.left = self.failures.pop(0), self.pause
                continue
            if not self.left:
                self.steps = min(self.steps + seconds, limit)
            seconds = 0


def run(work, failures, *, pause, least, grace, overlap):
    """(seconds, done, stepping) of one repetition: work [R, W], failures [W, J]."""
    workers, now = [Worker(own, pause) for own in failures], 0.0
    begun, merges, shares = [0.0] * len(workers), [], []
    for lengths in work:
        ends = [b + length for b, length in zip(begun, lengths, strict=True)]
        arrivals = [
            now + copy.deepcopy(w).step_until(e) for w, e in zip(workers, ends, strict=True)
        ]
        seconds, weights = merge(arrivals, least, grace, [1.0] * len(workers))
        done = []
        for k, worker in enumerate(workers):
            if weights[k]:
                worker.step_until(ends[k])
                worker.go_on(seconds - arrivals[k], ends[k] + overlap * lengths[k])
                done.append(1.0)
                begun[k] = ends[k]
            else:
                worker.go_on(seconds - now)
                done.append(max(worker.steps - begun[k], 0.0) / lengths[k])
                begun[k] = worker.steps
        now = seconds
        merges.append(seconds)
        shares.append(done)
    return np.array(merges), np.array(shares), np.array([w.steps for w in workers])
