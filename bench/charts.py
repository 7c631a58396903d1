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

MARKERS = ("o", "s", "^", "D", "v", "P")
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


def draw_bars(axes: Axes, records: Sequence[Record], names: Sequence[str], line: str) -> None:
    """A bar for each ratio, its spread as a whisker, and a line at 1.

    Bars grow from 0, or from 1 on a logarithmic axis where ratios are of several sizes.
    """
    places = range(len(records))
    values = [record["value"] for record in records]
    wide = max(*values, 1) > 4 * min(*values, 1)
    if wide:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    start = int(wide)
    axes.barh(places, [value - start for value in values], 0.6, left=start, color=COLOURS[0])
    for place, record in zip(places, records, strict=True):
        axes.plot([record["lower"], record["upper"]], [place, place], color="black", linewidth=1.2)
        digits = 4 if record["kind"] == "exact" else 3
        axes.annotate(
            f"{record['value']:.{digits}g}", (max(record["upper"], 1), place), (4, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.axvline(1, color="black", linestyle=":", label=line)
    axes.set_yticks(list(places), list(names), fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.figure.legend(loc="outside upper right", fontsize=8, frameon=False)


def bar_chart(result: Result, path: Path, records: Sequence[Record], title: str, line: str) -> None:
    """A picture of nothing but `draw_bars`."""
    figure = new_figure(result, 8, 1.6 + 0.3 * len(records))
    axes = figure.add_subplot()
    draw_bars(axes, records, [record["name"] for record in records], line)
    axes.set_title(title, fontsize=10)
    figure.savefig(path)
