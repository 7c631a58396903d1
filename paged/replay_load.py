"""The requests of a trace on their way through a scheduler: they arrive, generate and end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from paged.scheduler import Scheduler
from paged.scheduler_output import SchedulerOutput
from paged.sequence import Sequence, SequenceGroup
from paged.trace import Request, token_ids


@dataclass(frozen=True)
class Arrival:
    """A request on its way. `tokens` are all it will ever have: the prompt's, then its output."""

    index: int  # its place in the trace
    request: Request
    tokens: list[int]
    sequence: Sequence


class ReplayLoad:
    """Feeds a scheduler and answers for the model: the tokens of a request are all known before."""

    def __init__(self, requests: list[Request], scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.now = 0  # steps, the idle ones that were skipped included
        self._seed = seed
        self._pending = deque(zip(arrival_steps(requests), enumerate(requests), strict=True))
        self._arrived: dict[Any, Arrival] = {}  # and not ended

    @property
    def unfinished(self) -> bool:
        """Whether any request is still on its way."""
        return bool(self._pending or self._arrived)

    def arrive(self) -> None:
        """Add the requests whose time has come; with nothing else to do, go to the next one's."""
        if not self._arrived:
            self.now = max(self.now, self._pending[0][0])
        while self._pending and self._pending[0][0] <= self.now:
            _, (index, request) = self._pending.popleft()
            tokens = token_ids(request, index=index, seed=self._seed)
            sequence = Sequence(index, tokens[: request.prompt_len])
            self._arrived[index] = Arrival(index, request, tokens, sequence)
            self.scheduler.add(SequenceGroup(index, [sequence], arrival_time=request.arrival))

    def running(self) -> list[Arrival]:
        """Those with GPU blocks."""
        return [self._arrived[group.request_id] for group in self.scheduler.running]

    def answer(self, output: SchedulerOutput) -> int:
        """The step is computed: its next tokens, and who ends; returns how many."""
        next_tokens: dict[int, int] = {}
        finished = []
        for seq, reaches_end in zip(output.seqs, output.reaches_end, strict=True):
            if reaches_end:
                arrival = self._arrived[seq.seq_id]
                if len(seq) < len(arrival.tokens):
                    next_tokens[arrival.index] = arrival.tokens[len(seq)]
                if len(seq) + 1 >= len(arrival.tokens):
                    finished.append(arrival.index)
                    del self._arrived[arrival.index]
        self.scheduler.update(output, next_tokens, finished)
        self.now += 1
        return len(finished)


def arrival_steps(requests: list[Request]) -> list[int]:
    """The step at which each request arrives: the trace's clock, scaled to one a step on average."""
    start = requests[0].arrival
    duration = requests[-1].arrival - start
    scale = (len(requests) - 1) / duration if duration else 0.0
    return [int((request.arrival - start) * scale) for request in requests]
