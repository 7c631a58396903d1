"""A trace through the real scheduler and block manager, without a model.

Each step schedules, pretends that K, V and tokens were computed, and updates. So everything that
bookkeeping decides is as it would be in an engine: who waits, who gives way, what is found in the
prefix cache, how many blocks are held. Only time is missing: it is counted in steps.
"""

from __future__ import annotations

from bisect import bisect_right
from time import process_time

from paged.block_manager import BlockSpaceManager
from paged.config import CacheConfig, check_kind
from paged.scheduler import Scheduler
from paged.scheduler_config import SchedulerConfig
from paged.scheduler_output import SchedulerOutput
from paged.sequence import Sequence, SequenceGroup
from paged.trace import Request

from .recorder import Recorder
from .replay_report import ReplayReport
from .replay_setup import arrival_steps, sized_for
from .traffic import StandIns, Traffic, TuningError, as_requests

QUEUE = 64  # requests that wait in the scheduler; the others outside, where they take no memory


def replay(
    trace: Traffic,
    config: CacheConfig | None = None,
    *,
    scheduler_config: SchedulerConfig | None = None,
    load: float | None = 0.8,
    limit: int | None = None,
    progress: bool = False,
) -> ReplayReport:
    """Run every request of a trace to its end and report what the pool and the queues went through.

    config: of the manager; None: blocks of 16, with prefix caching if the trace has hash ids.
        Without `num_gpu_blocks` the pool has room for as many of the longest requests as run at
        once, so that its peak tells what the traffic needs.
    load: share of the scheduler's capacity that the trace asks for on average: its clock is scaled
        to that. The capacity is what `max_num_batched_tokens` and `max_num_seqs` allow per step,
        cached prefixes not counted. None: all requests are there from the start.
    limit: only the first so many requests.

    Tokens are stand-ins: prompts share what the trace's hash ids share, and nothing else. Requests
    are first come, first served. TuningError or TraceError for a trace that holds nothing,
    TuningError for a load not above 0.
    """
    from tqdm import tqdm

    run = Replay(as_requests(trace, limit=limit), config, scheduler_config, load=load)
    with tqdm(total=len(run.requests), unit=" requests", disable=not progress) as bar:
        while run.unfinished:
            bar.update(run.step())
    return run.report()


class Replay:
    """One run, step by step. `host_seconds` is CPU time of scheduler and manager alone.

    with_batches: also build the arrays of every step, as an engine does.
    """

    def __init__(
        self,
        requests: list[Request],
        config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        *,
        load: float | None = 0.8,
        with_batches: bool = False,
    ) -> None:
        check_kind("config", config, CacheConfig, optional=True)
        check_kind("scheduler_config", scheduler_config, SchedulerConfig, optional=True)
        if not requests:
            raise TuningError("requests is empty; it must hold a request")
        scheduler_config = scheduler_config or SchedulerConfig()
        self.requests = requests
        self.config = sized_for(requests, config, scheduler_config)
        self.manager = BlockSpaceManager(self.config)
        self.scheduler = Scheduler(scheduler_config, self.manager)
        self.recorder = Recorder(self.scheduler)
        self.host_seconds = 0.0
        self.now = 0  # steps, those skipped because nothing was there included
        self._with_batches = with_batches
        self._stand_ins = StandIns()
        self._arrivals = arrival_steps(requests, scheduler_config, load)
        self._next = 0  # the first request that is not with the scheduler yet
        self._left = [request.output_len for request in requests]  # tokens still to come

    @property
    def unfinished(self) -> bool:
        """Whether any request is still on its way."""
        return self._next < len(self.requests) or self.scheduler.has_unfinished

    def step(self) -> int:
        """One step of the scheduler; returns how many requests left."""
        num_kept_back = self._arrive()
        start = process_time()
        output = self.scheduler.schedule()
        if self._with_batches:
            self.manager.build_batch(
                output.seqs, output.query_lens, context_lens=output.context_lens
            )
        self.host_seconds += process_time() - start
        self.recorder.note(self.now, output, num_kept_back)
        tokens, finished = self._results(output)
        start = process_time()
        self.scheduler.update(output, tokens, finished)
        self.host_seconds += process_time() - start
        self.now += 1
        return len(finished) + len(output.rejected)

    def report(self) -> ReplayReport:
        """What was seen so far."""
        return ReplayReport.of(self.recorder, self.requests, self.now, self.host_seconds)

    def _arrive(self) -> int:
        """Queue the requests whose time has come; with nothing else to do, go to the next one's.

        Returns how many have arrived and wait outside the scheduler.
        """
        if not self.scheduler.has_unfinished:
            self.now = max(self.now, self._arrivals[self._next])
        arrived = bisect_right(self._arrivals, self.now)
        if self._next < arrived:
            room = QUEUE - len(self.scheduler.waiting)
            for index in range(self._next, min(arrived, self._next + room)):
                sequence = Sequence(index, ())
                sequence.token_ids = self._stand_ins.prompt(self.requests[index], index)
                self.scheduler.add(SequenceGroup(index, [sequence], arrival_time=float(index)))
                self.recorder.arrivals[index] = self._arrivals[index]
                self._next += 1
        return arrived - self._next

    def _results(self, output: SchedulerOutput) -> tuple[dict[int, int], list[int]]:
        """A token for each sequence that reached its end and has one to come; who is finished."""
        tokens: dict[int, int] = {}
        finished: list[int] = []
        left = self._left
        for seq, reaches_end in zip(output.seqs, output.reaches_end, strict=True):
            if reaches_end:
                index = seq.seq_id
                if left[index]:
                    left[index] -= 1
                    tokens[index] = StandIns.output(index)
                if not left[index]:
                    finished.append(index)
        return tokens, finished
