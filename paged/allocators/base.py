"""The interface of every block allocator, and the reference counting that all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from operator import index, length_hint
from reprlib import repr as shortened

from paged.config import check_int
from paged.errors import NoFreeBlocksError, NotAllocatedError
from paged.sequence import as_count


class BlockAllocator(ABC):
    """A pool of blocks 0 .. num_blocks - 1 with a reference count each.

    Every call is all or nothing. A subclass decides which free block is handed out next (`_take`)
    and what becomes of a block that nobody references any more (`_give_back`).
    """

    def __init__(self, num_blocks: int) -> None:
        check_int("num_blocks", num_blocks, minimum=0)
        self.ref_counts = [0] * num_blocks
        self.num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each; NoFreeBlocksError when fewer are free."""
        if type(n) is not int or n < 0:
            n = as_count("n", n)
        if n > self.num_free:
            raise NoFreeBlocksError(n, self.num_free)
        blocks = self._take(n)
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        self.num_free -= n
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, all of which must have one already."""
        blocks = _as_blocks(blocks)
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self.ref_counts[block]:
                raise NotAllocatedError(f"block {block} has no reference and cannot be shared")
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less for each block; those left without one return in the order given.

        NotAllocatedError, and nothing is changed, when a block has not that many references.
        """
        blocks = blocks.copy() if type(blocks) is list else _as_blocks(blocks)
        ref_counts = self.ref_counts
        remaining = iter(blocks)
        try:
            for block in remaining:  # nearly always the only reference of every block
                if ref_counts[block] != 1 or block < 0:
                    raise IndexError
                ref_counts[block] = 0
        except (IndexError, TypeError):
            done = len(blocks) - 1 - length_hint(remaining)
            blocks = blocks[:done] + self._unshare(blocks, done)
        self._give_back(blocks)
        self.num_free += len(blocks)

    def _unshare(self, blocks: list[int], first: int) -> list[int]:
        """Drop the references from blocks[first] on, or all so far; returns the blocks left free."""
        released = []
        for position, block in enumerate(blocks[first:], first):
            if not hasattr(block, "__index__") or not (
                0 <= block < self.num_blocks and self.ref_counts[block]
            ):
                for dropped in blocks[:position]:
                    self.ref_counts[dropped] += 1
                raise NotAllocatedError(self._no_reference(block, blocks))
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                released.append(block)
        return released

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Make the pool larger, or smaller by moving the blocks in use that lie above its end.

        Returns the new id of each block that moved. NoFreeBlocksError when more are in use.
        """
        check_int("num_blocks", num_blocks, minimum=1)
        num_used, old = self.num_used, self.num_blocks
        if num_used > num_blocks:
            raise NoFreeBlocksError(num_used, num_blocks, "blocks are in use")
        above = [block for block in range(num_blocks, old) if self.ref_counts[block]]
        self._move_end(num_blocks)
        moved = dict(zip(above, self._take(len(above)), strict=True))
        for source, target in moved.items():
            self.ref_counts[target] = self.ref_counts[source]
        self.ref_counts = self.ref_counts[:num_blocks] + [0] * (num_blocks - old)
        self.num_free = num_blocks - num_used
        return moved

    def ref_count(self, block: int) -> int:
        block = as_count("block", block)
        if block >= self.num_blocks:
            raise ValueError(f"block is {block}; this pool has blocks 0 .. {self.num_blocks - 1}")
        return self.ref_counts[block]

    def _no_reference(self, block: int, blocks: list[int]) -> str:
        if not hasattr(block, "__index__") or not 0 <= block < self.num_blocks:
            return f"block {block!r} is not of this pool of {self.num_blocks} blocks"
        held, given = self.ref_counts[block], blocks.count(block)
        return f"block {block} has {held} references and cannot give back {given}: freed twice?"

    @abstractmethod
    def free_blocks(self) -> list[int]:
        """Every block without a reference, the next to be handed out first."""

    @abstractmethod
    def _take(self, n: int) -> list[int]:
        """Remove `n` blocks from the free ones; at least `n` are free."""

    @abstractmethod
    def _give_back(self, blocks: list[int]) -> None:
        """Add blocks, none of which is free, to the free ones."""

    @abstractmethod
    def _move_end(self, num_blocks: int) -> None:
        """Add free blocks up to the new end of the pool, or remove those above it."""


def _as_blocks(blocks: Iterable[int]) -> list[int]:
    """Block ids of any kind of int, an array's included, as a list of plain ints."""
    try:
        return list(map(index, blocks))
    except TypeError:
        raise TypeError(f"blocks is {shortened(blocks)}; it must be a list of block ids") from None
