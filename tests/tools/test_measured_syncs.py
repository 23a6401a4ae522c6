"""Computed seconds of syncs, against those that others measured."""

import pathlib

import pytest

from benchmarks import measured_syncs
from tests.shared_data import DATA

ROOT = pathlib.Path(__file__).parents[2]
FILE = DATA / "diloco_measured.csv"


@pytest.fixture(scope="module")
def cells():
    if not FILE.exists():
        pytest.skip(f"no measured runs in {FILE}")
    return measured_syncs.cells_of(FILE)


def test_computed_syncs_are_close_to_measured_ones(cells):
    """What docs/results/measured_syncs.md says: too kind, and less so with one fitted number."""
    page = (ROOT / "docs" / "results" / "measured_syncs.md").read_text()
    rows = list(measured_syncs.rows(cells))
    assert len(cells) == 32 and len(rows) == 5
    for row in rows:
        assert row["utilisation, times measured"] in page
        assert row["seconds of a sync, times measured"] in page


def test_a_fit_finds_the_network_that_made_the_measurements(cells):
    made = cells.assign(measured=measured_syncs.seconds(cells, efficiency=0.8, latency=0.05))
    network = measured_syncs.fitted(made)
    assert network == pytest.approx({"efficiency": 0.8, "latency": 0.05}, rel=1e-9)


def test_its_picture_is_drawn(cells, tmp_path):
    path = tmp_path / "measured_syncs.png"
    measured_syncs.draw(measured_syncs.table(cells), str(path))
    assert path.stat().st_size > 20_000
