"""Pictures: the right colour at the right place, a legend, no display, refusals by name."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from paged.plots import CACHED, FREE, OWNER_COLOURS, SHARED, STATE_COLOURS, block_map

FRAMES = np.array([[0, FREE, CACHED], [1, SHARED, len(OWNER_COLOURS)]])


def test_each_block_of_each_frame_has_the_colour_of_its_owner():
    (axes,) = block_map(FRAMES).axes
    (image,) = axes.images
    pixels = np.asarray(image.get_array())  # [num_blocks, num_frames, rgb]
    expected = [
        [OWNER_COLOURS[0], OWNER_COLOURS[1]],
        [STATE_COLOURS[FREE], STATE_COLOURS[SHARED]],
        [STATE_COLOURS[CACHED], OWNER_COLOURS[0]],
    ]
    np.testing.assert_allclose(pixels / 255, [[to_rgb(c) for c in row] for row in expected])


def test_colours_differ_in_lightness_where_they_differ_in_kind():
    def lightness(colour):
        return float(np.dot(to_rgb(colour), (0.2126, 0.7152, 0.0722)))

    owners = [lightness(colour) for colour in OWNER_COLOURS]
    assert lightness(STATE_COLOURS[SHARED]) < min(owners) - 0.1
    assert lightness(STATE_COLOURS[CACHED]) > max(owners) + 0.1
    assert lightness(STATE_COLOURS[FREE]) > lightness(STATE_COLOURS[CACHED]) + 0.1


def test_axes_legend_and_title_name_what_is_shown():
    figure = block_map(FRAMES, steps=[10, 20], title="a pool")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "physical block")
    assert axes.get_title() == "a pool"
    (legend,) = figure.legends
    labels = " | ".join(text.get_text() for text in legend.get_texts())
    assert all(word in labels for word in ("free", "cached", "shared", "one sequence"))
    formatter = axes.xaxis.get_major_formatter()
    assert [formatter(x, 0) for x in (-1, 0, 1, 2)] == ["", "10", "20", ""]


def test_it_is_drawn_without_a_display_and_without_pyplot():
    code = (
        "import sys, io, numpy; from paged.plots import block_map\n"
        "assert 'matplotlib' not in sys.modules\n"
        "block_map(numpy.zeros((3, 4), int)).savefig(io.BytesIO(), format='png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={"PATH": ""})


def test_a_pool_larger_than_the_picture_is_drawn():
    buffer = io.BytesIO()
    block_map(np.full((2, 50_000), FREE)).savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("frames", "steps", "message"),
    [
        (np.zeros(3, int), None, r"frames must be integers of shape .* got int64 \[3\]"),
        (np.zeros((0, 3), int), None, r"got int64 \[0, 3\]"),
        (np.zeros((2, 3)), None, "got float64"),
        (np.full((2, 3), -4), None, "owners >= 0, -1, -2 or -3, got -4"),
        (np.zeros((2, 3), int), [1], r"one entry per frame \(2\), got 1"),
    ],
)
def test_other_frames_are_refused(frames, steps, message):
    with pytest.raises(ValueError, match=message):
        block_map(frames, steps=steps)
