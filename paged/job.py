"""A group on its way through the scheduler, and which of its tokens come next."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal, NamedTuple

from .block_manager import BlockSpaceManager
from .block_table import BlockTable
from .sequence import SequenceGroup, SequenceLike

State = Literal["waiting", "running", "swapped"]


Row = tuple[SequenceLike, int, int, bool]  # sequence, query_len, context_len, reaches_end


class Lead(NamedTuple):
    """Another sequence of the group computes the first `num_tokens` tokens, in shared blocks."""

    seq: SequenceLike
    num_tokens: int


class Job:
    """One group, and those of its sequences that go on.

    num_given of `group.seqs`, the others are forks of these
    seqs      a sequence comes after the one that leads it, right behind it if all is led
    leads     of the sequences whose first tokens another one has yet to compute
    number    of arrivals before it
    returns   it was preempted before
    lost      tokens that each sequence had computed when it last gave up its blocks
    """

    __slots__ = (
        "arrival_time",
        "group",
        "leads",
        "lost",
        "num_given",
        "number",
        "priority",
        "returns",
        "seqs",
        "state",
    )

    def __init__(self, group: SequenceGroup, priority: float, number: int) -> None:
        self.group = group
        self.seqs = list(group.seqs)
        self.num_given = len(group.seqs)
        self.leads: dict[Any, Lead] = {}
        self.priority = priority
        self.arrival_time = group.arrival_time
        self.number = number
        self.state: State = "waiting"
        self.returns = False
        self.lost: dict[Any, int] = {}

    @property
    def request_id(self) -> Any:
        return self.group.request_id

    def as_group(self) -> SequenceGroup:
        """The sequences that go on, as the manager takes them."""
        return SequenceGroup(self.request_id, self.seqs)

    def rows(self, tables: Mapping[Any, BlockTable], budget: int) -> list[Row]:
        """The tokens that come next, at most `budget`; [] when none can be computed now.

        All sequences of a group reach their end in the same step: until all their tokens fit,
        each keeps its last one back. One that is led comes after its lead: it gets none of the
        budget before the lead has all it can take.
        """
        starts = [self.start(seq, tables) for seq in self.seqs]
        missing = sum(map(len, self.seqs)) - sum(starts)
        if missing <= budget:
            return [
                (seq, len(seq) - start, start, True)
                for seq, start in zip(self.seqs, starts, strict=True)
            ]
        rows: list[Row] = []
        for seq, start in zip(self.seqs, starts, strict=True):
            query_len = min(budget, len(seq) - 1 - start)
            if query_len > 0:
                rows.append((seq, query_len, start, False))
                budget -= query_len
        return rows

    def decodes(self, tables: Mapping[Any, BlockTable]) -> bool:
        """Whether each sequence has one token to compute."""
        for seq in self.seqs:
            table = tables[seq.seq_id]
            if len(seq.token_ids) - 1 != table.num_tokens - table.num_pending:
                return False
        return not self.leads

    def start(self, seq: SequenceLike, tables: Mapping[Any, BlockTable]) -> int:
        """The first token that this sequence has to compute itself."""
        num_computed, lead = tables[seq.seq_id].num_computed, self.leads.get(seq.seq_id)
        return num_computed if lead is None else max(num_computed, lead.num_tokens)

    def add(self, seq: SequenceLike, *, behind: SequenceLike) -> None:
        """One more sequence, in its place behind another."""
        place = next(i for i, other in enumerate(self.seqs) if other is behind)
        self.seqs.insert(place + 1, seq)

    def follow(self, seq: SequenceLike, lead: SequenceLike, num_tokens: int) -> None:
        """`lead` computes the first `num_tokens` tokens of `seq` too."""
        self.leads[seq.seq_id] = Lead(lead, num_tokens)

    def ends_with(self, seq: SequenceLike, at_end: Container[Any]) -> bool:
        """Whether `seq` reaches its end because its lead does, which is `at_end`."""
        lead = self.leads.get(seq.seq_id)
        return lead is not None and lead.seq.seq_id in at_end

    def catch_up(self, manager: BlockSpaceManager) -> None:
        """What others have computed of a sequence counts as its own from now on."""
        for seq in self.seqs:
            lead = self.leads.get(seq.seq_id)
            if lead is not None:
                num_computed = manager.tables[lead.seq.seq_id].num_computed
                manager.mark_computed(seq, min(num_computed, lead.num_tokens))
                if num_computed >= lead.num_tokens:
                    del self.leads[seq.seq_id]

    def remove(self, seq: SequenceLike) -> None:
        """A sequence does not go on. The first of those it led takes its place.

        A fork leaves the group, too: beam search makes many.
        """
        self.seqs = [other for other in self.seqs if other is not seq]
        forks = [other for other in self.group.seqs[self.num_given :] if other is not seq]
        self.group.seqs[self.num_given :] = forks
        above = self.leads.pop(seq.seq_id, None)
        led = [other for other in self.seqs if self._is_led(other, seq)]
        for heir in led[:1]:
            num_tokens = self.leads.pop(heir.seq_id).num_tokens
            if above is not None:
                self.follow(heir, above.seq, min(num_tokens, above.num_tokens))
            for other in led[1:]:
                self.follow(other, heir, min(num_tokens, self.leads[other.seq_id].num_tokens))

    def _is_led(self, seq: SequenceLike, by: SequenceLike) -> bool:
        lead = self.leads.get(seq.seq_id)
        return lead is not None and lead.seq is by
