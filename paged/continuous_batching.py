"""Continuous batching by the simplest rules: requests join and leave between any two steps.

Running sequences grow first; when the pool is full the one admitted last gives way: its blocks are
freed and it is computed again later. Then waiting requests are admitted, first come first served,
while a seat and blocks are free. (Yu et al. 2022, "Orca"; Kwon et al. 2023, section 4.5.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged.admission import AllocStatus
from paged.block_manager import BlockSpaceManager
from paged.errors import NoFreeBlocksError
from paged.replay_config import ReplayConfig, final_length
from paged.sequence import Sequence
from paged.trace import Request, token_ids

if TYPE_CHECKING:
    from paged.batch import Batch


@dataclass
class Job:
    """A request on its way. `tokens` are all it will ever have: the prompt's, then its output."""

    index: int
    request: Request
    tokens: list[int]
    sequence: Sequence
    num_computed: int = 0  # tokens whose K and V are written

    @property
    def finished(self) -> bool:
        """Whether the last output token is known."""
        return self.num_computed >= final_length(self.request)


class ContinuousBatching:
    """The queue of a replay: `schedule` a batch, compute it, `complete` it."""

    def __init__(
        self, requests: list[Request], manager: BlockSpaceManager, config: ReplayConfig
    ) -> None:
        self.manager, self.config = manager, config
        self.pending = deque(zip(arrival_steps(requests), enumerate(requests), strict=True))
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # in order of admission
        self.now = 0  # steps, the idle ones that were skipped included
        self.preemptions = 0
        self.recomputed_tokens = 0

    @property
    def unfinished(self) -> bool:
        """Whether any request is still on its way."""
        return bool(self.pending or self.waiting or self.running)

    def arrive(self) -> None:
        """Queue the requests whose time has come; with nothing else to do, go to the next one's."""
        if not self.running and not self.waiting:
            self.now = max(self.now, self.pending[0][0])
        while self.pending and self.pending[0][0] <= self.now:
            _, (index, request) = self.pending.popleft()
            tokens = token_ids(request, index=index, seed=self.config.seed)
            sequence = Sequence(index, tokens[: request.prompt_len])
            self.waiting.append(Job(index, request, tokens, sequence))

    def schedule(self) -> tuple[list[tuple[int, int]], Batch]:
        """Copies to make first, and the batch of all running sequences: what each has not computed."""
        copies, batch = self._grow()
        num_grown = len(self.running)
        self._admit()
        if batch is None or len(self.running) > num_grown:
            batch = self.manager.build_batch(
                [job.sequence for job in self.running],
                [len(job.sequence) - job.num_computed for job in self.running],
                device=self.config.device,
            )
        return copies, batch

    def complete(self) -> int:
        """The batch is computed: publish it, let the finished go; returns how many."""
        for job in self.running:
            job.num_computed = len(job.sequence)
            self.manager.mark_computed(job.sequence, job.num_computed)
            if job.finished:
                self.manager.free(job.sequence)
        num_running = len(self.running)
        self.running = [job for job in self.running if not job.finished]
        self.now += 1
        return num_running - len(self.running)

    def _grow(self) -> tuple[list[tuple[int, int]], Batch | None]:
        """The next token of every running sequence; the youngest give way until they fit."""
        while self.running:
            sequences = [job.sequence for job in self.running]
            tokens = [job.tokens[len(job.sequence)] for job in self.running]
            try:
                return self.manager.step(sequences, tokens, device=self.config.device)
            except NoFreeBlocksError:
                job = self.running.pop()
                self.manager.free(job.sequence)
                self.waiting.appendleft(job)
                self.preemptions += 1
        return [], None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            job = self.waiting[0]
            if self.manager.can_allocate(job.sequence) is not AllocStatus.OK:
                return
            self.manager.allocate(job.sequence)
            num_cached = self.manager.num_cached_tokens(job.sequence)
            self.recomputed_tokens += max(job.num_computed - num_cached, 0)  # if preempted before
            job.num_computed = num_cached
            self.running.append(self.waiting.popleft())


def arrival_steps(requests: list[Request]) -> list[int]:
    """The step at which each request arrives: the trace's clock, scaled to one a step on average."""
    start = requests[0].arrival
    duration = requests[-1].arrival - start
    scale = (len(requests) - 1) / duration if duration else 0.0
    return [int((request.arrival - start) * scale) for request in requests]
