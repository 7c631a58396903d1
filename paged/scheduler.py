"""Continuous batching: which sequences compute which tokens in the next step.

    scheduler.add(group)
    output = scheduler.schedule()
    cache.swap_out(output.swap_out); cache.swap_in(output.swap_in); cache.copy_blocks(output.copies)
    batch = manager.build_batch(
        output.seqs, output.query_lens, context_lens=output.context_lens
    )
    ...  # write K and V, attend, sample a token for each row that reaches its end
    scheduler.update(output, {seq_id: token, ...}, finished=[seq_id, ...])

Requests join and leave between any two steps (Yu et al. 2022, "Orca"); groups are admitted,
preempted and resumed as a whole (Kwon et al. 2023, section 4.5); long prompts are computed in
parts beside other work (Agrawal et al. 2024, "Sarathi-Serve").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import repr as shortened
from typing import Any

from .arrivals import let_in
from .block_manager import BlockSpaceManager
from .config import check_kind
from .job import Job
from .queues import Queues
from .running import go_on
from .scheduler_config import SchedulerConfig
from .scheduler_output import SchedulerOutput
from .sequence import (
    SequenceGroup,
    SequenceLike,
    as_list,
    check_hashable,
    check_sequence,
    checked_tokens,
)
from .step_plan import StepPlan


class Scheduler:
    """Queues of groups over one manager. Tokens of live sequences change only in `update`.

    num_preemptions       "swap" and "recompute" -> how often
    recomputed_tokens     tokens that preempted groups had to compute again
    num_rejected          groups that could never run
    num_finished          groups whose sequences have all finished
    num_prompt_tokens     of the groups that were admitted, each once, cached tokens included
    num_generated_tokens  that were appended
    """

    def __init__(self, config: SchedulerConfig, manager: BlockSpaceManager) -> None:
        check_kind("config", config, SchedulerConfig)
        check_kind("manager", manager, BlockSpaceManager)
        self.config = config
        self.manager = manager
        self.num_preemptions = {"swap": 0, "recompute": 0}
        self.recomputed_tokens = 0
        self.num_rejected = 0
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._queues = Queues()
        self._num_added = 0
        self._lacks_blocks = False  # in the last step
        self._last: SchedulerOutput | None = None  # for which `update` is still to come
        self._aborted: set[Any] = set()  # sequences that are gone since then

    # Queues

    @property
    def waiting(self) -> list[SequenceGroup]:
        """Groups without blocks, most urgent first; those that ran before come before new ones."""
        return [job.group for job in self._queues.waiting]

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups with GPU blocks, most urgent first."""
        return [job.group for job in self._queues.running]

    @property
    def swapped(self) -> list[SequenceGroup]:
        """Groups with CPU blocks, most urgent first."""
        return [job.group for job in self._queues.swapped]

    @property
    def has_unfinished(self) -> bool:
        """Whether any group is still here."""
        return bool(self._queues.jobs)

    @property
    def num_sequences(self) -> dict[str, int]:
        """Sequences that go on: "waiting", "running" and "swapped" -> how many."""
        return {
            state: sum(len(job.seqs) for job in getattr(self._queues, state))
            for state in ("waiting", "running", "swapped")
        }

    @property
    def num_waiting_for_blocks(self) -> int:
        """Sequences kept out by the last step's want of blocks, swapped ones included."""
        if not self._lacks_blocks:
            return 0
        counts = self.num_sequences
        return counts["waiting"] + counts["swapped"]

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. While they go on, `group.seqs` will name the forks of its sequences."""
        if not isinstance(group, SequenceGroup):
            raise TypeError(
                f"group is {shortened(group)}; it must be a SequenceGroup, also for one sequence: "
                f"SequenceGroup(request_id, [sequence])"
            )
        if group.request_id in self._queues.jobs:
            raise ValueError(f"request_id {group.request_id!r} belongs to a live group")
        for seq in group.seqs:
            self._check_new(seq)
            if not len(seq):
                raise ValueError(f"sequence {seq.seq_id!r} has no tokens; it must have a prompt")
        checked_tokens(group.seqs[0].token_ids, "token_ids")
        self.manager.can_allocate(group)  # raises where `schedule` would, at any later step
        priority = group.priority if self.config.policy == "priority" else 0
        self._queues.add(Job(group, priority, self._num_added))
        self._num_added += 1

    def abort(self, request_id: Any) -> None:
        """Drop a group at any stage and free its blocks."""
        check_hashable("request_id", request_id)
        job = self._queues.jobs.get(request_id)
        if job is None:
            raise ValueError(f"request_id {request_id!r} belongs to no live group")
        for seq in job.seqs:
            self._aborted.add(seq.seq_id)
            if job.state != "waiting":
                self.manager.free(seq)
        self._queues.remove(job)

    def fork(self, parent: SequenceLike, child: SequenceLike) -> None:
        """Add `child`, which has the tokens of `parent`, to its group.

        Between `schedule` and `update` as well: if the parent reaches its end in that step, `update`
        takes a token for the child, too.
        """
        check_sequence("parent", parent)
        check_sequence("child", child)
        if not self._queues.is_live(parent):
            raise ValueError(f"parent {parent.seq_id!r} is no live sequence")
        self._check_new(child)
        job = self._queues.members[parent.seq_id][1]
        most = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        if len(job.seqs) == most:
            raise ValueError(
                f"child {child.seq_id!r} is one too many: a group has at most {most} sequences "
                f"(max_num_seqs, max_num_batched_tokens)"
            )
        if list(child.token_ids) != list(parent.token_ids):
            raise ValueError(f"child {child.seq_id!r} and {parent.seq_id!r} differ in tokens")
        if job.state == "waiting":
            self.manager.admission.check_keys(parent, child)
        else:
            self.manager.fork(parent, child)
            table = self.manager.tables[parent.seq_id]
            if table.num_computed < table.num_tokens:
                job.follow(child, parent, table.num_tokens)
        job.add(child, behind=parent)
        job.group.seqs.append(child)
        self._queues.members[child.seq_id] = (child, job)

    def _check_new(self, seq: SequenceLike) -> None:
        if seq.seq_id in self._queues.members:
            raise ValueError(f"seq_id {seq.seq_id!r} belongs to a live sequence")

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Decide on the next step.

        Called again without `update`, because the step failed or groups were aborted, it plans the
        same work anew; the movements of the first output count as done.
        """
        plan = StepPlan(self.config, self.manager, self._queues)
        go_on(plan)
        if not plan.lacks_blocks:
            let_in(plan)
        self._last = output = plan.finish()
        self._aborted.clear()
        self._lacks_blocks = plan.lacks_blocks
        self.recomputed_tokens += plan.recomputed_tokens
        self.num_prompt_tokens += plan.prompt_tokens
        self.num_rejected += len(output.rejected)
        for kind in output.preempted.values():
            self.num_preemptions[kind] += 1
        return output

    def update(
        self, output: SchedulerOutput, tokens: Mapping[Any, int], finished: Iterable[Any] = ()
    ) -> None:
        """The step is done: K and V are written, these tokens were sampled.

        tokens    seq_id -> next token of each sequence that reached its end, and of those that
                  were forked from it since `schedule`; tokens of other live sequences are ignored
        finished  seq_ids that go no further, with a last token or without

        Sequences aborted since `schedule` are passed over.
        """
        if self._last is None or output is not self._last:
            raise ValueError("output must be what schedule returned last, and be given only once")
        if not isinstance(tokens, Mapping):
            raise TypeError(f"tokens is {shortened(tokens)}; it must be a dict seq_id -> token")
        finished = dict.fromkeys(as_list("finished", finished, "seq_ids"))
        members = self._queues.members
        unknown = (tokens.keys() | finished.keys()) - members.keys() - self._aborted
        if unknown:
            raise ValueError(
                f"tokens or finished name unknown sequences {sorted(map(repr, unknown))}"
            )
        columns = output.seqs, output.query_lens, output.context_lens, output.reaches_end
        rows = list(zip(*columns, strict=True))
        if self._aborted:
            rows = [row for row in rows if row[0].seq_id not in self._aborted]
        leading = [job for job in self._queues.running if job.leads]
        at_end = {seq.seq_id: seq for seq, _, _, reaches_end in rows if reaches_end}
        for job in leading:
            at_end.update((seq.seq_id, seq) for seq in job.seqs if job.ends_with(seq, at_end))
        missing = at_end.keys() - tokens.keys() - finished.keys()
        if missing:
            raise ValueError(f"tokens lacks one for sequences {sorted(map(repr, missing))}")
        grown = [seq for seq_id, seq in at_end.items() if seq_id in tokens]
        new_tokens = checked_tokens([tokens[seq.seq_id] for seq in grown])

        self._last = None
        mark_computed = self.manager.mark_computed
        for seq, query_len, context_len, _ in rows:
            mark_computed(seq, context_len + query_len)
        for job in leading:
            job.catch_up(self.manager)
        for seq, token in zip(grown, new_tokens, strict=True):
            seq.append_token(token)
        self.num_generated_tokens += len(grown)
        for seq_id in finished:
            if seq_id in members:
                self._finish(*members[seq_id])

    def _finish(self, seq: SequenceLike, job: Job) -> None:
        if job.state != "waiting":
            self.manager.free(seq)
        del self._queues.members[seq.seq_id]
        job.remove(seq)
        if not job.seqs:
            self._queues.remove(job)
            self.num_finished += 1
