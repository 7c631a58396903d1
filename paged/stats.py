"""Counters of a manager."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .sequence import SequenceLike

if TYPE_CHECKING:
    from .block_manager import BlockSpaceManager

_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class TierStats:
    """One pool, in blocks: num_total = num_used + num_free, num_cached <= num_free."""

    num_total: int
    num_used: int  # with a reference
    num_free: int  # without
    num_cached: int  # without a reference, content still findable

    @property
    def usage(self) -> float:
        """Used share of the pool, 0..1."""
        return self.num_used / self.num_total if self.num_total else 0.0


@dataclass(frozen=True)
class CacheStats:
    """What `BlockSpaceManager.stats` returns."""

    gpu: TierStats
    cpu: TierStats
    prefix_queried_tokens: int  # tokens of admitted sequences, each sequence once
    prefix_hit_tokens: int  # of those, found in the cache
    internal_fragmentation: float  # share of the slots in used GPU blocks without a token, 0..1


class PrefixCounter:
    """Counts prefix hits at a sequence's first admission, not when it returns after preemption.

    The last 65,536 ids are remembered: long after that no preempted sequence is still away.
    """

    def __init__(self) -> None:
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._seen: OrderedDict[Any, None] = OrderedDict()

    def add(self, seqs: Iterable[SequenceLike], num_hit_tokens: int) -> None:
        for seq in seqs:
            if seq.seq_id in self._seen:
                continue
            self._seen[seq.seq_id] = None
            self.queried_tokens += len(seq)
            self.hit_tokens += num_hit_tokens
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)


def collect_stats(manager: BlockSpaceManager) -> CacheStats:
    gpu, cpu = manager.gpu, manager.cpu
    num_cached = manager.cache.num_cached if manager.cache else 0
    return CacheStats(
        gpu=TierStats(gpu.num_blocks, gpu.num_used, gpu.num_free, num_cached),
        cpu=TierStats(cpu.num_blocks, cpu.num_used, cpu.num_free, 0),
        prefix_queried_tokens=manager.prefix_counter.queried_tokens,
        prefix_hit_tokens=manager.prefix_counter.hit_tokens,
        internal_fragmentation=_internal_fragmentation(manager),
    )


def _internal_fragmentation(manager: BlockSpaceManager) -> float:
    """Only last blocks have empty slots, so the cost is per sequence and not per block.

    Metrics ask from another thread: what changes meanwhile is read once.
    """
    gpu, block_size = manager.gpu, manager.config.block_size
    num_used = gpu.num_used
    if not num_used:
        return 0.0
    filled: dict[int, int] = {}  # last block -> most tokens that a sequence has in it
    holders: dict[int, int] = {}
    for table in list(manager.tables.values()):
        num_tokens = table.num_tokens
        first = num_tokens // block_size
        for index, block in enumerate(table.blocks[first:], first):
            tokens = max(0, num_tokens - index * block_size)
            filled[block] = max(filled.get(block, 0), tokens)
            holders[block] = holders.get(block, 0) + 1
    # A block with a further holder is full there: that sequence was not trimmed into it.
    empty = sum(
        block_size - filled[block]
        for block, count in holders.items()
        if count == gpu.ref_count(block)
    )
    return empty / (num_used * block_size)
