"""The loop around a scheduler: schedule, compute, decide, update, tell."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

from paged.scheduler import Scheduler
from paged.scheduler_output import SchedulerOutput
from paged.sequence import Sequence

from .decision import Decision, Drawn, decide
from .execution import Execution
from .request import Request, RequestOutput
from .runner import ModelRunner
from .tally import Tally

if TYPE_CHECKING:
    from paged.metrics import Metrics

_NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


class Loop:
    """Unfinished requests, and the outbox with what is new of them.

    A step that raises loses nothing: the next one does the same work.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, metrics: Metrics | None = None
    ) -> None:
        self.requests: dict[Hashable, Request] = {}
        self.outbox: list[RequestOutput] = []
        self.tally = Tally(scheduler)
        self.seq_ids = count()
        self._scheduler = scheduler
        self._execution = Execution(runner)
        self._metrics = metrics
        self._owners: dict[Hashable, Request] = {}  # by seq_id

    def add(self, request: Request) -> None:
        self._scheduler.add(request.group)
        self.requests[request.request_id] = request
        self._owners.update((seq.seq_id, request) for seq in request.running_seqs)

    def remove(self, request: Request) -> None:
        """Drop a request without a word."""
        self._scheduler.abort(request.request_id)
        self._forget(request)

    def tell_end(self, request: Request, finish_reason: str, error: str | None = None) -> None:
        """Announce that a request, which has been removed, has ended before its time."""
        request.end(finish_reason, error)
        self.outbox.append(request.output())

    def advance(self) -> None:
        """One step of the scheduler."""
        if not self.requests:
            return
        scheduled = self._scheduler.schedule()
        self._note(scheduled)
        self._execution.move(scheduled)
        decision = Decision()
        if scheduled.seqs:
            ends, logits = self._execution.compute(scheduled)
            owned = [(self._owners[seq.seq_id], seq) for seq in ends]
            decision = decide(owned, logits, self._fork)
            self.tally.add_step(scheduled)
        for request in decision.failed:
            self.remove(request)
        self._scheduler.update(scheduled, decision.tokens, decision.finished)
        self._tell(decision)

    def _note(self, scheduled: SchedulerOutput) -> None:
        """What the scheduler has done to requests already, whatever becomes of the step."""
        for request_id in scheduled.preempted:
            self.requests[request_id].metrics.num_preemptions += 1
        for request_id, reason in scheduled.rejected.items():
            request = self.requests[request_id]
            self._forget(request)
            self.tell_end(request, "rejected", reason)
        for seq in scheduled.seqs:
            request = self._owners[seq.seq_id]
            if not request.is_scheduled:
                request.is_scheduled = True
                num_cached_tokens = self._scheduler.manager.num_cached_tokens(seq)
                request.metrics.num_cached_tokens = num_cached_tokens
                self.tally.add_request(request)

    def _fork(self, parent: Sequence) -> Sequence:
        child = parent.fork(next(self.seq_ids))
        self._scheduler.fork(parent, child)
        self._owners[child.seq_id] = self._owners[parent.seq_id]
        return child

    def _forget(self, request: Request) -> None:
        for seq in request.running_seqs:
            self._owners.pop(seq.seq_id, None)
        del self.requests[request.request_id]

    def _tell(self, decision: Decision) -> None:
        """Record, count and announce what the scheduler has taken in."""
        now = perf_counter()
        for seq_id in decision.finished:
            self._owners.pop(seq_id, None)
        for request in decision.failed:
            self.tell_end(request, "error", _NOT_A_NUMBER)
        for request, drawn in decision.news.items():
            if request in decision.failed:  # another of its sequences
                continue
            for seq, token, finish_reason in drawn:
                request.continuations[seq.seq_id].record(token, finish_reason)
            self._measure(request, drawn, now)
            if request.has_all:
                request.metrics.finish_time = now
                self._forget(request)
            if request.is_finished or request.search is None:
                self.outbox.append(request.output())

    def _measure(self, request: Request, drawn: list[Drawn], now: float) -> None:
        """Note the time of a first token, and tell the metrics of first and last ones."""
        times = request.metrics
        if times.first_token_time is None:
            times.first_token_time = now
            if self._metrics:
                self._metrics.on_first_token(now - times.arrival_time)
        if self._metrics:
            prompt_len = len(request.prompt_token_ids)
            lengths = [len(seq) - prompt_len for seq, _, finish_reason in drawn if finish_reason]
            if request.search and request.search.is_done:
                lengths.append(request.search.length)
            for length in lengths:
                self._metrics.on_finish(now - times.first_token_time, length)
