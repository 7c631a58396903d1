"""What the manager knows about one sequence that holds blocks."""

from __future__ import annotations

from typing import Any

from .digests import DigestChain
from .prefix_index import Entry
from .sequence import SequenceLike

DROPPED = -1  # the entry of a block that was given back behind the sliding window
NO_ROW = -1  # the table has not been in a batch yet
NEVER = 2**62  # more tokens than any sequence has


class BlockTable:
    """The blocks of one sequence, in logical order, and how far it has come.

    blocks          block ids; `num_dropped` leading ones are DROPPED
    num_tokens      tokens that have a slot
    num_computed    leading tokens whose K and V are written
    num_published   leading full blocks that were offered to the prefix cache
    num_cached      tokens of the prefix hit at the last allocate

    Two marks keep the common step short. Appending needs no look at the blocks while the sequence
    has fewer than `writable_until` tokens: those slots lie in blocks that are its own. Computing
    needs none while fewer than `work_at` tokens are computed: nothing to publish or to drop.
    """

    __slots__ = (
        "blocks",
        "chain",
        "num_cached",
        "num_computed",
        "num_dropped",
        "num_published",
        "num_tokens",
        "parent",
        "row",
        "seq",
        "seq_id",
        "work_at",
        "writable_until",
    )

    def __init__(self, seq: SequenceLike, blocks: list[int], num_tokens: int) -> None:
        self.seq = seq
        self.seq_id: Any = seq.seq_id
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.num_computed = 0
        self.num_dropped = 0
        self.num_published = 0
        self.num_cached = 0
        self.chain: DigestChain | None = None  # None: prefix caching is off
        self.parent: Entry | None = None  # of the next block to publish; None: never publish
        self.writable_until = 0
        self.work_at = 0
        self.row = NO_ROW  # in the batch builder's table

    def fork(self, child: SequenceLike, num_blocks: int) -> BlockTable:
        """A table for `child` that names the first `num_blocks` of these blocks."""
        twin = BlockTable(child, self.blocks[:num_blocks], self.num_tokens)
        twin.num_computed = self.num_computed
        twin.num_dropped = self.num_dropped
        twin.num_published = self.num_published
        twin.num_cached = self.num_cached
        twin.parent = self.parent
        twin.work_at = self.work_at
        return twin

    def held(self) -> list[int]:
        """The blocks it has a reference to."""
        return self.blocks[self.num_dropped :]
