"""What the benchmarks beside other loaders count and compare, without those."""

import itertools

import jax
import numpy as np
import pytest

from benchmarks import echo_peers, input_kills, input_peers, peer_readers
from ordering import echo

COUNT = 2100  # 8 batches and 52 examples


@pytest.fixture
def folder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, peer_readers.PIXELS), np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    return tmp_path


@pytest.mark.slow
def test_input_in_an_order_is_compared_before_it_is_timed(folder, monkeypatch):
    orders = input_peers.cd_grab_orders(512)
    assert orders.shape == (4, 512) and (np.sort(orders) == np.arange(512)).all()
    np.save(folder / "pixels.npy", np.load(folder / "pixels.npy")[:2048])
    ways = {input_peers.OURS[:2] + ("",): input_peers.read_epochs}
    monkeypatch.setattr(input_peers, "LOADERS", ways)
    rows = list(input_peers.rows(folder, 2048, 0, 6))
    assert [row["epoch"] for row in rows] == list(input_peers.HOW)
    assert rows[1]["times shuffled"] == rows[2]["times ours"] == "1.00"

    def wrong(data, how):
        return itertools.islice(input_peers.read_epochs(data, how), 7)

    monkeypatch.setattr(input_peers, "LOADERS", {key: wrong for key in ways})
    with pytest.raises(AssertionError):
        list(input_peers.rows(folder, 2048, 0, 6))


def test_repeated_and_missing_examples_are_counted():
    first, second = np.array([0, 1]), np.array([3, 3, 1])
    assert input_kills.counted([first], [second], 6) == (2, 3)
    errors = 'Log\nTraceback (most recent call last):\n  File "a"\nValueError: not so\nand why\n'
    assert input_kills.refusal(errors) == "ValueError: not so"
    assert input_kills.refusal("") == "ended without a message"


@pytest.mark.slow
def test_an_epoch_goes_on_with_other_readers(folder):
    """As after a kill: batches that were read after the saved position are read again."""
    before, after, saved, readers = [], [], None, 4
    for host in range(2):
        reader = peer_readers.ours_hosts(peer_readers.Place(folder, host, 2), None)
        batches = iter(reader.batches)
        before += [next(batches)["y"] for _ in range(3)]
        saved = reader.position()
        next(batches)
        reader.batches.close()
    for host in range(readers):
        reader = peer_readers.ours_hosts(peer_readers.Place(folder, host, readers), saved)
        after += [batch["y"] for batch in reader.batches]
    assert len(after) == readers * 6
    assert input_kills.counted(jax.tree.map(np.asarray, before), after, COUNT) == (0, 0)


def test_echoing_is_counted_before_it_is_timed(monkeypatch):
    policies = {
        echo_peers.PLAIN: echo.fixed(1, total_steps=16),
        "error_diffusion": echo.error_diffusion(0.5, total_steps=16),
    }
    ways = {name: echo_peers.by_plan(policy) for name, policy in policies.items()}
    monkeypatch.setattr(echo_peers, "ways_of", lambda *_: ways)
    rows = list(echo_peers.rows(2, 2, steps=16, step=lambda batch: None))
    loads = {row["way"]: row["loads per step"] for row in rows}
    assert loads[echo_peers.PLAIN] == "1.000" and loads["error_diffusion"] == "0.500"
    with pytest.raises(AssertionError, match="error_diffusion"):
        echo_peers.check(ways, 4)
