"""What a step decides: the next tokens, and which sequences end with theirs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paged.sequence import Sequence

from .beam_search import Candidate
from .request import Request
from .sampling import choose

if TYPE_CHECKING:
    from torch import Tensor


class Drawn(NamedTuple):
    """A token for one sequence, and why it is the last, if it is."""

    seq: Sequence
    token: int
    finish_reason: str | None


@dataclass
class Decision:
    """Next tokens and finished sequences, both by seq_id, for `Scheduler.update`.

    news    the requests that go on or end, with the tokens that were drawn for them
    failed  those that cannot go on, because their logits are not numbers
    """

    tokens: dict[Hashable, int] = field(default_factory=dict)
    finished: list[Hashable] = field(default_factory=list)
    news: dict[Request, list[Drawn]] = field(default_factory=dict)
    failed: dict[Request, None] = field(default_factory=dict)

    def add_drawn(self, request: Request, seq: Sequence, token: int | None) -> None:
        """A token has been drawn for a sequence. None: its logits are not numbers."""
        if token is None:
            self.failed[request] = None
            return
        reason = request.finish_reason(seq, token)
        self.news.setdefault(request, []).append(Drawn(seq, token, reason))
        self.tokens[seq.seq_id] = token
        if reason:
            self.finished.append(seq.seq_id)

    def add_searched(
        self,
        request: Request,
        candidates: Iterable[Candidate] | None,
        fork: Callable[[Sequence], Sequence],
    ) -> None:
        """A search takes its step: a beam that goes on twice is forked, one that does not ends."""
        if candidates is None:
            self.failed[request] = None
            return
        assert request.search is not None
        self.news[request] = []
        parents, request.beams = request.beams, []
        taken = set()
        for beam, token in request.search.advance(candidates):
            seq = fork(parents[beam]) if beam in taken else parents[beam]
            taken.add(beam)
            self.tokens[seq.seq_id] = token
            request.beams.append(seq)
        self.finished += [seq.seq_id for beam, seq in enumerate(parents) if beam not in taken]


def decide(
    ends: list[tuple[Request, Sequence]], logits: Tensor, fork: Callable[[Sequence], Sequence]
) -> Decision:
    """What comes after sequences whose last token has been computed.

    logits  [len(ends), vocab]
    fork    makes and announces a sequence that goes on from where another is
    """
    drawn = [row for row, (request, _) in enumerate(ends) if request.search is None]
    draws = [ends[row][0].draw(ends[row][1]) for row in drawn]
    tokens = choose(logits if len(drawn) == len(ends) else logits[drawn], draws)
    rows = {seq.seq_id: row for row, (_, seq) in enumerate(ends)}
    searched = {
        request: request.search.candidates(logits[[rows[seq.seq_id] for seq in request.beams]])
        for request in dict.fromkeys(request for request, _ in ends)
        if request.search is not None
    }
    decision = Decision()  # from here on nothing fails: a search, a fork cannot be taken back
    for row, token in zip(drawn, tokens, strict=True):
        decision.add_drawn(*ends[row], token)
    for request, candidates in searched.items():
        decision.add_searched(request, candidates, fork)
    return decision
