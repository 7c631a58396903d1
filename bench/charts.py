"""What the pictures of the benchmarks have in common. Colours, markers and lines differ at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.records import Record
from bench.report import Result, heading
from paged.plots import OWNER_COLOURS as COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def new_figure(result: Result, width: float, height: float) -> Figure:
    """A figure that says below what was run where."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    figure.supxlabel(heading(result).replace(", torch", "\ntorch"), fontsize=7, color="#555555")
    return figure


def series_style(number: int) -> dict[str, Any]:
    """Of the line of a series: colour, marker and dashes of its own."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "markersize": 5,
        "linewidth": 1.3,
        "capsize": 2.5,
    }


def plain_numbers(axis: Axis) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_minor_formatter(NullFormatter())


def bar_chart(result: Result, path: Path, records: Sequence[Record], title: str, line: str) -> None:
    """A bar for each ratio, its spread as a whisker, and a dotted line at 1, which is `line`.

    Bars grow from 0, or from 1 on a logarithmic axis where ratios are of several sizes. The axis
    ends where the figures beside the bars have room.
    """
    figure = new_figure(result, 10, 1.9 + 0.3 * len(records))
    axes = figure.add_subplot()
    values = [record["value"] for record in records]
    start = int(max(*values, 1) > 4 * min(*values, 1))
    if start:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
        axes.use_sticky_edges = False  # the line at 1 stays off the frame
    labels = []
    for place, record in enumerate(records):
        lower, value, upper = (record[name] for name in ("lower", "value", "upper"))
        axes.barh(place, value - start, 0.6, left=start, color=COLOURS[0])
        axes.plot([lower, upper], [place, place], color="black", linewidth=1.2)
        digits = 4 if record["kind"] == "exact" else 3
        labels.append(axes.annotate(
            f"{value:.{digits}g}", (max(upper, 1), place), (4, 0),
            textcoords="offset points", va="center", fontsize=8,
        ))  # fmt: skip
    axes.axvline(1, color="black", linestyle=":")
    axes.set_yticks(range(len(records)), [record["name"] for record in records], fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(f"ratio{', log scale' * start} (1: {line})", fontsize=8)
    figure.suptitle(f"{title}\ndotted line at 1: {line}", fontsize=10)
    _make_room(figure, axes, labels)
    figure.savefig(path)


def _make_room(figure: Figure, axes: Axes, annotations: Sequence[Annotation]) -> None:
    """Move the right end of an axis out until the annotations lie inside."""
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    widest = frame.width
    for text in annotations:
        anchor = axes.transData.transform(text.xy)[0]
        letters = text.get_window_extent().x1 - anchor + 6  # pixels, whatever the axis shows
        widest = max(widest, (anchor - frame.x0) * frame.width / (frame.width - letters))
    right = axes.transData.inverted().transform((frame.x0 + widest, frame.y0))[0]
    axes.set_xlim(right=right)
