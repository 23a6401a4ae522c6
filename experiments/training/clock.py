"""A clock of training alone: it stands still while something else is done."""

import contextlib
import threading
import time


class Clock:
    """Seconds of training since the clock was made; input that is throttled by it stops with it.

    Otherwise an evaluation would be a gift to the arm whose input is slow: it would find its queue
    filled.
    """

    def __init__(self):
        self._start, self._lost, self._stopped_at = time.perf_counter(), 0.0, None
        self._runs = threading.Condition()

    def now(self) -> float:
        with self._runs:
            return self._now()

    def _now(self):
        end = time.perf_counter() if self._stopped_at is None else self._stopped_at
        return end - self._start - self._lost

    @contextlib.contextmanager
    def stopped(self):
        """While the body runs, `now` does not move and `sleep_until` does not return."""
        with self._runs:
            self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            with self._runs:
                self._lost += time.perf_counter() - self._stopped_at
                self._stopped_at = None
                self._runs.notify_all()

    def sleep_until(self, moment: float) -> None:
        """Returns when the clock shows `moment`, in seconds."""
        while True:
            with self._runs:
                while self._stopped_at is not None:
                    self._runs.wait()
                left = moment - self._now()
            if left <= 0:
                return
            time.sleep(left)
