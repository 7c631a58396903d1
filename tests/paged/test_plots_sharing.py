"""The prefix-sharing tree: every block of every table once, black where it is shared."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from paged import BlockSpaceManager, CacheConfig, NotAllocatedError, Sequence
from paged.plots import OWNER_COLOURS, SHARED, STATE_COLOURS, prefix_sharing_tree


def manager_of(texts, num_gpu_blocks=64, **options):
    """A manager whose sequences were computed one after the other."""
    config = CacheConfig(block_size=4, num_gpu_blocks=num_gpu_blocks, **options)
    manager = BlockSpaceManager(config)
    sequences = [Sequence(name, tokens) for name, tokens in texts.items()]
    for sequence in sequences:
        manager.allocate(sequence)
        manager.mark_computed(sequence, len(sequence))
    return manager, sequences


def bars(figure):
    """What each bar says, where it starts and ends, and its colour."""
    (axes,) = figure.axes
    texts = axes.texts[: len(axes.patches)]
    return {
        text.get_text(): (bar.get_x(), bar.get_x() + bar.get_width(), bar.get_facecolor()[:3])
        for text, bar in zip(texts, axes.patches, strict=True)
    }


def test_tables_that_part_fork_in_the_picture():
    system = range(8)
    manager, _ = manager_of(
        {"A": [*system, *range(20, 29)], "B": [*system, 50, 51], "C": range(60, 66)}
    )
    figure = prefix_sharing_tree(manager, title="three requests")
    black, blue, orange, green = (to_rgb(c) for c in (STATE_COLOURS[SHARED], *OWNER_COLOURS[:3]))
    assert bars(figure) == {
        "0-1": (0, 8, black),
        "2-4": (8, 20, blue),
        "5": (8, 12, orange),
        "6-7": (0, 8, green),
    }
    (axes,) = figure.axes
    assert axes.get_title() == "three requests"
    labels = [text.get_text() for text in axes.texts[len(axes.patches) :]]
    assert labels == ["A: 17 tokens", "B: 10 tokens", "C: 6 tokens"]
    assert "black: shared" in axes.get_xlabel()


def test_sequences_that_share_everything_end_in_one_bar():
    manager, (first,) = manager_of({"A": range(6)})
    manager.fork(first, first.fork("twin"))
    figure = prefix_sharing_tree(manager)
    assert bars(figure) == {"0-1": (0, 8, to_rgb(STATE_COLOURS[SHARED]))}
    (axes,) = figure.axes
    ys = [text.xy[1] for text in axes.texts[1:]]
    assert ys == [0, 1]
    assert axes.patches[0].get_y() + axes.patches[0].get_height() / 2 == pytest.approx(0.5)


def test_what_is_behind_a_window_is_an_empty_bar():
    manager, _ = manager_of({"A": range(16)}, sliding_window=8)
    figure = prefix_sharing_tree(manager)
    assert bars(figure) == {
        "behind the window": (0, 8, (1, 1, 1)),
        "2-3": (8, 16, to_rgb(OWNER_COLOURS[0])),
    }


def test_blocks_stay_black_where_another_table_has_a_hole():
    manager, _ = manager_of({"A": range(16)}, sliding_window=8)
    other = Sequence("B", range(16))
    manager.allocate(other)  # finds the cached head that A dropped, and shares the rest
    shared = {text: bar for text, bar in bars(prefix_sharing_tree(manager)).items() if text == "2"}
    assert shared == {"2": (8, 12, to_rgb(STATE_COLOURS[SHARED]))}


def test_random_tables_are_drawn_block_for_block():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 40).tolist()
    texts = {
        number: trunk[: rng.integers(0, 40)] + rng.integers(10, 99, rng.integers(1, 30)).tolist()
        for number in range(20)
    }
    manager, sequences = manager_of(texts, num_gpu_blocks=500)
    (axes,) = prefix_sharing_tree(manager).axes
    drawn = sum(bar.get_width() for bar in axes.patches)
    assert drawn == manager.stats().gpu.num_used * 4
    ends = {y for text in axes.texts[len(axes.patches) :] for y in [text.xy[1]]}
    assert ends == set(range(20))
    some = prefix_sharing_tree(manager, sequences[:3])
    assert len(some.axes[0].texts) - len(some.axes[0].patches) == 3


def test_a_sequence_without_tokens_has_a_row(tmp_path):
    manager, _ = manager_of({"empty": [], "A": range(3)})
    path = tmp_path / "tree.png"
    figure = prefix_sharing_tree(manager, path=path)
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "1" if manager.tables["A"].blocks == [1] else "0",
        "empty: 0 tokens",
        "A: 3 tokens",
    ]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_and_too_much_are_refused():
    manager, _ = manager_of({})
    with pytest.raises(ValueError, match="sequences must be 1 to 200, got 0"):
        prefix_sharing_tree(manager)
    with pytest.raises(NotAllocatedError, match="'stranger' holds no blocks"):
        prefix_sharing_tree(manager, [Sequence("stranger", [1])])
    many, _ = manager_of({number: [number] for number in range(201)}, num_gpu_blocks=300)
    with pytest.raises(ValueError, match="sequences must be 1 to 200, got 201"):
        prefix_sharing_tree(many)
