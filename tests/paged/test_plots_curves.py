"""Curves: what is drawn is what was given, and what cannot be drawn is refused by name."""

import numpy as np
import pytest

from paged import BlockSpaceManager, CacheConfig, Sequence
from paged.plots import (
    hits_against_pool_size,
    roofline,
    usage_over_time,
    waste_against_block_size,
)


def a_run():
    """Usage as a manager reports it, while two sequences come and one goes."""
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=10, watermark=0.0))
    series = {
        name: [] for name in ("step", "used", "cached", "free", "internal_fragmentation", "running")
    }
    first, second = Sequence("a", range(9)), Sequence("b", range(20, 26))

    def note():
        stats = manager.stats()
        series["step"].append(len(series["step"]))
        series["used"].append(stats.gpu.num_used)
        series["cached"].append(stats.gpu.num_cached)
        series["free"].append(stats.gpu.num_free - stats.gpu.num_cached)
        series["internal_fragmentation"].append(stats.internal_fragmentation)
        series["running"].append(len(manager.tables))

    for sequence in (first, second):
        manager.allocate(sequence)
        manager.mark_computed(sequence, len(sequence))
        note()
    manager.free(first)
    note()
    return series


def test_blocks_are_stacked_up_to_the_pool():
    series = a_run()
    assert series["used"] == [3, 5, 2]
    assert series["cached"] == [0, 0, 2]
    figure = usage_over_time(series, title="a run")
    blocks, waste, queues = figure.axes
    assert blocks.get_title() == "a run"
    assert blocks.get_ylim() == (0, 10)
    tops = {
        area.get_label(): area.get_paths()[0].vertices[:, 1].max() for area in blocks.collections
    }
    assert tops == {"used": 5, "cached": 5, "free": 10}
    assert [line.get_label() for line in queues.lines] == ["running"]
    assert list(queues.lines[0].get_ydata()) == [1, 2, 1, 1]  # the last step lasts a step
    assert list(queues.lines[0].get_xdata()) == [0, 1, 2, 3]
    assert waste.lines[0].get_ydata()[0] == pytest.approx(100 * 3 / 12)
    assert (waste.get_ylabel(), queues.get_xlabel()) == ("empty slots in\nused blocks, %", "step")


def test_only_what_was_recorded_has_a_panel(tmp_path):
    series = {name: values for name, values in a_run().items() if name in ("step", "used", "free")}
    path = tmp_path / "usage.png"
    figure = usage_over_time(series | {"cached": [0, 0, 0]}, path=path)
    assert len(figure.axes) == 1
    assert path.read_bytes().startswith(b"\x89PNG")


def test_queues_differ_in_colour_and_in_line():
    series = a_run() | {"waiting": [0, 1, 2], "swapped": [0, 0, 1]}
    lines = usage_over_time(series).axes[2].lines
    assert [line.get_label() for line in lines] == ["running", "waiting", "swapped"]
    assert len({line.get_linestyle() for line in lines}) == 3
    assert len({line.get_color() for line in lines}) == 3


def test_what_is_zero_throughout_is_not_drawn():
    series = a_run() | {"cached": [0, 0, 0], "waiting": [0, 1, 0], "swapped": [0, 0, 0]}
    blocks, _, queues = usage_over_time(series).axes
    assert [area.get_label() for area in blocks.collections] == ["used", "free"]
    for axes, names in ((blocks, ["free", "used"]), (queues, ["running", "waiting"])):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    idle = a_run() | {"running": [0, 0, 0]}
    assert len(usage_over_time(idle).axes) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": []}, "lists of one length, at least 1; got .*'step': 0"),
        ({"used": [1]}, "one length, at least 1; got .*'used': 1"),
        ({"evicted": [1, 2, 3]}, "got .*evicted"),
    ],
)
def test_series_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        usage_over_time(a_run() | change)


def test_missing_and_empty_series_are_refused():
    with pytest.raises(ValueError, match="series must have cached, free, step, used"):
        usage_over_time({"step": [0], "used": [1]})
    empty = {name: [] for name in ("step", "used", "cached", "free")}
    with pytest.raises(ValueError, match="at least 1"):
        usage_over_time(empty)


ROWS = [
    {"block_size": 16, "closed form": 0.004, "replayed": 0.006},
    {"block_size": 1, "closed form": 0.0, "replayed": None},
    {"block_size": 256, "closed form": 0.061, "replayed": 0.07},
]


