"""What an engine counts on its way, for the summary and for advice."""

from __future__ import annotations

from paged.advice import Load
from paged.scheduler import Scheduler
from paged.scheduler_output import SchedulerOutput

from .request import Request

_REMEMBERED = 1 << 16


class Tally:
    """Counts over the life of an engine.

    steps            that the model has computed
    computed_tokens  whose K and V they wrote
    peak_blocks      GPU blocks used at once
    requests, hits   requests that were scheduled; those of them that found cached blocks
    cached_tokens    that they found
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.steps = 0
        self.computed_tokens = 0
        self.peak_blocks = 0
        self.requests = 0
        self.hits = 0
        self.cached_tokens = 0
        self._short_of_blocks = 0
        self._short_of_seats = 0
        self._alike = 0
        self._beginnings: set[int] = set()  # hashes of first blocks

    def add_request(self, request: Request) -> None:
        """One that has just been scheduled for the first time."""
        self.requests += 1
        self.cached_tokens += request.metrics.num_cached_tokens
        self.hits += request.metrics.num_cached_tokens > 0
        block_size = self._scheduler.manager.config.block_size
        if len(request.prompt_token_ids) > block_size:  # else there is nothing to share
            beginning = hash(tuple(request.prompt_token_ids[:block_size]))
            self._alike += beginning in self._beginnings
            if len(self._beginnings) == _REMEMBERED:
                self._beginnings.clear()
            self._beginnings.add(beginning)

    def add_step(self, scheduled: SchedulerOutput) -> None:
        """One that the model has computed."""
        scheduler = self._scheduler
        self.steps += 1
        self.computed_tokens += scheduled.num_scheduled_tokens
        self.peak_blocks = max(self.peak_blocks, scheduler.manager.gpu.num_used)
        if scheduler.num_waiting_for_blocks:
            self._short_of_blocks += 1
        elif scheduler.num_sequences["waiting"]:
            self._short_of_seats += 1

    def load(self) -> Load:
        """All of it, with what the scheduler counts."""
        scheduler, config = self._scheduler, self._scheduler.manager.config
        return Load(
            steps=self.steps,
            steps_short_of_blocks=self._short_of_blocks,
            steps_short_of_seats=self._short_of_seats,
            num_blocks=scheduler.manager.gpu.num_blocks,
            peak_blocks=self.peak_blocks,
            num_cpu_blocks=config.num_cpu_blocks,
            requests=self.requests,
            swapped=scheduler.num_preemptions["swap"],
            recomputed=scheduler.num_preemptions["recompute"],
            recomputed_tokens=scheduler.recomputed_tokens,
            computed_tokens=self.computed_tokens,
            alike=self._alike,
            hits=self.hits,
            has_prefix_cache=config.enable_prefix_caching,
        )
