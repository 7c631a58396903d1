"""Times of things that run in turns, and how far a ratio of them can be trusted."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paged.config import check_threads

GROUPS = 5


@dataclass(frozen=True)
class Ratio:
    """Time of one thing over that of another. The spread is that of groups of rounds."""

    value: float
    lower: float
    upper: float
    rounds: int

    def __str__(self) -> str:
        spread = f" ({self.lower:.2f}-{self.upper:.2f})" if self.lower < self.upper else ""
        return f"{self.value:.2f}{spread}"


def lower_quartile(values: Sequence[float]) -> float:
    """One of the values: the least of up to four, the second of five, ..."""
    return sorted(values)[(len(values) - 1) // 4]


def ratio(
    subject: Sequence[float],
    baseline: Sequence[float],
    middle: Callable[[Sequence[float]], float] = median,
) -> Ratio:
    """Of two series that were measured in turns, round by round.

    value: the `middle` of one over that of the other. lower, upper: the least and the most of the
    same ratio in GROUPS groups of consecutive rounds. ValueError for fewer rounds than groups.
    """
    rounds = len(subject)
    if rounds != len(baseline) or rounds < GROUPS:
        raise ValueError(f"want at least {GROUPS} rounds of both, got {rounds}, {len(baseline)}")
    value = middle(subject) / middle(baseline)
    bounds = [rounds * group // GROUPS for group in range(GROUPS + 1)]
    groups = [slice(*pair) for pair in pairwise(bounds)]
    ratios = [middle(subject[group]) / middle(baseline[group]) for group in groups]
    return Ratio(value, min(value, *ratios), max(value, *ratios), rounds)


def check_timing(seconds: float, threads: int) -> None:
    """Raise TypeError or ValueError unless things can be timed for so long, on so many threads."""
    check_threads(threads)
    wanted = "a finite number >= 0"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"seconds is {seconds!r}; it must be {wanted}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; it must be {wanted}")


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.process_time,
    least_rounds: int = 3 * GROUPS,
    progress: Callable[[int], object] = lambda rounds: None,
) -> dict[str, list[float]]:
    """Seconds of each call, by name. In each round every call runs once, in a new order.

    clock: the CPU time of this process, which others disturb less than time on the wall.
    """
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < least_rounds or time.perf_counter() < end:
        rounds += 1
        for name in order.sample(list(calls), len(calls)):
            start = clock()
            calls[name]()
            times[name].append(clock() - start)
        progress(rounds)
    return times
