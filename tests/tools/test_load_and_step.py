"""The benchmark of decoded images: boxes lie in the image, and toy sizes give all rows."""

import numpy as np
import pytest

from benchmarks import jpegs, load_and_step


def test_boxes_lie_in_the_image_and_cover_what_they_should():
    generator, areas = np.random.default_rng(0), []
    for width, height in [(500, 375), (375, 500), (7, 100), (1, 1)] * 50:
        left, top, wide, high = jpegs.random_box(width, height, generator)
        assert 0 <= left and left + wide <= width and 0 <= top and top + high <= height
        assert wide > 0 and high > 0
        areas.append(wide * high / width / height if width * height > 700 else 0.5)
    assert 0.05 < min(areas) and max(areas) <= 1 and 0.3 < np.mean(areas) < 0.7


@pytest.mark.slow
def test_every_part_has_rows(tmp_path):
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    sizes = load_and_step.Sizes(8, (1, 2), (2,), loops_of=1, steps=4, seconds=0.05, repeats=1)
    rows = list(load_and_step.rows(tmp_path, ["patches:4"], sizes))
    assert [row["part"] for row in rows] == ["loads"] * 2 + ["ratio"] * 2 + ["loop"] * 4
    loops = {row["way"]: row for row in rows[4:]}
    assert loops[load_and_step.NO_ECHO]["loads per step"] == 1
