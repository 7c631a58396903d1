"""What the counters of a run say about its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OFTEN = 0.2  # of the steps: less is a burst
FLAGS = {  # of the commands that run kernels
    "num_gpu_blocks": "--num-blocks",
    "num_cpu_blocks": "--num-cpu-blocks",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "enable_prefix_caching": "on without --no-prefix-cache",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What happened in a run. Everything is a count, and what is not known stays 0."""

    steps: int
    steps_short_of_blocks: int = 0  # a request stayed out, or lost its place, for want of blocks
    steps_short_of_seats: int = 0  # one stayed out though there were blocks
    num_blocks: int = 0  # in the GPU pool
    peak_blocks: int = 0  # used at once
    num_cpu_blocks: int = 0
    requests: int = 0
    swapped: int = 0  # preemptions
    recomputed: int = 0  # preemptions
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    alike: int = 0  # requests whose first block was also that of an earlier one
    hits: int = 0  # requests that found cached blocks
    has_prefix_cache: bool = True


def advise(load: Load) -> list[str]:
    """Sentences that name the figure and the setting to change; none when all is well."""
    advice = []
    if load.steps_short_of_blocks > OFTEN * load.steps:
        share = load.steps_short_of_blocks / load.steps
        advice.append(
            f"requests waited for blocks in {share:.0%} of the steps, so the pool of "
            f"{load.num_blocks:,} is too small: raise num_gpu_blocks (or gpu_memory_utilization), "
            f"or lower max_num_seqs"
        )
    elif load.steps_short_of_seats > OFTEN * load.steps and load.peak_blocks < load.num_blocks / 2:
        share = load.steps_short_of_seats / load.steps
        advice.append(
            f"requests waited for a seat in {share:.0%} of the steps, while {load.peak_blocks:,} of "
            f"{load.num_blocks:,} blocks were used at most: raise max_num_seqs or "
            f"max_num_batched_tokens"
        )
    if load.recomputed_tokens > 0.05 * load.computed_tokens:
        share = load.recomputed_tokens / max(load.computed_tokens, 1)
        cpu = "a larger" if load.num_cpu_blocks else "a"
        advice.append(
            f"{_counted(load.recomputed, 'preemption')} made "
            f"{_counted(load.recomputed_tokens, 'token')} be computed again, {share:.0%} of all: {cpu} CPU pool (num_cpu_blocks) lets them be moved instead"
        )
    if load.swapped > 0.5 * load.requests:
        advice.append(
            f"{_counted(load.swapped, 'time')} a request was moved to the CPU pool and back, with "
            f"{_counted(load.requests, 'request')} in all: raise num_gpu_blocks, or lower max_num_seqs"
        )
    if load.alike > 1 and load.hits < load.alike / 2:
        change = (
            "their blocks are taken before they come again: raise num_gpu_blocks"
            if load.has_prefix_cache
            else "set enable_prefix_caching"
        )
        advice.append(
            f"{load.alike:,} prompts began like an earlier one, and {load.hits:,} found that in "
            f"the prefix cache: {change}"
        )
    return advice


def flags_line(advice: Sequence[str], flags: Mapping[str, str] = FLAGS) -> str | None:
    """Which options of a command set what the advice names; None when it names none of them."""
    named = [f"{name} is {flag}" for name, flag in flags.items() if name in " ".join(advice)]
    return f"options here: {', '.join(named)}" if named else None


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
