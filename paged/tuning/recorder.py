"""What happens in a run, counted step by step, and time series of it that never get long."""

from __future__ import annotations

from paged.advice import Load
from paged.scheduler import Scheduler
from paged.scheduler_output import SchedulerOutput
from paged.sequence import SequenceLike

MAX_ENTRIES = 512

Series = dict[str, list[float]]


class Recorder:
    """Counts every step. Of the series every step is an entry at first; past MAX_ENTRIES every
    second entry goes and every second step is noted, and so on, so that they stay evenly spread.

    arrivals  index -> step, filled in by the caller
    waits     index -> steps from there until it ran
    rejected  index -> why
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.arrivals: dict[int, int] = {}
        self.waits: dict[int, int] = {}
        self.rejected: dict[int, str] = {}
        self.steps = self.computed_tokens = self.peak_blocks = 0
        self._short_of_blocks = self._short_of_seats = self._alike = self._hits = 0
        self._beginnings: set[int] = set()  # hashes of first blocks
        self._entries: list[dict[str, float]] = []
        self._stride = 1

    def note(self, now: int, output: SchedulerOutput, num_kept_back: int) -> None:
        """The step `now` is scheduled. num_kept_back: requests that wait outside the scheduler."""
        scheduler, waits = self.scheduler, self.waits
        for seq in output.seqs:
            if seq.seq_id not in waits:
                waits[seq.seq_id] = now - self.arrivals[seq.seq_id]
                self._begin(seq)
        self.rejected.update(output.rejected)
        if self.steps % self._stride == 0:
            self._add_entry(now, num_kept_back)
        self.steps += 1
        self.computed_tokens += output.num_scheduled_tokens
        self.peak_blocks = max(self.peak_blocks, scheduler.manager.gpu.num_used)
        if scheduler.num_waiting_for_blocks:
            self._short_of_blocks += 1
        elif scheduler.waiting:
            self._short_of_seats += 1

    def series(self) -> Series:
        """Lists of equal length, by name. Preemptions and tokens are counted from the start."""
        return {name: [entry[name] for entry in self._entries] for name in self._entries[0]}

    def load(self) -> Load:
        """The counts that advice is given by."""
        scheduler, config = self.scheduler, self.scheduler.manager.config
        return Load(
            steps=self.steps,
            steps_short_of_blocks=self._short_of_blocks,
            steps_short_of_seats=self._short_of_seats,
            num_blocks=scheduler.manager.gpu.num_blocks,
            peak_blocks=self.peak_blocks,
            num_cpu_blocks=config.num_cpu_blocks,
            requests=len(self.waits),
            swapped=scheduler.num_preemptions["swap"],
            recomputed=scheduler.num_preemptions["recompute"],
            recomputed_tokens=scheduler.recomputed_tokens,
            computed_tokens=self.computed_tokens,
            alike=self._alike,
            hits=self._hits,
            has_prefix_cache=config.enable_prefix_caching,
        )

    def _begin(self, seq: SequenceLike) -> None:
        """A sequence runs for the first time."""
        manager = self.scheduler.manager
        self._hits += manager.num_cached_tokens(seq) > 0
        if len(seq) > manager.config.block_size:  # else there is nothing to share
            beginning = hash(tuple(seq.token_ids[: manager.config.block_size]))
            self._alike += beginning in self._beginnings
            self._beginnings.add(beginning)

    def _add_entry(self, now: int, num_kept_back: int) -> None:
        scheduler, stats = self.scheduler, self.scheduler.manager.stats()
        gpu, queued = stats.gpu, scheduler.num_sequences
        self._entries.append(
            {
                "step": now,
                "used": gpu.num_used,
                "cached": gpu.num_cached,
                "free": gpu.num_free - gpu.num_cached,
                "internal_fragmentation": stats.internal_fragmentation,
                "running": queued["running"],
                "waiting": queued["waiting"] + num_kept_back,
                "swapped": queued["swapped"],
                "preempted_swap": scheduler.num_preemptions["swap"],
                "preempted_recompute": scheduler.num_preemptions["recompute"],
                "prefix_hit_tokens": stats.prefix_hit_tokens,
                "prefix_queried_tokens": stats.prefix_queried_tokens,
            }
        )
        if len(self._entries) > MAX_ENTRIES:
            self._stride *= 2
            self._entries = self._entries[::2]
