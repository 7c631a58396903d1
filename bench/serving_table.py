"""What `serving` prints, from its JSON: for each load a line for each way."""

from __future__ import annotations

from typing import Any

from bench.records import Record, text_table
from bench.report import Result

PER_STEP = "tokens per step"
WITH_TOKENS = "memory with tokens"
SECONDS, GAIN = "seconds", "gain of pages"  # with a model
KINDS = ("tokens", "reserved", "internal", "external")
PAGES = "pages"
Place = tuple[str, int, str]  # load, budget, way


def by_place(result: Result, figure: str) -> dict[Place, Record]:
    """The records of one figure."""
    return {
        (record["load"], record["budget"], record["way"]): record
        for record in result["records"]
        if record["figure"] == figure
    }


def ways(result: Result) -> list[str]:
    """Names, pages last."""
    return list(dict.fromkeys(record["way"] for record in result["records"]))


def comparable(result: Result) -> list[str]:
    """The ways that finish what pages finish."""
    found = by_place(result, PER_STEP)
    aborting = {way for (_, _, way), record in found.items() if record["aborted"]}
    return [way for way in ways(result) if way != PAGES and way not in aborting]


def telling_budget(result: Result, load: dict[str, Any]) -> int:
    """The largest at which pages, too, are short of memory; the smallest where they never are."""
    short = by_place(result, WITH_TOKENS)
    budgets: list[int] = load["budgets"]
    return max((b for b in budgets if (load["name"], b, PAGES) in short), default=budgets[0])


def gain(found: dict[Place, Record], load: str, budget: int, way: str) -> float | None:
    """The figure with pages over that of another way; None where one of them is missing or 0."""
    pages, other = found.get((load, budget, PAGES)), found.get((load, budget, way))
    return pages["value"] / other["value"] if pages and other and other["value"] else None


def show(result: Result) -> str:
    """Per load: gains at every budget, then all counts at a telling one."""
    parts = [f"with a model: {result['model']}"]
    for load in result["loads"]:
        parts += [f"\n{_title(load)}", _gains(result, load), _details(result, load)]
        if any(record["load"] == load["name"] for record in by_place(result, SECONDS).values()):
            parts.append(_with_model(result, load))
    return "\n\n".join(parts)


def _title(load: dict[str, Any]) -> str:
    return (
        f"{load['name']}: {load['requests']:,} requests of {load['tokens']:,} tokens, the longest "
        f"{load['longest']:,}, typical {load['typical']:,}; 1 x = {load['unit']:,} slots"
    )


def _gains(result: Result, load: dict[str, Any]) -> str:
    found = by_place(result, PER_STEP)
    name, budgets = load["name"], load["budgets"]
    rows = [["pages: tokens per step"]]
    rows[0] += [f"{found[name, budget, PAGES]['value']:.2f}" for budget in budgets]
    for way in ways(result):
        if way != PAGES:
            gains = (gain(found, name, budget, way) for budget in budgets)
            rows.append([f"pages over {way}", *(_number(value) for value in gains)])
    head = ["", *(f"{budget} x" for budget in budgets)]
    return f"{text_table(head, rows)}\n(abort counts the requests that it finishes, the short ones)"


def _details(result: Result, load: dict[str, Any]) -> str:
    found, budget = by_place(result, PER_STEP), telling_budget(result, load)
    rows = []
    for way in ways(result):
        record = found[load["name"], budget, way]
        memory = record["memory"]
        shares = [f"{memory[kind]:.0%}" if memory else "-" for kind in KINDS]
        rows.append(
            [
                way,
                f"{record['sequences']:.1f}",
                *shares,
                record["preemptions"],
                f"{record['recomputed']:,}",
                f"{record['copied_bytes'] / 1e6:,.0f}",
                f"{record['aborted'] / load['requests']:.0%}",
            ]
        )
    head = ["at once", *KINDS, "preempted", "recomputed", "MB copied", "aborted"]
    return text_table([f"at {budget} x", *head], rows)


def _with_model(result: Result, load: dict[str, Any]) -> str:
    gains, rows = by_place(result, GAIN), []
    for place, record in by_place(result, SECONDS).items():
        if place[0] != load["name"]:
            continue
        ratio = gains.get(place)
        gain = [f"{ratio['value']:.2f}", _bounds(ratio)] if ratio else ["1", ""]
        rate = 1e3 * record["tokens"] / record["value"]
        rows.append([f"{place[1]} x, {place[2]}", f"{rate:.1f}", *gain])
    return text_table([f"{result['model']}", "tokens/s", "time over pages", "spread"], rows)


def _bounds(ratio: Record) -> str:
    return f"{ratio['lower']:.2f}-{ratio['upper']:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
