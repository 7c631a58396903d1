"""The result of `gpu` as records, as text and as a picture, all made from its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.charts import MARKERS, new_figure
from bench.gpu_rivals import OURS, SDPA
from bench.records import Record, text_table
from bench.report import Result

Row = dict[str, Any]  # a `gpu_timing.Row` as JSON has it
QUARTILES = ("lower_quartile", "median", "upper_quartile")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def measured_rows(result: Result) -> list[Row]:
    """Without those that were skipped."""
    return [row for row in result["rows"] if row["skipped"] is None]


def records_of(result: Result) -> list[Record]:
    """Times, and their ratios to SDPA and to the read bandwidth, each by the quartiles of both."""
    records = []
    for row in measured_rows(result):
        name = f"{row['phase']} {row['case']}: {row['provider']}"
        low, middle, high = (row[quartile] for quartile in QUARTILES)
        figures = [("time", name, "ms", (low, middle, high))]
        dense = _dense(result, row)
        if dense is not None and row["provider"] != SDPA:
            a, b, c = (dense[quartile] for quartile in QUARTILES)
            figures.append(
                ("ratio", f"{name} over SDPA", "x SDPA", (low / c, middle / b, high / a))
            )
        if row["phase"] == "decode" and row["provider"] == OURS:
            least = 1e3 * row["bytes"] / result["rates"]["read"]
            shares = (least / high, least / middle, least / low)
            figures.append(("ratio", f"{name} of read bandwidth", "x read", shares))
        for kind, title, unit, (lower, value, upper) in figures:
            record = {"name": title, "kind": kind, "unit": unit, "repeats": row["rounds"]}
            records.append(record | {"value": value, "lower": lower, "upper": upper})
    return records


def table(result: Result) -> str:
    """The device, what was found wrong, and the times."""
    checks, rates = result["checks"], result["rates"]
    passed = sum(check["error"] is None for check in checks)
    lines = [
        f"{result['gpu']}, driver {result['driver']}",
        f"{passed} of {len(checks)} checks passed",
    ]
    if rates is None:
        return "\n".join([*lines, "nothing was timed"])
    lines.append(
        f"measured here: read {rates['read'] / 1e12:.3f} TB/s, copy {rates['copy'] / 1e12:.3f} TB/s "
        f"(read + write), bfloat16 matrix product {rates['matmul'] / 1e12:.0f} TFLOP/s"
    )
    head = ["case", "provider", "ms: quartiles and median", "TB/s", "% read", "% copy", "TFLOP/s"]
    head += ["x SDPA", "host us", "error", ""]
    rows = []
    for row in result["rows"]:
        start = [f"{row['phase']} {row['case']}", f"{row['provider']:18}"]
        if row["skipped"] is not None:
            rows.append([*start, *[""] * 8, f"not measured: {row['skipped']}"])
            continue
        moved, computed = speeds(row)
        dense = _dense(result, row)
        rows.append(
            [
                *start,
                " ".join(f"{row[name]:.4f}" for name in QUARTILES),
                f"{moved / 1e12:.3f}",
                f"{100 * moved / rates['read']:.1f}",
                f"{100 * moved / rates['copy']:.1f}",
                f"{computed / 1e12:.1f}",
                "-" if dense is None else f"{row['median'] / dense['median']:.2f}",
                f"{row['host_us']:.1f}",
                f"{row['max_error']:.1e}",
                "" if row["graph"] else "launched from Python",
            ]
        )
    return "\n".join([*lines, "", text_table(head, rows)])


def speeds(row: Row) -> tuple[float, float]:
    """Bytes and flops per second, by the median."""
    seconds = row["median"] / 1e3
    return row["bytes"] / seconds, row["flops"] / seconds


def _dense(result: Result, row: Row) -> Row | None:
    """SDPA on contiguous K and V in the same case."""
    for other in measured_rows(result):
        same = (other["phase"], other["case"]) == (row["phase"], row["case"])
        if same and other["provider"] == SDPA:
            return other
    return None


def plot(result: Result, path: Path) -> None:
    """Every measured row under the roofline of the rates measured with it, as PNG."""
    rates, measured = result["rates"], measured_rows(result)
    providers = list(dict.fromkeys(row["provider"] for row in measured))
    figure = new_figure(result, 12, 6)
    bars, roof = figure.subplots(1, 2)
    _draw_bars(bars, [row for row in measured if row["phase"] == "decode"], rates, providers)

    intensity = [row["flops"] / row["bytes"] for row in measured]
    ridge = rates["matmul"] / rates["read"]
    x = [min(*intensity, ridge) / 2, ridge, 2 * max(*intensity, ridge)]
    roof.plot(x, [min(rates["matmul"], rates["read"] * i) / 1e12 for i in x], color="black")
    for number, provider in enumerate(providers):
        own = [row for row in measured if row["provider"] == provider]
        roof.scatter(
            [row["flops"] / row["bytes"] for row in own],
            [speeds(row)[1] / 1e12 for row in own],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            label=provider,
            zorder=3 if provider == OURS else 2,
        )
    roof.set(
        xscale="log", yscale="log", xlabel="flops per byte that must move", ylabel="TFLOP/s",
        title="roofline: read bandwidth and matrix product measured here",
    )  # fmt: skip
    roof.legend(fontsize=8)
    figure.suptitle(f"{result['gpu']}, {result['time'][:10]}", fontsize=10)
    figure.savefig(path)


def _draw_bars(axes: Any, rows: list[Row], rates: dict[str, float], providers: list[str]) -> None:
    """Share of the read bandwidth that each decode reaches; whiskers are quartiles."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    height = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        for row in (row for row in rows if row["provider"] == provider):
            place = cases.index(row["case"]) + (number + 0.5) * height
            share = 100 * speeds(row)[0] / rates["read"]
            whisker = [share * row["median"] / row[name] for name in QUARTILES[::-2]]
            axes.barh(place, share, height, color=COLOURS[number % len(COLOURS)])
            axes.plot(whisker, [place, place], color="black", linewidth=1)
            axes.annotate(
                provider, (1, place), va="center", fontsize=7, color="white" if number == 0 else "black"
            )  # fmt: skip
    axes.axvline(100, color="black", linestyle=":")
    axes.axvline(100 * rates["copy"] / rates["read"], color="grey", linestyle="--")
    axes.set_yticks([number + 0.4 for number in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set(xlabel="% of the read bandwidth measured here (dashed: of a copy)", title="decode")
