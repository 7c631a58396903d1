"""Swapped and waiting groups come in while there are seats, budget and blocks."""

from __future__ import annotations

import math
from bisect import bisect_left

from .admission import AllocStatus
from .demand import Demand, demand_of_swapped, demand_of_waiting, held_alone, take_blocks
from .job import Job
from .running import give_slots
from .step_plan import StepPlan


def let_in(plan: StepPlan) -> None:
    """The most urgent first, until one does not fit, so that none is overtaken for its size."""
    running, most_seqs = plan.queues.running, plan.config.max_num_seqs
    num_running = sum([len(job.seqs) for job in running])
    num_standing_back = 0
    limit = math.inf  # priority of the most urgent victim: nobody less urgent takes its place
    for job in plan.queues.candidates():
        if job.priority >= limit:
            return
        is_full = plan.budget < 1 or num_running >= most_seqs
        if is_full and job.priority >= running[-1].priority:
            return
        demand = _demand(plan, job)
        if _stands_back(plan, job, demand):
            num_standing_back += 1
            if num_standing_back > most_seqs:
                return
            continue
        reason = _never(plan, job, demand)
        if reason:
            plan.reject(job, reason)
            continue
        victims = _victims(plan, job, demand, num_running + len(job.seqs))
        if victims is None:
            plan.lacks_blocks |= demand.status(plan.manager) is not AllocStatus.OK
            return
        for victim in victims:
            plan.preempt(victim)
            limit = min(limit, victim.priority)
        _enter(plan, job)
        num_running += len(job.seqs) - sum([len(victim.seqs) for victim in victims])


def _demand(plan: StepPlan, job: Job) -> Demand:
    demand_of = demand_of_swapped if job.state == "swapped" else demand_of_waiting
    return demand_of(job, plan.manager, plan.config.num_lookahead_slots)


def _in_parts(plan: StepPlan, job: Job) -> bool:
    """Whether the tokens that a group has to compute may be spread over steps."""
    return plan.config.enable_chunked_prefill or job.returns


def _stands_back(plan: StepPlan, job: Job, demand: Demand) -> bool:
    """Whether a block that this group needs next, and could find in the cache, is being computed."""
    cache, first, num_hits = plan.manager.cache, job.seqs[0], len(demand.hits)
    if cache is None or job.state == "swapped":
        return False
    digests = cache.hasher.chain_of(first).digests
    if num_hits >= min(len(digests), (len(first) - 1) // plan.manager.config.block_size):
        return False
    chains = (
        plan.manager.tables[seq.seq_id].chain for other in plan.computing for seq in other.seqs
    )
    next_block = slice(num_hits, num_hits + 1)  # its digest covers all before it
    return any(chain and chain.digests[next_block] == digests[next_block] for chain in chains)


def _never(plan: StepPlan, job: Job, demand: Demand) -> str:
    """Why a group can never run; empty when it can."""
    num_seqs, most_seqs = len(job.seqs), plan.config.max_num_seqs
    most_tokens = plan.config.max_num_batched_tokens
    if num_seqs > most_seqs:
        return f"{num_seqs} sequences, max_num_seqs is {most_seqs}"
    if num_seqs > most_tokens:
        return f"{num_seqs} sequences, max_num_batched_tokens is {most_tokens}"
    if demand.num_tokens > most_tokens and not _in_parts(plan, job):
        return (
            f"{demand.num_tokens} tokens to compute, max_num_batched_tokens is {most_tokens} and "
            f"chunked prefill is off"
        )
    if demand.status(plan.manager) is AllocStatus.NEVER:
        return f"{demand.num_blocks} blocks needed; {plan.pool()}"
    return ""


def _victims(plan: StepPlan, job: Job, demand: Demand, num_seqs: int) -> list[Job] | None:
    """The groups to preempt so that `job` fits, mostly none; None when it cannot fit now.

    Only strictly less urgent ones give way, never in vain, and the least urgent first, whatever it
    holds: nobody runs who is less urgent than one that had to go.
    num_seqs: sequences that run if nobody gives way, those of `job` included.
    """
    one_token_each = demand.num_tokens <= len(job.seqs)
    least_tokens = 1 if _in_parts(plan, job) and not one_token_each else demand.num_tokens

    def fits(victims: list[Job]) -> bool:
        return (
            num_seqs - sum(len(victim.seqs) for victim in victims) <= plan.config.max_num_seqs
            and plan.budget + plan.num_planned(victims) >= least_tokens
            and demand.status(plan.manager, held_alone(victims, plan.manager)) is AllocStatus.OK
        )

    if fits([]):
        return []
    less_urgent = [
        other for other in reversed(plan.queues.running) if other.priority > job.priority
    ]
    if not less_urgent or not fits(less_urgent):
        return None
    counts = range(1, len(less_urgent) + 1)
    fewest = bisect_left(counts, True, key=lambda count: fits(less_urgent[:count])) + 1
    return less_urgent[:fewest]


def _enter(plan: StepPlan, job: Job) -> None:
    """A group that fits gets its blocks and its first tokens to compute."""
    manager = plan.manager
    was_swapped = job.state == "swapped"
    if was_swapped:
        plan.movements.add_swap_in(manager.swap_in(job.as_group()))
    else:
        plan.prompt_tokens += 0 if job.returns else len(job.seqs[0])
        take_blocks(job, manager)
        for seq in job.seqs:
            start = job.start(seq, manager.tables)
            plan.recomputed_tokens += max(0, job.lost.pop(seq.seq_id, 0) - start)
    plan.queues.move(job, "running")
    if was_swapped:
        give_slots(plan, job, 0 if job.leads else plan.config.num_lookahead_slots)
    plan.compute(job)
