"""Moving sequences between the GPU pool and the CPU pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .allocators import BlockAllocator
from .block_table import BlockTable


def distinct_blocks(tables: Iterable[BlockTable], block_size: int) -> list[int]:
    """The blocks with tokens of these tables, each once, in order of first appearance."""
    blocks: dict[int, None] = {}
    for table in tables:
        blocks.update(dict.fromkeys(_with_tokens(table, block_size)))
    return list(blocks)


def move(
    tables: Sequence[BlockTable], source: BlockAllocator, target: BlockAllocator, block_size: int
) -> list[tuple[int, int]]:
    """Let the tables name fresh blocks of `target`, shared as they were; returns all pairs.

    `target` must have a free block for each. References to `source` are left to the caller, and
    so are the blocks of slots that no token has yet: they hold nothing and are not moved.
    """
    old_blocks = distinct_blocks(tables, block_size)
    new_blocks = target.allocate(len(old_blocks))
    moved = dict(zip(old_blocks, new_blocks, strict=True))
    references = dict.fromkeys(new_blocks, 0)
    for table in tables:
        blocks = [moved[block] for block in _with_tokens(table, block_size)]
        table.blocks = table.blocks[: table.num_dropped] + blocks
        for block in blocks:
            references[block] += 1
    target.share([block for block, n in references.items() for _ in range(n - 1)])
    return list(moved.items())


def _with_tokens(table: BlockTable, block_size: int) -> list[int]:
    return table.blocks[table.num_dropped : -(-table.num_tokens // block_size)]
