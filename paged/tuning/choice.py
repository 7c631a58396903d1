"""Which block size to take: a fixed rule, and the words for it.

cost(b)  slots without a token over the life of the sequences, plus prompt tokens that blocks of b
         are expected to miss in the prefix cache: shares of the memory and of the prompts.

1. Begin at 16. Kernels read tiles of 16 keys or more, so no smaller block helps them, and a block
   of 16 carries enough tokens that its entry in the table and its bookkeeping do not matter.
2. Go up while the larger size costs at most SLACK more than 16 and no kernel that was measured is
   clearly slower with it: fewer blocks to manage, shorter tables, longer runs of memory.
3. Where 16 costs more than TOO_MUCH, go down while the next size saves at least WORTH, down to
   SMALLEST, unless host time or a measured kernel clearly gets slower than their limits.

"Clearly" means the lower end of the spread, so that a busy machine does not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timing import Ratio

BASE = 16
SMALLEST = 8  # smaller blocks: only by hand
SLACK = 0.01
TOO_MUCH = 0.10
WORTH = 0.02
HOST_LIMIT, KERNEL_LIMIT = 1.5, 1.1  # times as slow as with blocks of 16


@dataclass(frozen=True)
class Candidate:
    """What the rule looks at. Costs are shares in 0..1, times are ratios to size 16."""

    block_size: int
    cost: float
    host_time: Ratio | None = None
    kernel_time: Ratio | None = None

    @property
    def is_slow(self) -> str:
        """Why it takes too long, in words; empty when it does not."""
        if self.kernel_time is not None and self.kernel_time.lower > KERNEL_LIMIT:
            return f"attention takes {self.kernel_time.value:.2f} times as long"
        if self.host_time is not None and self.host_time.lower > HOST_LIMIT:
            return f"the host takes {self.host_time.value:.2f} times as long"
        return ""


@dataclass(frozen=True)
class Recommendation:
    """A block size and why."""

    block_size: int
    reason: str

    def __str__(self) -> str:
        return f"block size {self.block_size}: {self.reason}"


def recommend(candidates: Sequence[Candidate]) -> Recommendation:
    """Apply the rule; without size 16 among the candidates, begin at the one next to it."""
    ordered = sorted(candidates, key=lambda candidate: candidate.block_size)
    start = min(range(len(ordered)), key=lambda index: abs(ordered[index].block_size - BASE))
    base, larger = ordered[start], ordered[start + 1 :]
    smaller = [row for row in reversed(ordered[:start]) if row.block_size >= SMALLEST]
    if base.cost > TOO_MUCH:
        return _go_down(base, smaller)
    return _go_up(base, larger)


def _go_up(base: Candidate, larger: Sequence[Candidate]) -> Recommendation:
    chosen, limit = base, "no larger size was asked for"
    for row in larger:
        if row.cost > base.cost + SLACK:
            limit = f"{row.block_size} would cost {row.cost:.1%}"
            break
        if row.is_slow:
            limit = f"with {row.block_size} {row.is_slow}"
            break
        chosen = row
    if chosen is base:
        return Recommendation(
            base.block_size, f"costs {base.cost:.1%} in empty slots and missed hits; {limit}"
        )
    host = "" if chosen.host_time is None else f" ({chosen.host_time} of its host time)"
    return Recommendation(
        chosen.block_size,
        f"costs {chosen.cost:.1%} in empty slots and missed hits, at most {100 * SLACK:g} point more"
        f" than {base.block_size} does ({base.cost:.1%}), with fewer blocks to manage{host}; {limit}",
    )


def _go_down(base: Candidate, smaller: Sequence[Candidate]) -> Recommendation:
    chosen, limit = base, f"smaller sizes than {SMALLEST} are not proposed"
    for row in smaller:
        if chosen.cost <= TOO_MUCH:
            limit = f"that is below {TOO_MUCH:.0%}"
            break
        if row.is_slow:
            limit = f"with {row.block_size} {row.is_slow}"
            break
        if chosen.cost - row.cost < WORTH:
            limit = f"{row.block_size} would save only {chosen.cost - row.cost:.1%}"
            break
        chosen = row
    if chosen is base:
        return Recommendation(
            base.block_size,
            f"costs {base.cost:.1%} in empty slots and missed hits, which is much; {limit}",
        )
    return Recommendation(
        chosen.block_size,
        f"sequences are short: blocks of {base.block_size} cost {base.cost:.1%} in empty slots and"
        f" missed hits, these {chosen.cost:.1%}; {limit}",
    )
