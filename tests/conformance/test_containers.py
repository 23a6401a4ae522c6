"""Every container of the ecosystem is read exactly, or refused with a line that makes it so.

The line is taken out of the message and run, as often as there is one.
"""

import collections
import pathlib
import warnings

import jax
import pytest

from tests.conformance import containers

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "use" / "input.md"
LIBRARIES = "datasets grain h5py pandas polars pyarrow scipy tensorflow xarray zarr".split()


def run(readers, chosen):
    """Prints how many combinations were tried, and returns what is wrong."""
    count, faults = collections.Counter(), []
    for name, make, wanted in containers.kinds():
        if not chosen(name):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make()
        except Exception:  # a library that is not installed, or that has no such column
            count["no such container"] += 1
            continue
        for reader in readers:
            with warnings.catch_warnings(), jax.enable_x64(True):
                warnings.simplefilter("ignore")
                actual = containers.outcome(reader, make, wanted)
            count[actual.split(":")[0]] += 1
            if actual not in ("right", "converted", "refused"):
                faults.append(f"{reader.__name__}, {name}: {actual}")
    print(dict(count))
    return faults, count


def test_as_source():
    faults, count = run([containers.as_source], lambda name: True)
    assert not faults
    for library in LIBRARIES:
        pytest.importorskip(library)
    assert count["right"] > 180 and count["converted"] > 300 and count["refused"] < 360


@pytest.mark.parametrize("reader", containers.READERS[1:], ids=lambda reader: reader.__name__)
def test_readers(reader):
    """They call `as_source`; so one column of a few containers is enough."""
    faults, count = run([reader], lambda name: "dict" not in name and name.endswith(": int64"))
    assert not faults
    assert sum(count.values()) > 60  # also those that have no such container here


@pytest.mark.slow
@pytest.mark.parametrize("reader", containers.READERS[1:], ids=lambda reader: reader.__name__)
def test_readers_with_every_column(reader):
    assert not run([reader], lambda name: True)[0]


def test_the_page_has_the_table():
    for library in LIBRARIES:
        pytest.importorskip(library)
    assert containers.table() in PAGE.read_text()
