"""A load served within a budget, step by step, without a model: the real scheduler decides.

Pages lie in the real block manager, whose pool is the budget. For a contiguous way the same
scheduler runs over a pool that never lacks anything, behind a gate that lets a sequence in when its
piece finds a place. So the ways differ in nothing but who may run when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.serving_loads import Load
from bench.serving_ways import Pieces, Way
from paged import (
    BlockSpaceManager,
    CacheConfig,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
)
from paged.replay_config import final_length
from paged.trace import Request

PAGE = 16
CHECK_EVERY = 64  # steps


@dataclass
class Job:
    """A request on its way: `computed` of its tokens are in memory, `final` will be at its end."""

    key: int
    request: Request
    seq: Sequence
    final: int
    computed: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the next token is the last, which is never written."""
        return len(self.seq) == self.final


@dataclass
class Outcome:
    """What one way made of a load. Tokens and requests are those that ended as they should.

    sequences  that held memory at once: the average over the steps in which one more found no
               place; where each found one, the most
    memory     of the budget, over the same steps: shares of slots that carry a token, that will
               ("reserved"), that never will ("internal"), and that are in no sequence's hands and
               yet of no use to the next ("external"); None where each found a place
    """

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    preemptions: int = 0
    recomputed: int = 0
    copied: int = 0  # tokens
    sequences: float = 0.0
    memory: dict[str, float] | None = None

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass
class Ledger:
    """Sums over the steps in which memory is what keeps a sequence out."""

    num_slots: int
    steps: int = 0
    sequences: int = 0
    most_sequences: int = 0
    slots: Counter[str] = field(default_factory=Counter)

    def add(self, jobs: list[Job], held: list[int], is_crowded: bool) -> None:
        """One more step, in which these jobs hold that many slots each."""
        self.most_sequences = max(self.most_sequences, len(jobs))
        assert sum(held) <= self.num_slots
        if not is_crowded:
            return
        self.steps += 1
        self.sequences += len(jobs)
        for job, slots in zip(jobs, held, strict=True):
            self.slots["tokens"] += job.computed
            self.slots["reserved"] += min(slots, job.final) - job.computed
            self.slots["internal"] += max(slots - job.final, 0)
        self.slots["external"] += self.num_slots - sum(held)

    def close(self, outcome: Outcome) -> None:
        """Note the averages."""
        outcome.sequences = self.most_sequences
        if self.steps:
            outcome.sequences = self.sequences / self.steps
            kinds = ("tokens", "reserved", "internal", "external")
            total = self.num_slots * self.steps
            outcome.memory = {kind: self.slots[kind] / total for kind in kinds}


def replay(load: Load, way: Way, num_slots: int, seats: int) -> Outcome:
    """Serve all requests in their order; at most `seats` at once."""
    return _Replay(load, way, num_slots, seats).run()


