"""New slots for new tokens: more blocks at the end, and copies of blocks that are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .allocators import BlockAllocator, PrefixCachingBlockAllocator
from .batch import BatchBuilder
from .block_table import BlockTable
from .config import CacheConfig
from .errors import NoFreeBlocksError
from .history import History
from .retention import Retention

NOTHING: Mapping[int, int] = {}


class Growth:
    """Lengthens block tables. `wanted` is a list of (table, target): `target` slots in all.

    gpu     the pool that the blocks come from
    cache   the same pool when prefix caching is on, else None
    """

    def __init__(
        self,
        config: CacheConfig,
        gpu: BlockAllocator,
        cache: PrefixCachingBlockAllocator | None,
        retention: Retention,
        batches: BatchBuilder,
        history: History,
    ) -> None:
        self._block_size = config.block_size
        self._gpu = gpu
        self._cache = cache
        self._retention = retention
        self._batches = batches
        self._history = history

    def blocks_needed(
        self, wanted: list[tuple[BlockTable, int]], dropped: Mapping[int, int] = NOTHING
    ) -> int:
        """New blocks, copies included, for each table to have `target` slots of its own.

        dropped: references of blocks that will be gone by then.
        """
        block_size, ref_counts = self._block_size, self._gpu.ref_counts
        needed = 0
        writers: dict[int, int] = {}  # of shared blocks: the last holder writes in place
        for table, target in wanted:
            if target <= table.num_tokens:
                continue
            last = -(-target // block_size)
            needed += max(0, last - len(table.blocks))
            for block in table.blocks[table.num_tokens // block_size : last]:
                if ref_counts[block] > 1:
                    writers[block] = writers.get(block, 0) + 1
                    needed += writers[block] < ref_counts[block] - dropped.get(block, 0)
        return needed

    def reserve(
        self, wanted: list[tuple[BlockTable, int]], settling: Sequence[BlockTable] = ()
    ) -> int:
        """`blocks_needed`; NoFreeBlocksError when there are fewer.

        settling: tables that drop what is behind their window before the blocks are taken.
        """
        dropped = self._retention.droppable(settling)
        needed, available = self.blocks_needed(wanted, dropped), self._gpu.num_free
        for block, count in dropped.items():
            available += count == self._gpu.ref_counts[block]
        if needed > available:
            seq_ids = [table.seq_id for table, _ in wanted]
            raise NoFreeBlocksError(needed, available, f"for sequences {seq_ids}")
        return needed

    def grow(self, wanted: list[tuple[BlockTable, int]], needed: int) -> list[tuple[int, int]]:
        """Give each table its slots, those after its tokens its own; returns the copies to make.

        needed: `blocks_needed` of the same, which must be free.
        """
        block_size, ref_counts = self._block_size, self._gpu.ref_counts
        fresh = iter(self._gpu.allocate(needed))
        pairs = []
        for table, target in wanted:
            if target <= table.num_tokens:
                continue
            blocks, num_blocks = table.blocks, -(-target // block_size)
            for index in range(table.num_tokens // block_size, num_blocks):
                if index == len(blocks):
                    blocks.append(next(fresh))
                elif ref_counts[blocks[index]] > 1:
                    ref_counts[blocks[index]] -= 1
                    pairs.append((blocks[index], next(fresh)))
                    blocks[index] = pairs[-1][1]
                else:  # published, and trimmed into while another sequence held it as well
                    if self._cache:
                        self._cache.withdraw(blocks[index])
                    continue
                self._batches.changed(table, index)
            table.writable_until = len(blocks) * block_size
            self._history.add("append", table.seq_id, blocks[table.num_tokens // block_size :])
        return pairs
