"""What reading blocks costs: every way reads the same records once, and requests are counted."""

import sys

import numpy as np
import pytest

from benchmarks import block_costs, block_files, block_readers
from benchmarks.block_readers import RECORD, Place

COUNT = block_files.records_in(0.005)
OURS = {  # of blocks of 256 and windows of 4
    ("array", "read_epochs, mapped"): None,
    ("ArrayRecord", "read_epochs"): "grain",
    ("array", "read_blocks"): None,
    ("array", "read_blocks, tokens"): None,
    ("ArrayRecord, groups", "read_blocks"): "array_record",
    ("Parquet", "read_blocks"): "pyarrow",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    formats = {files: block_files.FORMATS[files] for files, _ in OURS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_files, "FORMATS", formats)
        block_files.write(folder, COUNT)
    return folder / f"{COUNT}"


@pytest.mark.parametrize(("case", "package"), OURS.items(), ids=map(", ".join, OURS))
def test_records_are_read_once_also_after_a_resume(folder, case, package):
    if package:
        pytest.importorskip(package)
    whole = np.load(folder / "array" / "records.npy", mmap_mode="r")
    (files, way), results = case, []
    read, place = block_readers.WAYS[way], Place(folder / files, 256, 4, 2)
    reader, saved = read(place, None), None
    batches = iter(reader.batches)
    for _ in range(5):
        results.append(next(batches))
        saved = reader.position()
    results += read(place, saved).batches
    for batch in results:
        block_readers.check(place, batch, whole)
    count = COUNT - ("tokens" in way)  # the last one has no token after it
    assert sum(map(len, results)) == count == len({row.tobytes() for x in results for row in x})


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_requests_are_those_of_blocks(folder):
    """Sixteen blocks are sixteen requests, and some for the file's header and digest."""
    read, place = block_readers.WAYS["read_blocks"], Place(folder / "array", 256, 4, 1)
    results = {}
    for size in (1, 256):
        place = place._replace(block=size, window=1024 // size)
        block_readers.timed(read, place, None, 0)  # imports and compiles
        results[size], _ = block_readers.timed(read, place, None, 100)
        assert results[size]["examples"] == COUNT
    requests = {size: each["requests"] * COUNT for size, each in results.items()}
    assert 4096 <= requests[1] <= 4096 + 200 and 16 <= requests[256] <= 16 + 200

    both = {"cold": results[256], "warm": results[256], "resume": 0.1, "plain": 1e5}
    row = block_costs.row_of(block_costs.blocks(256), [both, both, both])
    assert row["requests"] == f"{1e3 * results[256]['requests']:.4g}" and row["window"] == 64
    assert RECORD * COUNT == (folder / "array" / "records.npy").stat().st_size - 128


def test_a_set_that_does_not_fit_the_disk_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pass another --folder"):
        block_files.write(tmp_path, 10**13)
    assert not list(tmp_path.iterdir())
