"""Ways of reserving memory for sequences that grow to a length that nobody may know yet.

longest         one piece as long as the longest sequence there can be
power of two    one piece: the next power of two of the request's own final length, as if known
too small, ...  one piece of a typical length: the power of two at or below the median. A sequence
                that outgrows it is aborted, or moves to a piece twice as long and is copied
oracle          one piece of exactly the final length, as if known and as if pieces left no holes
pages           blocks of 16 slots, taken when they are needed: the real manager, see the replay

All pieces but the first and the oracle's are placed by our BuddyAllocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from bench.serving_loads import Load
from paged import BuddyAllocator, NoFreeBlocksError


class Places(Protocol):
    """Where pieces lie."""

    num_free: int

    def allocate(self, n: int) -> range: ...
    def free(self, blocks: range) -> None: ...


class Packed:
    """Pieces of any size without holes between them, as if they could be moved for nothing."""

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots

    def allocate(self, n: int) -> range:
        if n > self.num_free:
            raise NoFreeBlocksError(n, self.num_free)
        self.num_free -= n
        return range(n)

    def free(self, blocks: range) -> None:
        self.num_free += len(blocks)


@dataclass(frozen=True)
class Way:
    """How long a piece is for a sequence of a load that has some tokens now and more at its end."""

    name: str
    places: Callable[[int], Places] | None  # None: pages
    piece: Callable[[Load, int, int], int] = lambda load, now, final: final
    on_overflow: Literal["abort", "grow"] | None = None


LONGEST = Way("longest", Packed, lambda load, now, final: load.longest)
POWER_OF_TWO = Way("power of two", BuddyAllocator)
ABORT = Way("too small, abort", BuddyAllocator, lambda load, now, final: load.typical, "abort")
GROW = Way(
    "too small, grow", BuddyAllocator, lambda load, now, final: max(load.typical, now), "grow"
)
ORACLE = Way("oracle", Packed)
PAGES = Way("pages", None)
WAYS = (LONGEST, POWER_OF_TWO, ABORT, GROW, ORACLE, PAGES)


class Pieces:
    """The memory of one contiguous way: `held[key]` slots for each sequence that is let in."""

    def __init__(self, way: Way, load: Load, num_slots: int) -> None:
        assert way.places is not None
        self.way, self.load = way, load
        self.places = way.places(num_slots)
        self.held: dict[int, int] = {}
        self._pieces: dict[int, range] = {}

    def take(self, key: int, now: int, final: int) -> bool:
        """Reserve for a sequence that comes in; False when no place is long enough."""
        return self._place(key, self.way.piece(self.load, now, final))

    def grow(self, key: int) -> bool:
        """A piece twice as long in place of the old one, which is there until the copy is made."""
        old = self._pieces[key]
        if not self._place(key, 2 * len(old)):
            return False
        self.places.free(old)
        return True

    def give_back(self, key: int) -> None:
        """The sequence has left."""
        self.places.free(self._pieces.pop(key))
        del self.held[key]

    def _place(self, key: int, size: int) -> bool:
        try:
            piece = self.places.allocate(size)
        except NoFreeBlocksError:
            return False
        self._pieces[key], self.held[key] = piece, len(piece)
        return True
