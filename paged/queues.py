"""Who waits, who runs and who is swapped out, each in order of urgency."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Any

from .job import Job, State
from .sequence import SequenceLike


class Queues:
    """All live jobs, by queue, by request and by sequence."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.swapped: list[Job] = []
        self.jobs: dict[Any, Job] = {}  # by request_id
        self.members: dict[Any, tuple[SequenceLike, Job]] = {}  # by seq_id

    def add(self, job: Job) -> None:
        """A new job waits."""
        self.jobs[job.request_id] = job
        for seq in job.seqs:
            self.members[seq.seq_id] = (seq, job)
        insort(self.waiting, job, key=_waiting_order)

    def move(self, job: Job, state: State) -> None:
        """To another queue. One that has run before goes ahead of new ones of its priority."""
        self._queue(job).remove(job)
        job.state = state
        insort(self._queue(job), job, key=_waiting_order if state == "waiting" else _order)

    def remove(self, job: Job) -> None:
        """The job is gone, with all sequences that it still has."""
        self._queue(job).remove(job)
        del self.jobs[job.request_id]
        for seq in job.seqs:
            del self.members[seq.seq_id]

    def candidates(self) -> Iterator[Job]:
        """Those that could come in, most urgent first, swapped before waiting ones.

        The next one after a waiting job that was left where it is, or after any that has moved.
        """
        index = 0  # waiting jobs before it were passed over
        while self.swapped or index < len(self.waiting):
            queues = self.swapped[:1] + self.waiting[index : index + 1]
            job = min(queues, key=_priority)
            yield job
            if job in self.waiting[index : index + 1]:
                index += 1

    def is_live(self, seq: SequenceLike) -> bool:
        """Whether this very sequence is a member of a live job."""
        member = self.members.get(seq.seq_id)
        return member is not None and member[0] is seq

    def _queue(self, job: Job) -> list[Job]:
        queue: list[Job] = getattr(self, job.state)
        return queue


def _priority(job: Job) -> float:
    return job.priority


def _order(job: Job) -> tuple[float, float, int]:
    return (job.priority, job.arrival_time, job.number)


def _waiting_order(job: Job) -> tuple[float, bool, float, int]:
    return (job.priority, not job.returns, job.arrival_time, job.number)
