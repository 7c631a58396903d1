"""Paged beside dense: the memory that each way of reserving holds, and the time of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import EDGE, OWNER_COLOURS, FilePath, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def memory_and_time(
    memory: Sequence[Mapping[str, Any]],
    times: Sequence[Mapping[str, Any]],
    *,
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """Two panels: slots per running sequence by scheme, and times over dense, which is the line at 1.

    memory: mappings with `scheme`, `average` (slots held per running sequence) and `use_over_life`
        (share of them that carries a token, 0..1).
    times: mappings with `name`, and `value`, `lower`, `upper` of a ratio to dense attention.
    Raises ValueError when either is empty.
    """
    if not memory or not times:
        raise ValueError("memory and times must each hold a row")
    figure = new_figure(10, 1.2 + 0.42 * max(len(memory), len(times)))
    left, right = figure.subplots(1, 2)
    _draw_memory(left, memory)
    _draw_times(right, times)
    if title:
        figure.suptitle(title)
    return saved(figure, path)


def _draw_memory(axes: Axes, memory: Sequence[Mapping[str, Any]]) -> None:
    names = [row["scheme"] for row in memory]
    used = [row["average"] * row["use_over_life"] for row in memory]
    empty = [row["average"] - carried for row, carried in zip(memory, used, strict=True)]
    axes.barh(names, used, color=OWNER_COLOURS[0], edgecolor=EDGE, label="with a token")
    axes.barh(names, empty, left=used, color="white", edgecolor=EDGE, hatch="///", label="empty")
    for row, share in enumerate(memory):
        text = f" {share['use_over_life']:.1%} used"
        axes.text(share["average"], row, text, va="center", fontsize="small")
    axes.set_xlim(0, 1.4 * max(row["average"] for row in memory))
    axes.set_xlabel("token slots per running sequence")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right", fontsize="small")


def _draw_times(axes: Axes, times: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(times):
        axes.plot([row["lower"], row["upper"]], [place, place], color="black", linewidth=1.2)
        axes.plot(row["value"], place, "o", color=OWNER_COLOURS[0], markeredgecolor="black")
    axes.axvline(1, color="black", linestyle=":", label="dense")
    axes.set_yticks(range(len(times)), [row["name"] for row in times])
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * max(1, *(row["upper"] for row in times)))
    axes.set_xlabel("time over dense attention, with its spread")
    axes.grid(color="#DDDDDD", linewidth=0.6, axis="x")
    axes.legend(frameon=False, loc="lower right", fontsize="small")
