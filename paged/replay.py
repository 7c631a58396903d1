"""The main job: replay a request trace with continuous batching over a paged KV cache.

Every step schedules a ragged batch of prompts and single tokens (`scheduler`), notes who holds which
memory (`replay_memory`), and in each layer writes K and V into pages, attends over them and does
the same densely (`synthetic`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paged.block_manager import BlockSpaceManager
from paged.config import CacheConfig, block_bytes, is_cpu
from paged.provenance import commit, versions
from paged.replay_config import ReplayConfig, ReplayError, final_length, pool_size
from paged.replay_load import ReplayLoad
from paged.replay_memory import MemoryLog
from paged.replay_report import ReplayReport
from paged.scheduler import Scheduler
from paged.scheduler_config import SchedulerConfig
from paged.stopwatch import Stopwatch
from paged.synthetic import SyntheticModel
from paged.trace import Request


def replay_trace(
    requests: list[Request], config: ReplayConfig, *, progress: bool = False
) -> ReplayReport:
    """Run every request to its end and report.

    Tokens and vectors are stand-ins that depend on `config.seed`. `progress` shows a bar on stderr.
    Raises ReplayError before anything runs: no requests, one that can never fit into the pool, an
    absent device, too little memory.
    """
    from tqdm import tqdm

    if not requests:
        raise ReplayError("requests is empty; there is nothing to replay")
    clipped = [request.clipped(config.max_length) for request in requests]
    num_blocks = pool_size(clipped, config)
    clock = Stopwatch(device_wait(config.device))
    model = SyntheticModel(config, num_blocks, clock)
    manager = BlockSpaceManager(
        CacheConfig(
            block_size=config.block_size,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=config.num_cpu_blocks,
            enable_prefix_caching=config.prefix_cache,
            hash_seed=config.seed,
        )
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        ),
        manager,
    )
    load = ReplayLoad(clipped, scheduler, config.seed)
    steps_short_of_blocks = 0
    memory = MemoryLog(config.block_size, num_blocks, max(map(final_length, clipped)))

    with (
        torch_threads(config.threads),
        tqdm(total=len(requests), unit=" requests", disable=not progress) as bar,
    ):
        while load.unfinished:
            load.arrive()
            with clock("manager"):
                output = scheduler.schedule()
                batch = manager.build_batch(
                    output.seqs,
                    output.query_lens,
                    context_lens=output.context_lens,
                    device=config.device,
                )
            steps_short_of_blocks += scheduler.num_waiting_for_blocks > 0
            memory.note(manager, load.running())
            model.step(output, batch)
            with clock("manager"):
                num_finished = load.answer(output)
            bar.update(num_finished)

    stats = manager.stats()
    return ReplayReport(
        config=config,
        backend=config.backend or ("torch" if is_cpu(config.device) else "triton"),
        requests=len(requests),
        requests_clipped=sum(map(operator.ne, requests, clipped)),
        steps=memory.paged.steps,
        prompt_tokens=sum(request.prompt_len for request in clipped),
        generated_tokens=sum(request.output_len for request in clipped),
        steps_short_of_blocks=steps_short_of_blocks,
        preemptions=dict(scheduler.num_preemptions),
        recomputed_tokens=scheduler.recomputed_tokens,
        prefix_queried_tokens=stats.prefix_queried_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        num_blocks=num_blocks,
        bytes_per_token=block_bytes(
            1, config.kv_heads, config.head_dim, config.dtype, config.layers
        ),
        memory=memory,
        seconds=dict(clock.seconds),
        max_error=model.max_error,
        max_error_dense=model.max_error_dense,
        rows_checked=model.rows_checked,
        versions=versions(),
        commit=commit(),
    )


def device_wait(device: str) -> Callable[[], None]:
    """A function that returns when `device` has nothing left to do; ReplayError if it is absent."""
    import torch

    try:
        kind = torch.empty(1, device=device).device.type
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ReplayError(f"device {device!r} is not at hand: {reason}") from error
    if kind not in ("cpu", "cuda"):
        raise ReplayError(f"device is {device!r}; it must be cpu or a cuda device")
    return torch.cuda.synchronize if kind == "cuda" else lambda: None


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use that many threads on the CPU, for a while.

    Its small parallel regions wait for all their threads: next to other work on the machine, two
    threads were seen to take 16 times as long as one.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
