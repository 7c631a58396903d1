"""What becomes of a sequence's blocks once their tokens are computed: published, then dropped."""

from __future__ import annotations

from collections.abc import Sequence

from .allocators import BlockAllocator, PrefixCachingBlockAllocator
from .batch import BatchBuilder
from .block_table import DROPPED, NEVER, BlockTable
from .config import CacheConfig
from .history import History
from .prefix_index import Entry


class Retention:
    """Publishes full blocks, drops those behind the sliding window, and gives runs of blocks back.

    gpu     the pool that the blocks belong to
    cache   the same pool when prefix caching is on, else None
    """

    def __init__(
        self,
        config: CacheConfig,
        gpu: BlockAllocator,
        cache: PrefixCachingBlockAllocator | None,
        batches: BatchBuilder,
        history: History,
    ) -> None:
        self._block_size = config.block_size
        self._window = config.sliding_window
        self._gpu = gpu
        self._cache = cache
        self._batches = batches
        self._history = history

    def settle(self, table: BlockTable) -> None:
        """Do all that the number of computed tokens allows: publish, then drop."""
        parent = table.parent
        if parent is not None and self._cache is not None and table.chain is not None:
            full = table.num_computed // self._block_size
            self._cache.hasher.extend(table.chain, table.seq.token_ids, full)
            if parent.is_live:
                table.parent = self._cache.publish(
                    table.chain, table.blocks, parent, table.num_published, full
                )
            else:  # what comes before is forgotten: it was another one's block, or is dropped
                table.parent = None
            table.num_published = full
        if self._window is not None:
            self._drop(table)
        self.schedule(table)

    def schedule(self, table: BlockTable) -> None:
        """Set the number of computed tokens from which `settle` has something to do."""
        work_at = NEVER
        if table.parent is not None:
            work_at = (table.num_published + 1) * self._block_size
        if self._window is not None:
            work_at = min(work_at, (table.num_dropped + 1) * self._block_size + self._window - 1)
        table.work_at = work_at

    def release(self, blocks: list[int]) -> None:
        """Free a run of a table: with caching tail first, so that a head outlives its tail."""
        self._gpu.free(blocks[::-1] if self._cache else blocks)

    def leave(self, table: BlockTable, blocks: list[int]) -> None:
        """A table gives back its blocks and leaves the GPU."""
        self._batches.forget(table)
        if self._cache is not None and table.num_dropped:
            # Without the blocks that were dropped long ago the rest could not be found: let all
            # of the chain become evictable together, its head last.
            heads = self._cache.acquire(self._chain_of(table)[: table.num_dropped])
            blocks = heads + blocks
        self.release(blocks)

    @staticmethod
    def _chain_of(table: BlockTable) -> list[Entry]:
        """The entries of a table's published blocks, first to last; none if they are forgotten."""
        chain, entry = [], table.parent
        while entry is not None and entry.parent is not None:
            chain.append(entry)
            entry = entry.parent
        return chain[::-1]

    # Prefix cache

    def unpublish(self, table: BlockTable, num_blocks: int) -> None:
        """Go back to `num_blocks` published blocks: the one behind them will be written again."""
        assert self._cache is not None
        assert table.chain is not None
        for _ in range(num_blocks, table.num_published):
            if table.parent is not None:
                table.parent = table.parent.parent
        table.num_published = min(table.num_published, num_blocks)
        table.chain.truncate(num_blocks)
        if num_blocks < len(table.blocks):
            tail = table.blocks[num_blocks]
            if tail != DROPPED and self._gpu.ref_counts[tail] == 1:
                self._cache.withdraw(tail)

    # Sliding window

    def num_droppable(self, num_computed: int) -> int:
        """Leading blocks that no query after `num_computed` tokens can see."""
        if self._window is None:
            return 0
        return max(0, num_computed - self._window + 1) // self._block_size

    def droppable(self, tables: Sequence[BlockTable]) -> dict[int, int]:
        """References that `settle` will drop when all slots of these tables are computed."""
        counts: dict[int, int] = {}
        if self._window is not None:
            for table in tables:
                last = self.num_droppable(table.num_tokens)
                for block in table.blocks[table.num_dropped : last]:
                    counts[block] = counts.get(block, 0) + 1
        return counts

    def _drop(self, table: BlockTable) -> None:
        first, last = table.num_dropped, self.num_droppable(table.num_computed)
        if last <= first:
            return
        dropped = table.blocks[first:last]
        for index in range(first, last):
            table.blocks[index] = DROPPED
            self._batches.changed(table, index)
        table.num_dropped = last
        self.release(dropped)
        self._history.add("drop", table.seq_id, dropped)
