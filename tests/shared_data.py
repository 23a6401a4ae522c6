"""Real data that lie beside the checkout: tests on them are skipped, with the reason, elsewhere."""

import pathlib

import pytest

DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"


def need(folder):
    if not (DATA / folder).exists():
        pytest.skip(f"no data in ../shared/data/{folder}")
    return str(DATA / folder)
