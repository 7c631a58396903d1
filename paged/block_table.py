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
    num_pending     the last of these, whose K and V are not yet written
    num_published   leading full blocks that were offered to the prefix cache
    num_cached      tokens of the prefix hit at the last allocate

    Three marks keep the common calls short. Appending needs no look at the blocks while there are
    at most `writable_until` tokens: those slots lie in blocks that are the sequence's own.
    Computing needs none below `work_at` computed tokens: nothing is to be published or dropped.
    `quiet_until` is the smaller of both after a step; then a step with fewer tokens only counts
    one up. Whatever else changes the table sets it to 0.
    """

    __slots__ = (
        "blocks",
        "chain",
        "num_cached",
        "num_dropped",
        "num_pending",
        "num_published",
        "num_tokens",
        "parent",
        "quiet_until",
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
        self.num_pending = num_tokens
        self.num_dropped = 0
        self.num_published = 0
        self.num_cached = 0
        self.chain: DigestChain | None = None  # None: prefix caching is off
        self.parent: Entry | None = None  # of the next block to publish; None: never publish
        self.writable_until = 0
        self.work_at = 0
        self.quiet_until = 0
        self.row = NO_ROW  # in the batch builder's table

    @property
    def num_computed(self) -> int:
        """Leading tokens whose K and V are written."""
        return self.num_tokens - self.num_pending

    @num_computed.setter
    def num_computed(self, num_computed: int) -> None:
        self.num_pending = self.num_tokens - num_computed
        self.quiet_until = 0

    def give_slots(self, num_tokens: int) -> None:
        """So many tokens have a slot now."""
        self.num_pending += num_tokens - self.num_tokens
        self.num_tokens = num_tokens
        self.quiet_until = 0

    def fork(self, child: SequenceLike, num_blocks: int) -> BlockTable:
        """A table for `child` that names the first `num_blocks` of these blocks."""
        twin = BlockTable(child, self.blocks[:num_blocks], self.num_tokens)
        twin.num_pending = self.num_pending
        twin.num_dropped = self.num_dropped
        twin.num_published = self.num_published
        twin.num_cached = self.num_cached
        twin.parent = self.parent
        twin.work_at = self.work_at
        return twin

    def held(self) -> list[int]:
        """The blocks it has a reference to."""
        return self.blocks[self.num_dropped :]
