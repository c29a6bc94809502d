"""Figures show the numbers they were given, and files and pixels come out of them."""

import importlib.util

import numpy as np
import pytest

from dlm.training import pictures
from dlm.training.pictures import BLUE, GIVEN, ORANGE, Point, Strip

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")


def colour(patch):
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor()).upper()


def test_the_scatter_has_every_row_and_the_mean_of_each_eighth():
    points = [Point(10, 0.05, 1.0), Point(10, 0.1, 3.0), Point(20, 1.0, 4.0)]
    axes = pictures.loss_by_ratio(points).axes[0]
    np.testing.assert_allclose(axes.collections[0].get_offsets(), [(0.05, 1.0), (0.1, 3.0), (1.0, 4.0)])
    assert list(axes.collections[0].get_alpha()) == pytest.approx([0.2, 0.2, 0.9])
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(1 / 16, 2.0), (15 / 16, 4.0)])
    assert "steps 10 (pale) to 20 (dark)" in axes.get_title() and "nats" in axes.get_ylabel()


def test_the_trajectory_lays_tokens_in_lines_coloured_by_their_step():
    steps = [*range(18)][::-1]
    axes = pictures.trajectory(["a"] * 17 + ["$\n    é"], steps).axes[0]
    cells = axes.images[0].get_array().filled(-1)
    assert cells.shape == (2, 16) and list(cells[0]) == steps[:16] and list(cells[1]) == [1, 0] + [-1] * 14
    assert axes.texts[-1].get_text() == "$↵4·\\xe9" and "18 tokens in 18 steps" in axes.get_title()


def test_the_strip_has_a_bar_for_each_token_asked():
    strips = [
        Strip([True, False, True], [True, False, False], [0.9, 0.0, 0.2]),
        Strip([True] * 3, [False] * 3, [0.1] * 3),
    ]
    one, two = pictures.confidence_strip(["x", " y", "\n"], strips).axes
    bars = {(round(p.get_x() + p.get_width() / 2), colour(p)): p.get_height() for p in one.patches}
    assert bars == {(0, BLUE): 0.9, (1, GIVEN): 1, (2, ORANGE): 0.2}
    assert one.get_ylabel() == "67% asked\n50% right" and two.get_ylabel() == "100% asked\n0% right"
    assert [label.get_text() for label in two.get_xticklabels()] == ["x", "·y", "↵"]


def test_files_and_pixels(tmp_path):
    figure = pictures.trajectory(["a"], [0])
    pictures.save(figure, tmp_path / "deep" / "a.png")
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    seen = pictures.pixels(figure)
    assert seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3 and len(np.unique(seen)) > 2
