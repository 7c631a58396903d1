"""What is served: the rows of the benchmark, and the budgets at which each is served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

from bench.records import BenchError
from paged.replay_config import final_length
from paged.replay_memory import next_power_of_two
from paged.trace import BUILT_IN_SOURCE, Request, read_trace, sample_requests

SHORT, LONG = 128, 2048
# Gains that an article names, in tokens per second, without the budget at which it saw them.
CLAIMS = {f"{SHORT}-token texts": 1.38, f"{LONG:,}-token texts": 2.33, "mixed": 2.22}


@dataclass(frozen=True)
class Load:
    """Requests that are all there from the start, and the length that none of them passes."""

    name: str
    requests: Sequence[Request]
    longest: int
    claim: float | None = None

    def __post_init__(self) -> None:
        longest = max(map(final_length, self.requests))
        if longest > self.longest:
            raise ValueError(f"longest is {self.longest}; a request of {self.name} has {longest}")

    @cached_property
    def unit(self) -> int:
        """Slots of the smallest budget: in one piece, room for any request by any way."""
        return next_power_of_two(self.longest)

    @cached_property
    def typical(self) -> int:
        """Slots of a buffer that about half of the requests outgrow, or more."""
        return 1 << (median_low(map(final_length, self.requests)).bit_length() - 1)

    def budgets(self, seats: int) -> list[int]:
        """In units: 1, 2, 4, ... up to where all requests or all seats have one."""
        most = min(seats, len(self.requests))
        return [1 << power for power in range((most - 1).bit_length() + 1)]

    def to_dict(self) -> dict[str, Any]:
        """What the table and the pictures say of it."""
        return {
            "name": self.name,
            "requests": len(self.requests),
            "tokens": sum(map(final_length, self.requests)),
            "longest": self.longest,
            "unit": self.unit,
            "typical": self.typical,
            "claim": self.claim,
        }


def text_loads(num_requests: int, seed: int) -> list[Load]:
    """The article's rows: short texts, long ones, and as many of each in turns."""
    short = _texts(num_requests, SHORT, seed)
    long = _texts(num_requests, LONG, seed + 1)
    pairs = zip(short, long, strict=True)
    mixed = [request for pair in pairs for request in pair][:num_requests]
    rows = zip(CLAIMS.items(), (short, long, mixed), (SHORT, LONG, LONG), strict=True)
    return [Load(name, requests, longest, claim) for (name, claim), requests, longest in rows]


def trace_load(path: Path | None, num_requests: int, seed: int) -> Load:
    """The first requests of a trace; without a file, of the built-in lengths."""
    if path is None:
        name, requests = BUILT_IN_SOURCE, sample_requests(num_requests, seed=seed)
    else:
        name, requests = path.stem, read_trace(path, limit=num_requests)
    requests = [request for request in requests if request.output_len > 0]
    if not requests:
        raise BenchError(f"{name}: no request generates a token")
    return Load(name, requests, max(map(final_length, requests)))


def _texts(number: int, longest: int, seed: int) -> list[Request]:
    """Texts of at most `longest` tokens. Every length is as likely as any other, and so is every
    place in it where the prompt ends and generation begins."""
    rng = random.Random(seed)
    requests = []
    for _ in range(number):
        total = rng.randint(2, longest)
        prompt_len = rng.randint(1, total - 1)
        requests.append(Request(0.0, prompt_len, total - prompt_len))
    return requests
