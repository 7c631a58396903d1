"""A record of `gpu` as text and as a picture. Both are made from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu_rivals import OURS, SDPA

Record = dict[str, Any]
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")


def table(record: Record) -> str:
    """What was run where, what was found wrong, and the times."""
    failed = [check for check in record["checks"] if check["error"] is not None]
    lines = [
        f"{record['gpu']}, driver {record['driver']}, "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        + f", commit {record['commit']}, {record['time']}",
        f"{len(record['checks']) - len(failed)} of {len(record['checks'])} checks passed",
    ]
    lines += [f"FAILED {check['name']}: {check['error']}" for check in failed]
    rates = record["rates"]
    if rates is None:
        return "\n".join([*lines, "nothing was timed"])
    lines += [
        f"measured here: read {rates['read'] / 1e12:.3f} TB/s, copy {rates['copy'] / 1e12:.3f} TB/s "
        f"(read + write), bfloat16 matrix product {rates['matmul'] / 1e12:.0f} TFLOP/s",
        "",
        f"{'':8} {'case':16} {'provider':18} {'ms, quartiles':>21} {'TB/s':>6} {'% read':>6} "
        f"{'% copy':>6} {'TFLOP/s':>8} {'x SDPA':>6} {'host us':>8} {'error':>8}",
    ]
    for row in record["rows"]:
        start = f"{row['phase']:8} {row['case']:16} {row['provider']:18}"
        if row["skipped"] is not None:
            lines.append(f"{start} not measured: {row['skipped']}")
            continue
        spread = "/".join(
            f"{row[name]:.4f}" for name in ("lower_quartile", "median", "upper_quartile")
        )
        moved, computed = speeds(row)
        ratio = times_sdpa(record, row)
        lines.append(
            f"{start} {spread:>21} {moved / 1e12:6.3f} {100 * moved / rates['read']:6.1f} "
            f"{100 * moved / rates['copy']:6.1f} {computed / 1e12:8.1f} "
            f"{'-' if ratio is None else f'{ratio:.2f}':>6} {row['host_us']:8.1f} "
            f"{row['max_error']:8.1e}{'' if row['graph'] else '  launched from Python'}"
        )
    return "\n".join(lines)


def speeds(row: Record) -> tuple[float, float]:
    """Bytes and flops per second, by the median."""
    seconds = row["median"] / 1e3
    return row["bytes"] / seconds, row["flops"] / seconds


def times_sdpa(record: Record, row: Record) -> float | None:
    """Time over that of SDPA on contiguous K and V."""
    for other in record["rows"]:
        same = (other["phase"], other["case"]) == (row["phase"], row["case"])
        if same and other["provider"] == SDPA and other["skipped"] is None:
            return float(row["median"] / other["median"])
    return None


def plot(record: Record, path: Path) -> None:
    """Every measured row under the roofline of the rates measured with it, as PNG."""
    from matplotlib.figure import Figure

    rates = record["rates"]
    measured = [row for row in record["rows"] if row["skipped"] is None]
    if rates is None or not measured:
        raise ValueError("the record holds no times to draw")
    providers = dict.fromkeys(row["provider"] for row in measured)
    colours = dict(zip(providers, COLOURS, strict=False))
    figure = Figure(figsize=(12, 5.5), dpi=130, layout="constrained")
    bars, roof = figure.subplots(1, 2)
    _draw_bars(bars, [row for row in measured if row["phase"] == "decode"], rates, colours)

    intensity = [row["flops"] / row["bytes"] for row in measured]
    ridge = rates["matmul"] / rates["read"]
    x = [min(*intensity, ridge) / 2, ridge, 2 * max(*intensity, ridge)]
    roof.plot(x, [min(rates["matmul"], rates["read"] * i) / 1e12 for i in x], color="black")
    for provider in providers:
        own = [row for row in measured if row["provider"] == provider]
        roof.scatter(
            [row["flops"] / row["bytes"] for row in own],
            [speeds(row)[1] / 1e12 for row in own],
            color=colours[provider],
            zorder=3 if provider == OURS else 2,
        )
    roof.set(
        xscale="log", yscale="log", xlabel="flops per byte that must move", ylabel="TFLOP/s",
        title="roofline: read bandwidth and matrix product measured here",
    )  # fmt: skip
    figure.suptitle(
        f"{record['gpu']}, torch {record['versions']['torch']}, "
        f"triton {record['versions']['triton']}, {record['time'][:10]}"
    )
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def _draw_bars(axes: Any, rows: list[Record], rates: Record, colours: dict[str, str]) -> None:
    """Share of the read bandwidth that each decode reaches; whiskers are quartiles."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    height = 0.8 / len(colours)
    for number, (provider, colour) in enumerate(colours.items()):
        own = [row for row in rows if row["provider"] == provider]
        places = [cases.index(row["case"]) + (number + 0.5) * height for row in own]
        shares = [100 * speeds(row)[0] / rates["read"] for row in own]
        axes.barh(places, shares, height, color=colour, label=provider)
        for place, share, row in zip(places, shares, own, strict=True):
            whisker = [
                share * row["median"] / row[name] for name in ("upper_quartile", "lower_quartile")
            ]
            axes.plot(whisker, [place, place], color="black", linewidth=1)
    axes.axvline(100, color="black", linestyle=":")
    axes.axvline(100 * rates["copy"] / rates["read"], color="grey", linestyle="--")
    axes.set_yticks([number + 0.4 for number in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set(xlabel="% of the read bandwidth measured here (dashed: of a copy)", title="decode")
