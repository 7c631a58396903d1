"""The picture of `attention`: time over that of dense attention, a panel for each sweep."""

from __future__ import annotations

from pathlib import Path

from bench.charts import new_figure, plain_numbers, series_style
from bench.report import Result

UNORDERED = ("heads", "dtype", "phase")  # sweeps whose places are not joined by lines


def draw(result: Result, path: Path) -> None:
    """Each provider's ratio at each place of each sweep, its spread as a whisker, dense at 1."""
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    providers = list(dict.fromkeys(record["provider"] for record in ratios))
    figure = new_figure(result, 12, 7)
    panels = figure.subplots(2, 3, sharey=True).flat
    for axes, (sweep, places) in zip(panels, result["sweeps"].items(), strict=True):
        positions = {case: x for x, case in enumerate(places.values())}
        axes.axhline(1, color="black", linewidth=1.5, zorder=1, label="dense")
        for number, provider in enumerate(providers):
            own = [r for r in ratios if r["provider"] == provider and r["case"] in positions]
            own.sort(key=lambda record: positions[record["case"]])
            style = series_style(number)
            if sweep in UNORDERED:
                style["linestyle"] = "none"
            shift = 0.09 * (number - (len(providers) - 1) / 2)
            axes.errorbar(
                [positions[r["case"]] + shift for r in own],
                [r["value"] for r in own],
                [[r["value"] - r["lower"] for r in own], [r["upper"] - r["value"] for r in own]],
                label=provider,
                **style,
            )
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_xticks(range(len(places)), list(places), fontsize=7.5)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_title(sweep, fontsize=10)
        axes.grid(axis="y", which="major", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
    base = next(iter(result["sweeps"]["phase"].values()))
    figure.supylabel("time over dense attention (less is faster)", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8,
        title=f"around {base}: one thing varied at a time", frameon=False,
    )  # fmt: skip
    figure.savefig(path)
