"""The block movements of one step, independent of each other.

The manager's calls follow one another; a step makes all swaps out, then all swaps in, then all
copies. So a source that an earlier pair of the step fills is replaced by where its content is now,
and a pair whose destination is given up again is dropped. No step swaps both out and in: whoever
runs is at least as urgent as whoever is swapped out, so nobody has to go in a step in which one
of these comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

Pairs = list[tuple[int, int]]


class Movements:
    """Collects the pairs that the manager returns, in the order of its calls.

    ref_counts: of the GPU pool, as they are now.
    """

    def __init__(self, ref_counts: Sequence[int]) -> None:
        self._ref_counts = ref_counts
        self._swap_out: dict[int, int] = {}  # CPU block -> GPU block: destination -> source
        self._swap_in: dict[int, int] = {}  # GPU block -> CPU block
        self._copies: dict[int, int] = {}  # GPU block -> GPU block

    def add_copies(self, pairs: Pairs) -> None:
        """Copy-on-write. What was swapped in in this step is swapped in twice instead."""
        for source, destination in pairs:
            if source in self._swap_in:
                self._swap_in[destination] = self._swap_in[source]
            else:
                self._copies[destination] = self._copies.get(source, source)

    def add_swap_out(self, pairs: Pairs) -> None:
        """A group leaves the GPU."""
        for source, destination in pairs:
            self._swap_out[destination] = self._copies.get(source, source)

    def add_swap_in(self, pairs: Pairs) -> None:
        """A group comes back."""
        for source, destination in pairs:
            self._swap_in[destination] = source

    def drop_freed(self) -> None:
        """Forget pairs into blocks that nobody holds; call this when blocks were given back."""
        for pairs in (self._swap_in, self._copies):
            for destination in [block for block in pairs if not self._ref_counts[block]]:
                del pairs[destination]

    @property
    def swap_out(self) -> Pairs:
        """(GPU block, CPU block)."""
        return [(source, destination) for destination, source in self._swap_out.items()]

    @property
    def swap_in(self) -> Pairs:
        """(CPU block, GPU block)."""
        return [(source, destination) for destination, source in self._swap_in.items()]

    @property
    def copies(self) -> Pairs:
        """(source, destination), both GPU blocks."""
        return [(source, destination) for destination, source in self._copies.items()]
