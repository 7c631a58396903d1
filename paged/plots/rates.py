"""The roofline: how near a kernel comes to what memory and arithmetic allow.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .style import EDGE, OWNER_COLOURS, SIZES, FilePath, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = (("o", "s", "D", "^", "h", "p"), ("v", "*", "P", "x", "+", "1"))  # blunt, and pointed


def roofline(
    points: Mapping[str, tuple[float, float, float]],
    *,
    bandwidth: float,
    flops: float,
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """Named measurements under the roof of a machine, both axes logarithmic.

    points: name -> (flops, bytes, seconds) of one call: what it must compute and move at least, as
        `paged_kernels.explain` tells, and the time it took. In a name like "decode, dense" what is
        before the comma chooses blunt or pointed shapes, the rest the colour, shape and size.
    bandwidth: bytes per second that the machine reads, better measured there than promised.
    flops: operations per second at its peak.
    The legend tells the share of the roof that each point reaches; above 100 % something is wrong
    with the bounds. Raises ValueError without points or for a number that is not above 0.
    """
    if not points:
        raise ValueError("points is empty; it must map names to (flops, bytes, seconds)")
    for name, numbers in [*points.items(), ("bandwidth and flops", (bandwidth, flops))]:
        if any(not number > 0 for number in numbers):
            raise ValueError(f"{name} must hold numbers above 0, got {numbers}")
    ridge = flops / bandwidth
    intensities = [work / moved for work, moved, _ in points.values()]
    low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4

    figure = new_figure(8, 4.6)
    axes = figure.add_subplot()
    axes.plot(
        [low, ridge, high],
        [low * bandwidth, flops, flops],
        color="black",
        label=f"roof: {_rate(bandwidth)}B/s, {_rate(flops)}flop/s",
    )
    axes.plot([ridge, ridge], [0, flops], color=EDGE, linestyle=":", linewidth=1)
    phases = list(dict.fromkeys(name.partition(", ")[0] for name in points))
    series = list(dict.fromkeys(name.partition(", ")[2] or name for name in points))
    for name, (work, moved, seconds) in points.items():
        intensity, rate = work / moved, work / seconds
        share = rate / min(intensity * bandwidth, flops)
        phase, _, rest = name.partition(", ")
        family = SHAPES[phases.index(phase) % len(SHAPES)]
        place = series.index(rest or name) % len(OWNER_COLOURS)
        axes.plot(
            intensity,
            rate,
            linestyle="",
            marker=family[place],
            markeredgecolor=OWNER_COLOURS[place],
            markerfacecolor="none",  # points that lie on each other stay visible
            markeredgewidth=1.2,
            markersize=1.5 * SIZES[place],
            label=f"{name}: {100 * share:.3g} %",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), title=title or "")
    bottom = min(work / seconds for work, _, seconds in points.values())
    axes.set_ylim(min(bottom, low * bandwidth) / 2, flops * 2)
    axes.set(xlabel="flops per byte", ylabel="flop/s")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        fontsize="small",
        labelspacing=1.1,
    )
    return saved(figure, path)


def _rate(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} P"
