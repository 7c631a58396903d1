"""The pictures of `serving`: gains of pages against the budget, and where the memory goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.charts import new_figure, series_style
from bench.report import Result
from bench.serving_table import (
    GAIN,
    KINDS,
    PER_STEP,
    WITH_TOKENS,
    by_place,
    comparable,
    gain,
    telling_budget,
    ways,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMED_USE = (1.3, 1.5)
ASIDE = 0.12  # of a doubling of the budget
SHADES = {
    "tokens": ("#0072B2", ""),
    "reserved": ("#56B4E9", "///"),
    "internal": ("#E69F00", "..."),
    "external": ("#FFFFFF", "xx"),
}
MEANINGS = {
    "tokens": "carries a token",
    "reserved": "reserved for a later token",
    "internal": "internal waste: never used",
    "external": "external waste: free, but the next request does not fit",
}


def draw(result: Result, path: Path) -> None:
    """The gains, in `path`, and the memory, in a second file beside it."""
    draw_gains(result, path)
    draw_memory(result, path.with_stem(f"{path.stem}-memory"))


def draw_gains(result: Result, path: Path) -> None:
    """For each load, pages over each other way: tokens per step above, memory in use below.

    A way that aborts requests does other work and has no line.
    """
    loads = result["loads"]
    figure = new_figure(result, 3.1 * len(loads) + 0.6, 6.8)
    rows = figure.subplots(2, len(loads), sharex="col", sharey="row", squeeze=False)
    for load, above, below in zip(loads, *rows, strict=True):
        _gain_lines(above, result, load, PER_STEP)
        _gain_lines(below, result, load, WITH_TOKENS)
        if load["claim"]:
            above.axhline(
                load["claim"], color="#D55E00", linewidth=1.5, label="what an article says"
            )
        below.axhspan(
            *CLAIMED_USE, color="#D55E00", alpha=0.25, linewidth=0, label="what an article says"
        )
        above.set_title(_short(load["name"]), fontsize=9)
        below.set_xlabel(f"budget, x {load['unit']:,} slots", fontsize=8)
    rows[0][0].set_ylabel("tokens per step, pages / other way", fontsize=9)
    rows[1][0].set_ylabel("memory with tokens, pages / other way", fontsize=9)
    handles, labels = rows[0][0].get_legend_handles_labels()
    hollow = f"; hollow: tokens/s, {result['model']}" if by_place(result, GAIN) else ""
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8,
        title=f"Pages over ...{hollow}", title_fontsize=9,
    )  # fmt: skip
    figure.savefig(path)


def draw_memory(result: Result, path: Path) -> None:
    """For each load, at its telling budget, a bar for each way: what the slots are used for."""
    loads = result["loads"]
    found, names = by_place(result, PER_STEP), ways(result)
    figure = new_figure(result, 3.1 * len(loads) + 0.6, 4.4)
    panels = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for axes, load in zip(panels, loads, strict=True):
        budget = telling_budget(result, load)
        bottoms = [0.0] * len(names)
        memories = [found[load["name"], budget, way]["memory"] for way in names]
        for kind in KINDS:
            heights = [100 * memory[kind] if memory else 0.0 for memory in memories]
            colour, hatch = SHADES[kind]
            axes.bar(
                range(len(names)), heights, 0.75, bottoms, color=colour, hatch=hatch,
                edgecolor="#333333", linewidth=0.5, label=MEANINGS[kind],
            )  # fmt: skip
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for place, memory in enumerate(memories):
            if memory is None:
                axes.annotate(
                    "memory never short", (place, 2), rotation=90, ha="center", fontsize=8
                )
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_title(f"{_short(load['name'])}, {budget} x {load['unit']:,}", fontsize=9)
    panels[0].set_ylabel("% of the memory, while a request waits for some", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(path)


def _gain_lines(axes: Axes, result: Result, load: dict[str, Any], wanted: str) -> None:
    found = by_place(result, wanted)
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    for number, way in enumerate(comparable(result)):
        points = [(budget, gain(found, load["name"], budget, way)) for budget in load["budgets"]]
        points = [point for point in points if point[1] is not None]
        style = series_style(number)
        del style["capsize"]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=way, **style)
        if wanted == PER_STEP:
            _model_points(axes, result, load["name"], way, style, aside=number)
    axes.set_xscale("log", base=2)
    axes.set_xticks(load["budgets"], [str(budget) for budget in load["budgets"]], fontsize=8)
    axes.grid(axis="y", which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _model_points(
    axes: Axes, result: Result, load: str, way: str, style: dict[str, Any], aside: int
) -> None:
    """Gains seen with a model, their spread as a whisker; each way a little aside of the last."""
    for place, ratio in by_place(result, GAIN).items():
        if (place[0], place[2]) == (load, way):
            axes.errorbar(
                place[1] * 2 ** (ASIDE * aside), ratio["value"],
                [[ratio["value"] - ratio["lower"]], [ratio["upper"] - ratio["value"]]],
                color=style["color"], marker=style["marker"], markerfacecolor="white",
                markersize=7, capsize=3, linestyle="none",
            )  # fmt: skip


def _short(name: str) -> str:
    """Fits above a panel."""
    return name.removeprefix("the ").split(",")[0].split(" (")[0] if len(name) > 28 else name
