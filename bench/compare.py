"""Two results of one benchmark, record by record: does the second still say what the first says?

ratio  off when the gap between the two spreads [lower, upper] is wider than `slack`.
exact  off when the values differ by more than their `tolerance`; compared only between equal
       versions of what the result names under `exact_for`.
time   shown, and marked when the quartiles do not overlap; never off.
A ratio or exact figure that the second lacks, or has in another unit, is off, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.records import BenchError, Record, text_table
from bench.report import Result, read_result, where

SLACK = 1.25  # between two runs of the same code, beyond what each saw as its own spread


@dataclass(frozen=True)
class Verdict:
    """One record of both results."""

    name: str
    kind: str
    first: Record
    second: Record | None
    verdict: str  # same, differs, off, missing, other versions

    @property
    def is_off(self) -> bool:
        return self.verdict in ("off", "missing")


def compare(first: Result, second: Result, slack: float = SLACK) -> list[Verdict]:
    """A verdict for each record of `first`. BenchError when they are not of one benchmark."""
    if first["benchmark"] != second["benchmark"]:
        raise BenchError(
            f"these are different benchmarks: {first['benchmark']} and {second['benchmark']}"
        )
    versions = [
        [result["versions"].get(name) for name in first.get("exact_for", [])]
        for result in (first, second)
    ]
    known = {record["name"]: record for record in second["records"]}
    if known.keys().isdisjoint(record["name"] for record in first["records"]):
        raise BenchError(
            f"these two of {first['benchmark']} have no record in common, as a quick run and a full"
            " one: nothing can be compared"
        )
    verdicts = []
    for a in first["records"]:
        b = known.get(a["name"])
        if b is None:
            verdict = "missing" if a["kind"] in ("ratio", "exact") else "differs"
        elif (a["kind"], a["unit"]) != (b["kind"], b["unit"]):
            verdict = "off"
        elif a["kind"] == "exact":
            verdict = _exact(a, b) if versions[0] == versions[1] else "other versions"
        else:
            allowed = slack if a["kind"] == "ratio" else 1.0
            apart = max(a["lower"], b["lower"]) > allowed * min(a["upper"], b["upper"])
            verdict = ("off" if a["kind"] == "ratio" else "differs") if apart else "same"
        verdicts.append(Verdict(a["name"], a["kind"], a, b, verdict))
    return verdicts


def _exact(a: Record, b: Record) -> str:
    allowed = a.get("tolerance", 0.0) * max(abs(a["value"]), abs(b["value"]))
    return "same" if abs(a["value"] - b["value"]) <= allowed else "off"


def notes(first: Result, second: Result) -> list[str]:
    """What else is different between the two."""
    lines = []
    if first["machine"]["cpu"] != second["machine"]["cpu"]:
        lines.append(f"machines: {where(first)} | {where(second)}")
    for part in ("versions", "options"):
        both = {**first[part], **second[part]}
        for name in both:
            a, b = first[part].get(name), second[part].get(name)
            if a != b:
                lines.append(f"{part}: {name} {a} | {b}")
    new = {r["name"] for r in second["records"]} - {r["name"] for r in first["records"]}
    return lines + [f"new: {name}" for name in sorted(new)]


def table(verdicts: list[Verdict]) -> str:
    """A line for each record: both values, their ratio, the verdict."""
    rows = []
    for v in verdicts:
        cells = [_cell(v.first), "-", "-"]
        if v.second is not None:
            change = f"{v.second['value'] / v.first['value']:.3f}" if v.first["value"] else "-"
            cells = [_cell(v.first), _cell(v.second), change]
        rows.append([v.name, v.kind, *cells, v.verdict])
    return text_table(["record", "kind", "A (lower-upper)", "B (lower-upper)", "B/A", ""], rows)


def _cell(record: Record) -> str:
    value = f"{record['value']:.4g} {record['unit']}"
    if record["kind"] == "exact":
        return value
    return f"{value} ({record['lower']:.3g}-{record['upper']:.3g})"


def compare_paths(first: Path, second: Path, slack: float) -> bool:
    """Compare two files, or the files that two folders have in common; print.

    Returns whether nothing is off.
    """
    pairs = [(first, second)]
    if first.is_dir() and second.is_dir():
        names = [{path.name for path in folder.glob("*.json")} for folder in (first, second)]
        if not names[0] & names[1]:
            raise BenchError(f"{first} and {second} have no results of the same name")
        for folder, own in zip(
            (first, second), (names[0] - names[1], names[1] - names[0]), strict=True
        ):
            print(*(f"only in {folder}: {name}\n" for name in sorted(own)), sep="", end="")
        pairs = [(first / name, second / name) for name in sorted(names[0] & names[1])]
    num_off = 0
    for a, b in pairs:
        results = read_result(a), read_result(b)
        verdicts = compare(*results, slack)
        off = [v for v in verdicts if v.is_off]
        num_off += len(off)
        print(f"A {a}\nB {b}", *notes(*results), table(verdicts), sep="\n")
        print(f"{len(off)} of {len(verdicts)} records are off", *(v.name for v in off), sep="\n  ")
        print()
    return num_off == 0
