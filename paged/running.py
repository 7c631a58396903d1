"""The running groups go on; while there are too few blocks, the least urgent gives way."""

from __future__ import annotations

from .errors import NoFreeBlocksError
from .job import Job
from .sequence import SequenceLike
from .step_plan import StepPlan


def go_on(plan: StepPlan) -> None:
    """Plan the running groups' next tokens.

    Decoding groups come first: a token each, so that a long prompt keeps nobody waiting. The rest
    of the budget goes to groups with more tokens to compute. Both in order of urgency. When one
    gets none, no budget is left for those that are not running.
    """
    tables, lookahead = plan.manager.tables, plan.config.num_lookahead_slots
    room = min(plan.budget, plan.config.max_num_seqs)  # a decode takes a token and a seat
    everyone = True
    decodes: list[SequenceLike] = []
    prompts = []
    for job in plan.queues.running:  # those that are preempted leave at its end
        if not job.decodes(tables):
            prompts.append(job)
        elif len(job.seqs) > room:
            everyone = False
        elif give_slots(plan, job, lookahead):
            decodes += job.seqs
            room -= len(job.seqs)
    plan.add_decodes(decodes)
    for job in prompts:
        if job.state == "running" and give_slots(plan, job):
            everyone &= _has_seats(plan, job) and plan.compute(job)
    if not everyone:
        plan.budget = 0


def give_slots(plan: StepPlan, job: Job, num_lookahead_slots: int = 0) -> bool:
    """A slot for each token of a group; False when it had to give way itself."""
    append_slots = plan.manager.append_slots
    while True:  # what was given before an error stays, and needs no second copy
        try:
            for seq in job.seqs:
                copies = append_slots(seq, num_lookahead_slots)
                if copies:
                    plan.movements.add_copies(copies)
            return True
        except NoFreeBlocksError as error:  # noqa: PERF203
            if not _make_way(plan, job, error):
                return False


def _has_seats(plan: StepPlan, job: Job) -> bool:
    """Forks may have made more sequences than a step may have."""
    return len(plan.output.seqs) + len(job.seqs) <= plan.config.max_num_seqs


def _make_way(plan: StepPlan, job: Job, error: NoFreeBlocksError) -> bool:
    """Preempt the least urgent running group; False when that is `job`."""
    plan.lacks_blocks = True
    running = plan.queues.running
    victim = running[-1]
    if len(running) > 1:
        plan.preempt(victim)
    else:
        plan.reject(
            job,
            f"{error.needed} more blocks needed and {error.available} left while it runs alone; "
            f"{plan.pool()}",
        )
    return victim is not job
