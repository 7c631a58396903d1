"""What a pool holds and who waits for it, over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .style import (
    CACHED,
    EDGE,
    FREE,
    LINES,
    OWNER_COLOURS,
    STATE_COLOURS,
    FilePath,
    new_figure,
    saved,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Mapping[str, Sequence[float]]

BLOCKS = {
    "used": OWNER_COLOURS[0],
    "cached": STATE_COLOURS[CACHED],
    "free": STATE_COLOURS[FREE],
}
QUEUES = ("running", "waiting", "swapped")
FRAGMENTATION = "internal_fragmentation"


def usage_over_time(
    series: Series, *, title: str | None = None, path: FilePath | None = None
) -> Figure:
    """Blocks by what they hold, the waste inside them and the queues, step by step.

    series: lists of equal length, one entry per recorded step:
        step                    the number of the step, rising
        used, cached, free      blocks: referenced; unreferenced with content; the rest. Of
                                `manager.stats().gpu`: num_used, num_cached, num_free - num_cached
        internal_fragmentation  optional: share of the slots in used blocks without a token, 0..1
        running, waiting, swapped  optional, each: sequences
    Blocks and sequences that are zero throughout are not drawn.
    Raises ValueError for a list that is missing, unknown, empty or of another length.
    """
    _check(series)
    # The last entry lasts a step, too.
    series = {name: [*values, values[-1] + (name == "step")] for name, values in series.items()}
    queues = [name for name in QUEUES if any(series.get(name, ()))]
    heights = [3.0] + [1.3] * (FRAGMENTATION in series) + [1.6] * bool(queues)
    figure = new_figure(8, 0.9 + sum(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    rest = list(panels[:, 0])
    axes = rest.pop(0)
    _stack_blocks(axes, series)
    axes.set_title(title or "")
    if FRAGMENTATION in series:
        axes = rest.pop(0)
        percent = [100 * share for share in series[FRAGMENTATION]]
        axes.step(series["step"], percent, where="post", color="black", linewidth=1)
        axes.set(ylabel="empty slots in\nused blocks, %", ylim=(0, None))
    if queues:
        axes = rest.pop(0)
        for name, line, colour in zip(QUEUES, LINES, OWNER_COLOURS, strict=False):
            if name in queues:
                axes.step(
                    series["step"],
                    series[name],
                    where="post",
                    color=colour,
                    linestyle=line,
                    label=name,
                )
        axes.set(ylabel="sequences", ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.set_xlabel("step")
    axes.set_xlim(series["step"][0], series["step"][-1])
    return saved(figure, path)


def _stack_blocks(axes: Axes, series: Series) -> None:
    floor = [0.0] * len(series["step"])
    for name in [name for name in BLOCKS if any(series[name])] or BLOCKS:
        top = [low + count for low, count in zip(floor, series[name], strict=True)]
        axes.fill_between(
            series["step"],
            floor,
            top,
            step="post",
            facecolor=BLOCKS[name],
            edgecolor=EDGE,
            linewidth=0.3,
            label=name,
        )
        floor = top
    axes.set(ylabel="blocks", ylim=(0, max(floor) or 1))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )


def _check(series: Series) -> None:
    needed, known = {"step", *BLOCKS}, {"step", *BLOCKS, FRAGMENTATION, *QUEUES}
    if not needed <= set(series) <= known:
        raise ValueError(
            f"series must have {', '.join(sorted(needed))} and may have"
            f" {', '.join(sorted(known - needed))}; got {', '.join(map(str, series))}"
        )
    lengths = {name: len(values) for name, values in series.items()}
    if not lengths["step"] or len(set(lengths.values())) > 1:
        raise ValueError(f"series must hold lists of one length, at least 1; got {lengths}")
