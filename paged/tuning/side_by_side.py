"""The same requests through managers of several block sizes, in turns: waste and host time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged.config import CacheConfig
from paged.trace import Request

from .replaying import Replay
from .timing import GROUPS, Ratio, ratio

ROUND = 16  # steps that one manager runs before the next has its turn
COST = 300_000  # of the requests that are replayed: under a second a block size


@dataclass(frozen=True)
class Replayed:
    """What one block size did. host_time: of scheduler, manager and arrays, over that of the base."""

    waste: float
    host_time: Ratio | None  # None: too few steps to tell


def first_within(requests: Sequence[Request], cost: int = COST) -> list[Request]:
    """The first requests whose tokens are soon replayed: one to generate costs as much as ten."""
    taken: list[Request] = []
    left = cost
    for request in requests:
        left -= request.prompt_len + 10 * request.output_len
        if left < 0 and taken:
            break
        taken.append(request)
    return taken


def replay_side_by_side(
    requests: list[Request],
    block_sizes: Sequence[int],
    base: int,
    *,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> dict[int, Replayed]:
    """Replay the requests once per block size, with room for all of them.

    Rounds of a few steps take turns in a new order each time, so that whatever else the machine
    does hits all sizes alike; medians of their CPU times are compared. `progress` is called once
    per block size that is done.
    """
    Replay(requests[:1], with_batches=True).step()  # what is imported late is nobody's host time
    caching = requests[0].hash_ids is not None
    runs = {
        size: Replay(
            requests,
            CacheConfig(block_size=size, enable_prefix_caching=caching, hash_seed=seed),
            with_batches=True,
        )
        for size in {*block_sizes, base}
    }
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    order, going = random.Random(seed), list(runs)
    while going:
        for size in order.sample(going, len(going)):
            run, before = runs[size], runs[size].host_seconds
            steps = 0
            while steps < ROUND and run.unfinished:
                run.step()
                steps += 1
            seconds[size].append((run.host_seconds - before) / steps)
            if not run.unfinished:
                going.remove(size)
                progress()
    rounds = min(map(len, seconds.values()))  # a hit more or less can shift the end by a step
    return {
        size: Replayed(
            runs[size].report().waste, _ratio(seconds[size][:rounds], seconds[base][:rounds])
        )
        for size in block_sizes
    }


def _ratio(subject: list[float], baseline: list[float]) -> Ratio | None:
    """None where runs are too short for a spread: a single noisy value would decide."""
    return ratio(subject, baseline) if len(subject) >= GROUPS else None
