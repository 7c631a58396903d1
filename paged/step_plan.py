"""What a step will do, while it is being decided: rows, movements, and groups that give way."""

from __future__ import annotations

from .block_manager import BlockSpaceManager
from .demand import demand_of_waiting
from .job import Job, Row
from .movements import Movements
from .queues import Queues
from .scheduler_config import SchedulerConfig
from .scheduler_output import SchedulerOutput
from .sequence import SequenceLike


class StepPlan:
    """The output under way. Moves jobs between the queues and their blocks between the pools.

    budget        tokens that may still be computed in the step
    computing     groups that compute more than a token per sequence, or have just come in
    lacks_blocks  somebody gave way or stays out for want of blocks
    """

    def __init__(self, config: SchedulerConfig, manager: BlockSpaceManager, queues: Queues) -> None:
        self.config = config
        self.manager = manager
        self.queues = queues
        self.output = SchedulerOutput()
        self.movements = Movements(manager.gpu.ref_counts)
        self.budget = config.max_num_batched_tokens
        self.computing: list[Job] = []
        self.lacks_blocks = False
        self.recomputed_tokens = 0
        self.prompt_tokens = 0  # of groups that came in for the first time

    def finish(self) -> SchedulerOutput:
        """The output, complete."""
        output, movements = self.output, self.movements
        output.swap_out, output.swap_in = movements.swap_out, movements.swap_in
        output.copies = movements.copies
        return output

    # Rows

    def compute(self, job: Job) -> bool:
        """Plan the next tokens of a running group; False when it gets none."""
        rows = job.rows(self.manager.tables, self.budget)
        self.add(rows)
        if rows:
            self.computing.append(job)
        return bool(rows)

    def add(self, rows: list[Row]) -> None:
        output = self.output
        for seq, query_len, context_len, reaches_end in rows:
            output.seqs.append(seq)
            output.query_lens.append(query_len)
            output.context_lens.append(context_len)
            output.reaches_end.append(reaches_end)
            self.budget -= query_len

    def add_decodes(self, seqs: list[SequenceLike]) -> None:
        """Rows of the last token each."""
        self.output.seqs += seqs
        self.output.query_lens += [1] * len(seqs)
        self.output.context_lens += [len(seq.token_ids) - 1 for seq in seqs]
        self.output.reaches_end += [True] * len(seqs)
        self.budget -= len(seqs)

    def num_planned(self, jobs: list[Job]) -> int:
        """Tokens of these groups that the plan has so far."""
        seq_ids = {seq.seq_id for job in jobs for seq in job.seqs}
        rows = zip(self.output.seqs, self.output.query_lens, strict=True)
        return sum(query_len for seq, query_len in rows if seq.seq_id in seq_ids)

    def _forget(self, job: Job) -> None:
        """Take a group's rows out of the plan."""
        output, seq_ids = self.output, {seq.seq_id for seq in job.seqs}
        columns = output.seqs, output.query_lens, output.context_lens, output.reaches_end
        rows = list(zip(*columns, strict=True))
        for column in columns:
            column.clear()
        self.budget += sum(query_len for _, query_len, _, _ in rows)
        self.add([row for row in rows if row[0].seq_id not in seq_ids])
        self.computing = [other for other in self.computing if other is not job]

    # Groups that give way

    def preempt(self, job: Job) -> None:
        """Take the blocks of a running group."""
        kind = self._kind_of_preemption(job)
        if kind is None:
            self.reject(
                job,
                f"it had to give way, the CPU pool has {self.manager.cpu.num_free} free blocks, "
                f"and it is too long to be computed again; {self.pool()}",
            )
            return
        self._forget(job)
        job.returns = True
        if kind == "swap":
            self.movements.add_swap_out(self.manager.swap_out(job.as_group()))
            self.queues.move(job, "swapped")
        else:
            tables = self.manager.tables
            job.lost = {seq.seq_id: tables[seq.seq_id].num_computed for seq in job.seqs}
            job.leads.clear()
            for seq in job.seqs:
                self.manager.free(seq)
            self.queues.move(job, "waiting")
        self.movements.drop_freed()
        self.output.preempted[job.request_id] = kind

    def _kind_of_preemption(self, job: Job) -> str | None:
        """What is to be done if it can be done, else the other; None when neither can."""
        config, manager = self.config, self.manager
        tables = [manager.tables[seq.seq_id] for seq in job.seqs]
        is_free = all(table.num_computed <= table.num_cached for table in tables)
        needed = demand_of_waiting(job, manager, config.num_lookahead_slots).num_blocks
        possible = {
            "swap": manager.can_swap_out(job.as_group()),
            "recompute": needed <= manager.gpu.num_blocks,  # behind a sliding window it held fewer
        }
        if is_free or config.preemption == "recompute":
            order = ("recompute", "swap")
        else:
            order = ("swap", "recompute")
        return next((kind for kind in order if possible[kind]), None)

    def reject(self, job: Job, reason: str) -> None:
        """A group that can never run leaves."""
        self._forget(job)
        if job.state != "waiting":
            for seq in job.seqs:
                self.manager.free(seq)
        self.queues.remove(job)
        self.movements.drop_freed()
        self.output.rejected[job.request_id] = reason

    def pool(self) -> str:
        """For reasons."""
        manager = self.manager
        return f"the pool has {manager.gpu.num_blocks} blocks of {manager.config.block_size} tokens"
