"""The plain allocator: blocks have no content, free ones are all alike."""

from __future__ import annotations

from .base import BlockAllocator
from .free_list import make_free_list


class NaiveBlockAllocator(BlockAllocator):
    """Reference counts over a free list in the given order ("fifo" or "first_fit")."""

    def __init__(self, num_blocks: int, free_order: str = "fifo") -> None:
        super().__init__(num_blocks)
        self._free = make_free_list(free_order, range(num_blocks))

    def free_blocks(self) -> list[int]:
        return self._free.in_order()

    def _take(self, n: int) -> list[int]:
        return self._free.take(n)

    def _give_back(self, blocks: list[int]) -> None:
        self._free.give(blocks)

    def _move_end(self, num_blocks: int) -> None:
        self._free.remove_from(num_blocks)
        self._free.give(range(self.num_blocks, num_blocks))
