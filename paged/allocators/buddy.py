"""The buddy allocator: contiguous runs of a power of two blocks.

What a cache without paging has to do. Knowlton (1965): a free run of 2**k blocks at an address
that is a multiple of 2**k has one buddy, the run at `address ^ 2**k`. Allocation splits the
smallest free run that is large enough; freeing merges a run with its buddy for as long as that
is free, too. Both take O(log n) steps.
"""

from __future__ import annotations

from paged.config import check_int
from paged.errors import NoFreeBlocksError, NotAllocatedError


class BuddyAllocator:
    """Contiguous blocks, each request rounded up to a power of two.

    The baseline that paging is compared with: it wastes slots inside a run (rounding) and blocks
    between runs (external fragmentation), where a block table wastes only a sequence's last block.
    """

    def __init__(self, num_blocks: int) -> None:
        check_int("num_blocks", num_blocks, minimum=1)
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # Free runs by order k (2**k blocks), each a dict used as an ordered set of start addresses.
        self._free: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        self._orders: dict[int, int] = {}  # start of an allocated run -> its order
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks & (1 << order):
                self._free[order][start] = None
                start += 1 << order

    def allocate(self, n: int) -> range:
        """The ids of `n` neighbouring blocks, rounded up to a power of two.

        NoFreeBlocksError when no free run is that long, however many blocks are free in all.
        """
        check_int("n", n, minimum=1)
        wanted = (n - 1).bit_length()
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            raise NoFreeBlocksError(
                1 << wanted,
                self.largest_free_run,
                f"in one run; {self.num_free} of {self.num_blocks} are free in all",
            )
        start, _ = self._free[order].popitem()
        while order > wanted:  # split: keep the lower half, the upper one becomes free
            order -= 1
            self._free[order][start + (1 << order)] = None
        self._orders[start] = wanted
        self.num_free -= 1 << wanted
        return range(start, start + (1 << wanted))

    def free(self, blocks: range) -> None:
        """Give back a run exactly as `allocate` returned it."""
        if not isinstance(blocks, range):
            raise TypeError(f"blocks is {blocks!r}; it must be a range that allocate returned")
        order = self._orders.get(blocks.start)
        if order is None or blocks != range(blocks.start, blocks.start + (1 << order)):
            raise NotAllocatedError(f"{blocks} is not an allocated run: freed twice, or cut?")
        del self._orders[blocks.start]
        self.num_free += 1 << order
        start = blocks.start
        while (buddy := start ^ (1 << order)) in self._free[order]:  # merge
            del self._free[order][buddy]
            start &= buddy
            order += 1
        self._free[order][start] = None

    @property
    def largest_free_run(self) -> int:
        """Blocks of the longest run that `allocate` could return now; 0 when the pool is full."""
        return max((1 << order for order, runs in enumerate(self._free) if runs), default=0)

    @property
    def external_fragmentation(self) -> float:
        """Share of the free blocks that lie outside the largest free run, 0..1."""
        return 1 - self.largest_free_run / self.num_free if self.num_free else 0.0