class _Replay:
    def __init__(self, load: Load, way: Way, num_slots: int, seats: int) -> None:
        self.load, self.way, self.seats = load, way, seats
        self.outcome, self.ledger = Outcome(), Ledger(num_slots)
        self.pieces = Pieces(way, load, num_slots) if way.places else None
        size, number = (load.unit, seats) if self.pieces else (PAGE, num_slots // PAGE)
        self.manager = BlockSpaceManager(
            CacheConfig(
                block_size=size,
                num_gpu_blocks=number,
                enable_prefix_caching=False,
                watermark=0.0 if self.pieces else CacheConfig.watermark,
            )
        )
        self.config = SchedulerConfig(max_num_seqs=seats, preemption="recompute")
        self.scheduler = Scheduler(self.config, self.manager)
        self.jobs: dict[Hashable, Job] = {
            key: Job(key, request, Sequence(key, [0] * request.prompt_len), final_length(request))
            for key, request in enumerate(load.requests)
        }
        self.queue = deque(self.jobs.values())
        self.inside: dict[int, Job] = {}  # with a piece, in the order in which they came

    def run(self) -> Outcome:
        while self.queue or self.scheduler.has_unfinished:
            is_crowded = self._let_in()
            output = self.scheduler.schedule()
            assert not output.rejected, output.rejected
            self._note(output, is_crowded or self.scheduler.num_waiting_for_blocks > 0)
            self._complete(output)
            self.outcome.steps += 1
        self.outcome.preemptions += sum(self.scheduler.num_preemptions.values())
        self.outcome.recomputed += self.scheduler.recomputed_tokens
        self.ledger.close(self.outcome)
        self.manager.check_invariants()
        assert self.manager.stats().gpu.num_used == 0
        return self.outcome

    def _let_in(self) -> bool:
        """Hand requests to the scheduler while their pieces and the next step have room.

        Returns whether the next one found no place.
        """
        room = self.config.max_num_batched_tokens - sum(
            len(job.seq) - job.computed for job in self.inside.values()
        )
        while self.queue and (self.pieces is None or (room > 0 and len(self.inside) < self.seats)):
            job = self.queue[0]
            if self.pieces:
                if self.way.on_overflow == "abort" and len(job.seq) > self.load.typical:
                    self.outcome.aborted += 1
                    self.queue.popleft()
                    continue
                if not self.pieces.take(job.key, len(job.seq), job.final):
                    return True
                self.inside[job.key] = job
            self.queue.popleft()
            self.scheduler.add(SequenceGroup(job.key, [job.seq]))
            room -= len(job.seq)
        return False

    def _note(self, output: SchedulerOutput, is_crowded: bool) -> None:
        """Who holds what while the step runs."""
        rows = zip(output.seqs, output.query_lens, output.context_lens, strict=True)
        for seq, query_len, context_len in rows:
            self.jobs[seq.seq_id].computed = context_len + query_len
        if self.pieces:
            jobs = list(self.inside.values())
            held = [self.pieces.held[job.key] for job in jobs]
        else:
            jobs = [self.jobs[group.request_id] for group in self.scheduler.running]
            held = [-(-len(job.seq) // PAGE) * PAGE for job in jobs]
            if self.outcome.steps % CHECK_EVERY == 0:
                assert sum(held) == self.manager.stats().gpu.num_used * PAGE
        self.ledger.add(jobs, held, is_crowded)

    def _complete(self, output: SchedulerOutput) -> None:
        """Every sequence at its end gets a token; the finished leave; pieces grow."""
        at_end = [
            self.jobs[seq.seq_id]
            for seq, reaches_end in zip(output.seqs, output.reaches_end, strict=True)
            if reaches_end
        ]
        finished = [job for job in at_end if job.is_last]
        self.scheduler.update(output, {job.key: 0 for job in at_end}, [job.key for job in finished])
        for job in finished:
            self.outcome.requests += 1
            self.outcome.tokens += job.request.output_len
            if self.pieces:
                self._leave(job)
        if self.pieces and self.way.on_overflow:
            self._overflow(self.pieces)

    def _overflow(self, pieces: Pieces) -> None:
        """Sequences without a slot for their next token, the first that came in first."""
        for job in list(self.inside.values()):
            if job.key not in self.inside or len(job.seq) <= pieces.held[job.key]:
                continue
            if self.way.on_overflow == "abort":
                self.outcome.aborted += 1
                self.scheduler.abort(job.key)
                self._leave(job)
                continue
            while job.key in self.inside and not pieces.grow(job.key):
                self._preempt(next(reversed(self.inside.values())))
            if job.key in self.inside:
                self.outcome.copied += job.computed

    def _preempt(self, job: Job) -> None:
        """It gives up its piece, and is the next to come in, with the tokens it has by then."""
        self.outcome.preemptions += 1
        self.outcome.recomputed += job.computed
        job.computed = 0
        self.scheduler.abort(job.key)
        self._leave(job)
        self.queue.appendleft(job)

    def _leave(self, job: Job) -> None:
        assert self.pieces is not None
        self.pieces.give_back(job.key)
        del self.inside[job.key]
