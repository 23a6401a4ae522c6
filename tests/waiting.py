"""Waiting for what another thread does."""

import time

TIMEOUT = 60  # seconds, for events that take milliseconds


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()
