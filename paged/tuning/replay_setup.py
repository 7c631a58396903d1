"""What a replay starts from: a pool with a size, and the step at which each request arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paged.config import CacheConfig
from paged.replay_config import final_length
from paged.scheduler_config import SchedulerConfig
from paged.trace import Request

from .traffic import TuningError


def sized_for(
    requests: Sequence[Request], config: CacheConfig | None, scheduler_config: SchedulerConfig
) -> CacheConfig:
    """The config with a pool in which `max_num_seqs` of the longest requests fit, unless it has one.

    Without a config, prefixes are cached when the trace has hash ids: otherwise nothing is shared.
    """
    if config is None:
        config = CacheConfig(enable_prefix_caching=requests[0].hash_ids is not None)
    if config.num_gpu_blocks is not None:
        return config
    lengths = sorted(map(final_length, requests), reverse=True)[: scheduler_config.max_num_seqs]
    slots = [length + scheduler_config.num_lookahead_slots for length in lengths]
    num_blocks = sum(-(-number // config.block_size) for number in slots)
    return replace(config, num_gpu_blocks=blocks_for(num_blocks, config.watermark))


def blocks_for(num_used: int, watermark: float) -> int:
    """Blocks of a pool of which so many can be used without touching the watermark."""
    return int(num_used / (1 - watermark)) + 1


def check_load(load: float | None) -> None:
    """Raise TuningError unless it is None or a number above 0."""
    if load is None:
        return
    if isinstance(load, bool) or not isinstance(load, int | float) or not load > 0:
        raise TuningError(f"load is {load!r}; it must be a number above 0, or None")


def arrival_steps(
    requests: Sequence[Request], config: SchedulerConfig, load: float | None
) -> list[int]:
    """The trace's clock, scaled so that it asks for that share of what a step can do.

    load None: all at step 0.
    """
    check_load(load)
    if load is None:
        return [0] * len(requests)
    num_tokens = sum(request.prompt_len + request.output_len for request in requests)
    num_seq_steps = sum(request.output_len for request in requests)
    steps = max(num_tokens / config.max_num_batched_tokens, num_seq_steps / config.max_num_seqs)
    start, end = requests[0].arrival, requests[-1].arrival
    scale = steps / load / (end - start) if end > start else 0.0
    return [int((request.arrival - start) * scale) for request in requests]
