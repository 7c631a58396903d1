"""Which free block is handed out next: two orders behind one small interface."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol


class FreeList(Protocol):
    def take(self, n: int) -> list[int]: ...
    def give(self, blocks: Iterable[int]) -> None: ...
    def remove_from(self, first: int) -> None:
        """Remove every block with id `first` or above."""
        ...

    def __len__(self) -> int: ...
    def in_order(self) -> list[int]:
        """Every block, the next to be taken first."""
        ...


class FifoFreeList:
    """Pops the head, pushes to the tail: the block that is free longest is reused first.

    One list with a moving head, so that taking `n` blocks is a slice. The part before the head is
    cut off when it is longer than the rest: O(1) per block, averaged.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks = list(blocks)
        self._head = 0

    def take(self, n: int) -> list[int]:
        head = self._head + n
        taken = self._blocks[self._head : head]
        if 2 * head > len(self._blocks):
            del self._blocks[:head]
            head = 0
        self._head = head
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        self._blocks.extend(blocks)

    def remove_from(self, first: int) -> None:
        self._blocks = [block for block in self.in_order() if block < first]
        self._head = 0

    def __len__(self) -> int:
        return len(self._blocks) - self._head

    def in_order(self) -> list[int]:
        return self._blocks[self._head :]


class FirstFitFreeList:
    """The lowest id first, from a heap in O(log n): sequences get runs of neighbours."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._heap = list(blocks)
        heapq.heapify(self._heap)

    def take(self, n: int) -> list[int]:
        return [heapq.heappop(self._heap) for _ in range(n)]

    def give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._heap, block)

    def remove_from(self, first: int) -> None:
        self._heap = [block for block in self._heap if block < first]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def in_order(self) -> list[int]:
        return sorted(self._heap)


def make_free_list(free_order: str, blocks: Iterable[int]) -> FreeList:
    if free_order == "fifo":
        return FifoFreeList(blocks)
    if free_order == "first_fit":
        return FirstFitFreeList(blocks)
    raise ValueError(f"free_order is {free_order!r}; it must be 'fifo' or 'first_fit'")
