"""Whether there are blocks for a new sequence: now, later or never."""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import Enum
from typing import NamedTuple

from .allocators import BlockAllocator, PrefixCachingBlockAllocator
from .config import CacheConfig
from .prefix_index import Entry
from .sequence import SequenceLike


class AllocStatus(Enum):
    """Whether a request can be admitted: now, once others have finished, or not at all."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Plan(NamedTuple):
    """What an admission would take."""

    status: AllocStatus
    hits: list[Entry]  # cached blocks of the prompt, in order
    num_new: int  # blocks besides
    available: int  # blocks that could be taken for them


class Admission:
    """Answers for one pool; changes nothing but the digests kept on a sequence."""

    def __init__(
        self, config: CacheConfig, gpu: BlockAllocator, cache: PrefixCachingBlockAllocator | None
    ) -> None:
        self._block_size = config.block_size
        self._watermark = config.watermark
        self._gpu = gpu
        self._cache = cache

    def plan(self, seqs: list[SequenceLike], num_lookahead_slots: int = 0) -> Plan:
        """For sequences of equal tokens, which share their blocks. ValueError when they differ."""
        first = seqs[0]
        for other in seqs[1:]:
            if list(other.token_ids) != list(first.token_ids):
                raise ValueError(
                    f"sequences {first.seq_id!r} and {other.seq_id!r} of a group differ in tokens"
                )
            self.check_keys(first, other)
        full = len(first) // self._block_size
        blocks_each = -(-(len(first) + num_lookahead_slots) // self._block_size)
        # Lookahead slots are written, so each sequence needs last blocks of its own for them.
        writers = len(seqs) if num_lookahead_slots else 1
        total = full + writers * (blocks_each - full)
        hits: list[Entry] = []
        num_free = self._gpu.num_free
        if self._cache is not None:
            hits = self.hits(first)
            num_free -= self._cache.num_unreferenced(hits)
        num_new = total - len(hits)
        return Plan(self.status(total, num_new, num_free), hits, num_new, self.available(num_free))

    def status(self, total: int, num_new: int, num_free: int) -> AllocStatus:
        """Whether `num_new` of `total` blocks can be taken from `num_free`."""
        if total > self._gpu.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_new <= self.available(num_free) else AllocStatus.LATER

    def available(self, num_free: int, num_used: int | None = None) -> int:
        """What may be taken of `num_free` blocks: all when nothing runs, else the watermark stays.

        num_used: blocks that are in use then; None: as many as now.
        """
        in_use = self._gpu.num_used if num_used is None else num_used
        reserved = int(self._watermark * self._gpu.num_blocks) if in_use else 0
        return max(0, num_free - reserved)

    def room_for(
        self, total: int, hits: Sequence[Entry], freed: Set[int] = frozenset()
    ) -> AllocStatus:
        """Whether `total` blocks, `hits` among them, could be taken once `freed` are given back."""
        if total > self._gpu.num_blocks:
            return AllocStatus.NEVER
        ref_counts = self._gpu.ref_counts
        num_free = self._gpu.num_free + len(freed)
        num_free -= sum([entry.block in freed or not ref_counts[entry.block] for entry in hits])
        available = self.available(num_free, self._gpu.num_used - len(freed))
        return AllocStatus.OK if total - len(hits) <= available else AllocStatus.LATER

    def hits(self, seq: SequenceLike) -> list[Entry]:
        """Cached blocks of a sequence's tokens, in order; its last token is always computed."""
        if self._cache is None:
            return []
        chain = self._cache.hasher.chain_of(seq)
        self._cache.hasher.extend(chain, seq.token_ids, len(seq) // self._block_size)
        return self._cache.lookup(chain, max(0, len(seq) - 1) // self._block_size)

    def check_keys(self, seq: SequenceLike, other: SequenceLike) -> None:
        """Raise ValueError unless the two may share cached blocks."""
        if self._cache is not None:
            chain_of = self._cache.hasher.chain_of
            if chain_of(seq).root is not chain_of(other).root:
                raise ValueError(
                    f"salt or extra_key of sequences {seq.seq_id!r} and {other.seq_id!r} differ"
                )
