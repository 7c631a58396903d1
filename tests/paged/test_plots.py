"""Pictures: the right colour at the right place, a legend, no display, refusals by name."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from paged import BlockSpaceManager, CacheConfig, Sequence
from paged.plots import (
    CACHED,
    FREE,
    OWNER_COLOURS,
    SHARED,
    STATE_COLOURS,
    block_map,
    block_map_of,
    owners,
)

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


def a_busy_manager(num_blocks=24):
    """Blocks in every state: shared by fork and by prefix, owned, cached, free."""
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=num_blocks, watermark=0.0))
    tokens = {"A": range(17), "B": [*range(8), *range(100, 106)], "gone": range(200, 209)}
    sequences = {name: Sequence(name, ids) for name, ids in tokens.items()}
    for sequence in sequences.values():
        manager.allocate(sequence)
        manager.mark_computed(sequence, len(sequence))
    manager.free(sequences["gone"])
    fork = sequences["A"].fork("fork")
    manager.fork(sequences["A"], fork)
    fork.append_token(7)
    manager.append_slots(fork)
    return manager


@pytest.mark.parametrize("num_blocks", [24, 200])  # cells with words and without
def test_a_map_of_a_manager_has_a_cell_for_every_block(num_blocks):
    manager = a_busy_manager(num_blocks)
    (axes,) = block_map_of(manager).axes
    cells = {int(c.get_label()): c for c in axes.collections if isinstance(c, PolyCollection)}
    num_cells = {state: len(collection.get_paths()) for state, collection in cells.items()}
    gpu = manager.stats().gpu
    assert num_cells.pop(FREE) == gpu.num_free - gpu.num_cached
    assert num_cells.pop(CACHED) == gpu.num_cached == 2
    assert num_cells.pop(SHARED) == sum(n > 1 for n in manager.gpu.ref_counts) == 4
    assert num_cells == {0: 1, 1: 2, 2: 1}  # A's old tail, B's two, the fork's copy
    assert sum(num_cells.values()) + 4 == gpu.num_used
    for state, colour in [(SHARED, STATE_COLOURS[SHARED]), (1, OWNER_COLOURS[1])]:
        np.testing.assert_allclose(cells[state].get_facecolor()[0][:3], to_rgb(colour))
    corners = {tuple(path.vertices[0]) for c in cells.values() for path in c.get_paths()}
    assert len(corners) == num_blocks


def test_cells_of_a_small_pool_name_block_and_holders():
    manager = a_busy_manager()
    figure = block_map_of(manager, title="now")
    (axes,) = figure.axes
    assert axes.get_title() == "now"
    ids, names, fills = axes.texts[:48:2], axes.texts[1:48:2], axes.texts[48:]
    assert [text.get_text() for text in ids] == [str(block) for block in range(24)]
    words = [text.get_text() for text in names]
    assert words[:5] == ["A, B, fork", "A, B, fork", "A, fork", "A, fork", "A"]
    assert words.count("cached") == 2
    assert [text.get_text() for text in fills] == ["1/4", "2/4", "2/4"]  # of A, B, fork
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["A", "B", "fork"]


def test_long_names_are_cut_to_their_cell_and_many_holders_counted():
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=128))
    first = Sequence("a sequence with a very long name 1", range(8))
    manager.allocate(first)
    (axes,) = block_map_of(manager).axes
    assert axes.texts[1].get_text() == "…ame 1"
    for number in range(8):
        manager.fork(first, first.fork(f"fork {number}"))
    figure = block_map_of(manager)
    assert figure.axes[0].texts[1].get_text() == "x9"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "one sequence (colours repeat)"


def test_owners_keep_their_numbers_from_picture_to_picture():
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=4))
    first, second = Sequence("a", range(4)), Sequence("b", range(8, 14))
    manager.allocate(first)
    numbers = {}
    assert owners(manager, numbers) == [0, FREE, FREE, FREE]
    manager.allocate(second)
    manager.mark_computed(first, 4)
    manager.free(first)
    assert owners(manager, numbers) == [CACHED, 1, 1, FREE]
    assert numbers == {"a": 0, "b": 1}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_written_where_it_is_wanted(tmp_path, ending):
    path = tmp_path / f"map.{ending}"
    block_map_of(a_busy_manager(), path=path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    block_map(FRAMES, path=str(path))
    assert path.stat().st_size > 1000
