"""What one step is to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .movements import Pairs
from .sequence import SequenceLike


@dataclass(slots=True)
class SchedulerOutput:
    """One row per sequence, the movements that come first, and who had to give way.

    seqs          the sequences of the batch
    query_lens    tokens that each computes; 0 for one that reads the last row of the sequence
                  listed before it, whose prompt it shares
    context_lens  tokens that each has in the cache already
    reaches_end   whether the last of its tokens is among them: a next one is to be sampled
    swap_out      (GPU block, CPU block), to be moved first
    swap_in       (CPU block, GPU block), second
    copies        (source, destination), both GPU blocks, third
    preempted     request_id -> "swap" or "recompute": groups that lost their GPU blocks
    rejected      request_id -> why the group can never run; it has left the scheduler
    """

    seqs: list[SequenceLike] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    reaches_end: list[bool] = field(default_factory=list)
    swap_out: Pairs = field(default_factory=list)
    swap_in: Pairs = field(default_factory=list)
    copies: Pairs = field(default_factory=list)
    preempted: dict[Any, str] = field(default_factory=dict)
    rejected: dict[Any, str] = field(default_factory=dict)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.query_lens)
