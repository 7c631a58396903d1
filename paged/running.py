"""The running groups go on; while there are too few blocks, the least urgent gives way."""

from __future__ import annotations

from .errors import NoFreeBlocksError
from .job import Job
from .step_plan import StepPlan


def go_on(plan: StepPlan) -> None:
    """Plan the running groups' next tokens.

    Decoding groups come first: a token each, so that a long prompt keeps nobody waiting. The rest
    of the budget goes to groups with more tokens to compute. Both in order of urgency. When one
    gets none, no budget is left for those that are not running.
    """
    tables, append_slots, output = plan.manager.tables, plan.manager.append_slots, plan.output
    lookahead, max_num_seqs = plan.config.num_lookahead_slots, plan.config.max_num_seqs
    everyone = True
    prompts = []
    for job in plan.queues.running:  # those that are preempted leave at its end
        seq = job.seqs[0]
        table = tables[seq.seq_id]
        context_len = len(seq) - 1
        if len(job.seqs) > 1 or context_len != table.num_tokens - table.num_pending:
            if not job.decodes(tables):
                prompts.append(job)
            elif not _has_seats(plan, job) or len(job.seqs) > plan.budget:
                everyone = False
            elif give_slots(plan, job, lookahead):
                plan.add([(seq, 1, len(seq) - 1, True) for seq in job.seqs])
        elif plan.budget < 1 or len(output.seqs) == max_num_seqs:
            everyone = False
        else:
            try:
                copies = append_slots(seq, lookahead)
            except NoFreeBlocksError as error:
                if not _make_way(plan, job, error) or not give_slots(plan, job, lookahead):
                    continue
            else:
                if copies:
                    plan.movements.add_copies(copies)
            output.seqs.append(seq)
            output.query_lens.append(1)
            output.context_lens.append(context_len)
            output.reaches_end.append(True)
            plan.budget -= 1
    for job in prompts:
        if job.state == "running" and give_slots(plan, job):
            everyone &= _has_seats(plan, job) and plan.compute(job)
    if not everyone:
        plan.budget = 0


def give_slots(plan: StepPlan, job: Job, num_lookahead_slots: int = 0) -> bool:
    """A slot for each token of a group; False when it had to give way itself."""
    while error := _append_slots(plan, job, num_lookahead_slots):
        if not _make_way(plan, job, error):
            return False
    return True


def _append_slots(plan: StepPlan, job: Job, num_lookahead_slots: int) -> NoFreeBlocksError | None:
    """What was given before an error stays, and needs no second copy."""
    try:
        for seq in job.seqs:
            copies = plan.manager.append_slots(seq, num_lookahead_slots)
            if copies:
                plan.movements.add_copies(copies)
    except NoFreeBlocksError as error:
        return error
    return None


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
