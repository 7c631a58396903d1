"""What a benchmark measures, as plain records, and how times become figures.

A record has `name` (says all sizes), `kind`, `unit`, `value`, `lower`, `upper`, `repeats`, and
whatever else its benchmark's table and picture want.

time, rate  value: the median; lower and upper: the quartiles.
ratio       of two series measured in turns in one process. value: the lower quartile of one over
            that of the other; lower and upper: the least and the most of the same ratio in
            GROUPS groups of consecutive rounds.
exact       the same in every run, within a relative `tolerance`.
"""

from __future__ import annotations

import math
import random
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from paged.tuning import timing

Record = dict[str, Any]
GROUPS = timing.GROUPS
KINDS = ("time", "rate", "ratio", "exact")

# Prepares a round and gives what to time of it, round after round; `itertools.repeat(call)`
# where there is nothing to prepare.
Work = Iterator[Callable[[], object]]


class BenchError(Exception):
    """What a user can put right; shown in one line."""


class WrongResultError(BenchError):
    """What was to be timed does not compute what it should."""


class NotMeasuredError(BenchError):
    """This machine lacks what the benchmark measures."""


def time_record(name: str, times: Sequence[float], *, unit: str = "ms", **more: Any) -> Record:
    """Median and quartiles of times in `unit`."""
    return _spread(name, "time", unit, times) | more


def rate_record(
    name: str, milliseconds: Sequence[float], items: int, unit: str = "M/s", **more: Any
) -> Record:
    """The same times as millions of items per second."""
    return _spread(name, "rate", unit, [items / t / 1e3 for t in milliseconds]) | more


def ratio_record(
    name: str, subject: Sequence[float], baseline: Sequence[float], unit: str, **more: Any
) -> Record:
    """Time of `subject` over that of `baseline`, round by round in turns; unit: "x dense"."""
    found = timing.ratio(subject, baseline, middle=timing.lower_quartile)
    spread = {"lower": found.lower, "upper": found.upper, "repeats": found.rounds}
    return {"name": name, "kind": "ratio", "unit": unit, "value": found.value, **spread, **more}


def exact_record(
    name: str, value: float, unit: str, *, tolerance: float = 0.0, **more: Any
) -> Record:
    """A figure that does not depend on the clock."""
    record = {"name": name, "kind": "exact", "unit": unit, "value": value, "lower": value}
    return record | {"upper": value, "repeats": 1, "tolerance": tolerance, **more}


def time_in_turns(
    works: Mapping[str, Work],
    *,
    rounds: int,
    seconds: float = 0.0,
    seed: int = 0,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Milliseconds of each work's calls, by name, for that many rounds and seconds at least.

    In each round every work has one call, in a new order; a first round is not counted.
    clock: the CPU time of this process, which other processes disturb less than time on the wall.
    """
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        next(work)()
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        done += 1
        for name in order.sample(list(works), len(works)):
            call = next(works[name])
            start = clock()
            call()
            times[name].append(1e3 * (clock() - start))
    return times


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:{widths[0]}}", *right]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def spread_text(record: Record) -> str:
    """`lower value upper`, each with three digits."""
    return " ".join(f"{record[name]:.3g}" for name in ("lower", "value", "upper"))


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type."""

    def integer(text: str) -> int:
        if not (text.isdecimal() and int(text) >= minimum):
            raise ArgumentTypeError(f"must be an integer of at least {minimum}, got {text!r}")
        return int(text)

    return integer


def positive(text: str) -> float:
    """An argparse type."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def existing_file(text: str) -> Path:
    """An argparse type."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def require_peers(peers: Sequence[Path] | None) -> None:
    """BenchError unless `--peers DIR TOOL` names a folder and a file."""
    if peers is None:
        return
    folder, tool = peers
    if not folder.is_dir():
        raise BenchError(f"--peers: there is no folder {folder}")
    if not tool.is_file():
        raise BenchError(f"--peers: there is no file {tool}")


def _spread(name: str, kind: str, unit: str, values: Sequence[float]) -> Record:
    lower, median, upper = quantiles(values, n=4, method="inclusive")
    record = {"name": name, "kind": kind, "unit": unit, "value": median, "lower": lower}
    return record | {"upper": upper, "repeats": len(values)}