def test_waste_is_drawn_over_rising_block_sizes(tmp_path):
    path = tmp_path / "waste.png"
    figure = waste_against_block_size(ROWS, recommended=16, title="a trace", path=path)
    (axes,) = figure.axes
    closed_form, replayed, recommended = axes.lines
    assert list(closed_form.get_xdata()) == [1, 16, 256]
    assert list(closed_form.get_ydata()) == pytest.approx([0, 0.4, 6.1])
    assert list(replayed.get_xdata()) == [16, 256]  # None: not measured
    assert list(recommended.get_xdata()) == [16, 16]
    assert closed_form.get_marker() != replayed.get_marker()
    assert closed_form.get_linestyle() != replayed.get_linestyle()
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "16", "256"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["closed form", "replayed", "recommended: 16"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "block size, tokens",
        "slots without a token, %",
    )
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("hits", [0, 40, 100])
def test_equal_policies_stay_off_the_frame_and_tell_apart(hits):
    row = {"optimum": hits, "lru": hits, "fifo": hits}
    rows = [{"pool_tokens": size, **row} for size in (256, 512)]
    (axes,) = hits_against_pool_size(rows, prompt_tokens=100).axes
    assert axes.get_ylim() == (0, pytest.approx(1.07 * hits or 1))
    for kind in ("marker", "markersize", "linestyle", "linewidth", "color"):
        assert len({getattr(line, f"get_{kind}")() for line in axes.lines}) == 3
    assert {line.get_markerfacecolor() for line in axes.lines} == {"none"}


def test_a_curve_that_was_never_measured_is_left_out():
    rows = [{"block_size": 8, "missed hits": None, "closed form": 0.1}]
    (axes,) = waste_against_block_size(rows, ylabel="share, %").axes
    assert [line.get_label() for line in axes.lines] == ["closed form"]
    assert axes.get_ylabel() == "share, %"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"at least one curve; got \[\]"),
        ([{"block_size": 16}], "at least one curve"),
        ([{"block_size": 16, "replayed": None}], "at least one curve"),
        ([{"waste": 0.1}], "with block_size"),
        ([{"block_size": 16, "waste": 12.0}], "waste of block size 16 is 12.0; it must be 0..1"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        waste_against_block_size(rows)


def test_points_lie_under_the_roof_at_their_intensity_and_rate(tmp_path):
    path = tmp_path / "roofline.png"
    figure = roofline(
        {"decode": (4e9, 1e9, 1e-3), "prefill": (1e12, 1e9, 1.25e-3)},
        bandwidth=4e12,
        flops=1e15,
        title="a machine",
        path=path,
    )
    (axes,) = figure.axes
    roof, _, decode, prefill = axes.lines
    x, y = np.array(roof.get_xdata()), np.array(roof.get_ydata())
    np.testing.assert_allclose(y, np.minimum(4e12 * x, 1e15))
    assert x[1] == 250  # the ridge
    assert (decode.get_xdata()[0], decode.get_ydata()[0]) == (4, 4e12)
    assert (prefill.get_xdata()[0], prefill.get_ydata()[0]) == (1000, 8e14)
    assert decode.get_marker() != prefill.get_marker()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["roof: 4 TB/s, 1 Pflop/s", "decode: 25 %", "prefill: 80 %"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("flops per byte", "flop/s")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_points_on_one_spot_differ_by_phase_and_by_series():
    names = [
        f"{phase}, {way}" for phase in ("decode", "prefill") for way in ("dense", "paged", "x")
    ]
    (axes,) = roofline(dict.fromkeys(names, (4e9, 1e9, 1e-2)), bandwidth=4e12, flops=1e15).axes
    points = axes.lines[2:]
    assert len({point.get_marker() for point in points}) == 6
    for decode, prefill in zip(points[:3], points[3:], strict=True):
        assert decode.get_markeredgecolor() == prefill.get_markeredgecolor()
    for phase in (points[:3], points[3:]):
        assert len({point.get_markeredgecolor() for point in phase}) == 3
        assert len({point.get_markersize() for point in phase}) == 3


@pytest.mark.parametrize(
    ("points", "bandwidth", "message"),
    [
        ({}, 1e12, "points is empty"),
        ({"decode": (1e9, 1e9, 0.0)}, 1e12, "decode must hold numbers above 0"),
        ({"decode": (1e9, 1e9, 1e-3)}, 0, "bandwidth and flops must hold numbers above 0"),
    ],
)
def test_points_without_a_place_are_refused(points, bandwidth, message):
    with pytest.raises(ValueError, match=message):
        roofline(points, bandwidth=bandwidth, flops=1e15)
