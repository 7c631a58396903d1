"""One sequence's blocks given to another one as well: all of them, or a leading part."""

from __future__ import annotations

from typing import Any

from .allocators import BlockAllocator, PrefixCachingBlockAllocator
from .block_table import BlockTable
from .errors import NoFreeBlocksError
from .history import History
from .retention import Retention
from .sequence import SequenceLike


class Sharing:
    """Makes the table of a sequence from that of another.

    gpu     the pool that the blocks belong to
    cache   the same pool when prefix caching is on, else None
    tables  those of all sequences on the GPU, by `seq_id`
    """

    def __init__(
        self,
        block_size: int,
        gpu: BlockAllocator,
        cache: PrefixCachingBlockAllocator | None,
        retention: Retention,
        tables: dict[Any, BlockTable],
        history: History,
    ) -> None:
        self._block_size = block_size
        self._gpu = gpu
        self._cache = cache
        self._retention = retention
        self._tables = tables
        self._history = history

    def share(self, table: BlockTable, child: SequenceLike) -> None:
        """Every block with tokens, the partial tail included, for a child with equal tokens."""
        twin = table.fork(child, -(-table.num_tokens // self._block_size))
        if self._cache and table.chain:
            twin.chain = table.chain.copy()
            self._cache.hasher.keep(child, twin.chain)
        table.writable_until = table.quiet_until = 0
        self._add(twin)

    def branch(self, table: BlockTable, child: SequenceLike, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens, and new ones for the rest of the child."""
        parent, block_size = table.seq, self._block_size
        if num_tokens % block_size:
            raise ValueError(
                f"num_tokens is {num_tokens}; it must be a multiple of the block size {block_size}"
            )
        most = min(table.num_tokens, len(child))
        if num_tokens > most:
            raise ValueError(
                f"num_tokens is {num_tokens}; parent {parent.seq_id!r} has slots for "
                f"{table.num_tokens} tokens, child {child.seq_id!r} has {len(child)}"
            )
        if list(child.token_ids[:num_tokens]) != list(parent.token_ids[:num_tokens]):
            raise ValueError(
                f"num_tokens is {num_tokens}; parent {parent.seq_id!r} and child "
                f"{child.seq_id!r} differ before that"
            )
        num_shared = num_tokens // block_size
        num_computed = min(table.num_computed, num_tokens)
        num_dropped = min(table.num_dropped, num_shared)
        if num_dropped > self._retention.num_droppable(num_computed):
            raise ValueError(
                f"num_tokens is {num_tokens}; child {child.seq_id!r} would need a block that "
                f"parent {parent.seq_id!r} dropped behind its window"
            )
        num_new = -(-len(child) // block_size) - num_shared
        if num_new > self._gpu.num_free:
            raise NoFreeBlocksError(num_new, self._gpu.num_free, f"for sequence {child.seq_id!r}")

        twin = BlockTable(child, table.blocks[:num_shared], len(child))
        twin.num_computed = num_computed
        twin.num_dropped = num_dropped
        twin.num_cached = min(table.num_cached, num_tokens)
        twin.num_published = min(table.num_published, num_shared)
        if self._cache and table.chain:
            twin.chain = self._cache.hasher.chain_of(child)
            twin.parent = table.parent
            for _ in range(twin.num_published, table.num_published):
                if twin.parent is not None:
                    twin.parent = twin.parent.parent
        self._retention.schedule(twin)
        self._add(twin)
        twin.blocks += self._gpu.allocate(num_new)
        twin.writable_until = len(twin.blocks) * block_size

    def _add(self, twin: BlockTable) -> None:
        ref_counts = self._gpu.ref_counts
        for block in twin.held():
            ref_counts[block] += 1
        self._tables[twin.seq_id] = twin
        self._history.add("fork", twin.seq_id, twin.blocks)
