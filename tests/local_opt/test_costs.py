"""Computation and communication, from the times of whole runs."""

import numpy as np
import pytest

import local_opt
from local_opt.costs import communication_time, sync_bytes, sync_seconds


def test_the_published_times_of_vit_b():
    """Gu et al. 2024, appendix F: 26.7 h, and 20.2 h with 10.4 % of the communication."""
    result = communication_time([1, 9711 / 93_600], [26.7, 20.2])
    assert result == pytest.approx((19.45, 7.25), abs=5e-3)
    # Their formula for a constant H: H / (H - 1) times the difference.
    result = communication_time([1, 1 / 4], [26.7, 21.2])
    assert result == pytest.approx((26.7 - 4 / 3 * 5.5, 4 / 3 * 5.5))


def test_of_more_runs_it_is_the_line_of_least_squares():
    volumes = np.array([1, 0.5, 0.25, 0.1])
    seconds = 19.5 + 7.25 * volumes + np.array([0.2, -0.1, 0.3, -0.2])
    columns = np.stack([np.ones(4), volumes], 1)
    wanted = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    assert communication_time(volumes, seconds) == pytest.approx(tuple(wanted))


def test_nothing_is_shared_out_where_times_do_not_differ():
    assert communication_time([1, 0.5, 0.25], [3, 3, 3]) == pytest.approx((3, 0))


@pytest.mark.parametrize("compress", [None, local_opt.quantize("int8")])
def test_seconds_of_a_sync_are_its_bytes_over_the_link(compress):
    given = {"num_workers": 4, "compress": compress}
    bits = 8 * sync_bytes(1000, **given)
    assert sync_seconds(1000, gigabits=2, **given) == pytest.approx(bits / 2e9, rel=1e-12)
    slow = sync_seconds(1000, gigabits=2, efficiency=0.25, latency=3, **given)
    assert slow == pytest.approx(3 + bits / 0.5e9, rel=1e-12)
    assert sync_seconds(1000, gigabits=2, latency=3, num_workers=1) == 0
