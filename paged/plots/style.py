"""What all pictures share: colours, a second channel beside them, and the way to a file."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE, CACHED, SHARED = -1, -2, -3  # what a frame of `block_map` says of a block without one owner

# Okabe and Ito, https://jfly.uni-koeln.de/color/
OWNER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STATE_COLOURS = {SHARED: "#000000", CACHED: "#DDDDDD", FREE: "#FFFFFF"}
DARK = (STATE_COLOURS[SHARED], OWNER_COLOURS[0])  # words on these are white
STATE_LABELS = {
    SHARED: "shared by several sequences",
    CACHED: "cached, no owner",
    FREE: "free",
}
EDGE = "#888888"
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
SIZES = (13, 10.5, 8, 6, 4.5, 3)  # of hollow markers: those on one spot lie inside each other
HEADROOM = 1.07  # upper limit over the highest point, which stays off the frame

FilePath = str | PathLike[str]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, whose parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def curve_style(position: int) -> dict[str, Any]:
    """Of the curve at that position: all but its colour. Equal curves show one inside the other."""
    size = SIZES[position % len(SIZES)]
    return {
        "linestyle": LINES[position % len(LINES)],
        "linewidth": size / 4,
        "marker": MARKERS[position % len(MARKERS)],
        "markersize": size,
        "markerfacecolor": "none",
    }


def saved(figure: Figure, path: FilePath | None) -> Figure:
    """The figure, written to `path` if there is one; its ending names the format."""
    if path is not None:
        figure.savefig(path)
    return figure
