"""`python -m paged tune`: which block size and pool for this traffic, and how it would run."""

from __future__ import annotations

import argparse

from paged.advice import flags_line
from paged.config import CacheConfig, check_int
from paged.replay_config import TOLERANCES
from paged.scheduler_config import SchedulerConfig
from paged.sizing import ModelShape
from paged.trace import HASH_BLOCK_TOKENS, Request

from .attention import AttentionShape
from .block_sizes import BLOCK_SIZES, sweep_block_sizes
from .command_options import (
    Answer,
    add_model_arguments,
    add_result_arguments,
    add_traffic_arguments,
    check_results,
    heads_note,
    memory_tokens,
    model,
    positive,
    traffic,
    write_results,
)
from .eviction import fifo, lfu, lru
from .policies import POOL_TOKENS, compare_policies
from .pool_size import clock_line, gib, pool_bytes, pool_sentence, was_short
from .replay_report import ReplayReport
from .replay_setup import check_load
from .replaying import replay
from .side_by_side import first_within

FLAGS = {
    "num_gpu_blocks": "--kv-memory",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
}
REPLAY_COST = 3_000_000  # of the requests in the run at the end: a few seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_traffic_arguments(parser)
    add_model_arguments(parser)
    add, default = parser.add_argument, SchedulerConfig()
    add(
        "--block-sizes",
        type=positive,
        nargs="+",
        default=list(BLOCK_SIZES),
        metavar="TOKENS",
        help="to compare (default: " + " ".join(map(str, BLOCK_SIZES)) + ")",
    )
    add(
        "--kernels",
        action="store_true",
        help="time attention at each block size also without a GPU",
    )
    add("--device", help="for that: cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        default=default.max_num_seqs,
        help="sequences running at once (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=default.max_num_batched_tokens,
        help="tokens computed in one step (default: %(default)s)",
    )
    add(
        "--load",
        type=float,
        default=0.8,
        help="share of those limits that the traffic asks for (default: %(default)s)",
    )
    add_result_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables, the recommendation and the run."""
    scheduler_config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
    )
    check_load(args.load)
    check_results(args)
    shape = model(args)
    room = memory_tokens(args, shape)
    check_int("tokens that fit into the memory", room, minimum=max(args.block_sizes), optional=True)
    requests = traffic(args)
    sweep = sweep_block_sizes(
        requests,
        args.block_sizes,
        memory_tokens=room,
        num_seqs=args.max_num_seqs,
        measure_kernels=True if args.kernels else None,
        shape=_attention_shape(shape),
        device=args.device,
        seed=args.seed,
        progress=True,
    )
    print(f"{sweep}\n")
    for note in heads_note(shape) if args.kernels else []:
        print(f"note: {note}\n")
    answers: dict[str, Answer] = {"block_sizes": sweep}
    pools = POOL_TOKENS if room is None else (room, 4 * room)
    if requests[0].hash_ids is not None and min(pools) >= HASH_BLOCK_TOKENS:
        policies = compare_policies(requests, (lru, fifo, lfu), pool_tokens=pools, progress=True)
        print(f"{policies}\n")
        answers["policies"] = policies
    block_size = sweep.recommendation.block_size
    num_blocks = None if room is None else room // block_size
    some = first_within(requests, REPLAY_COST)

    def replayed(num_blocks: int | None) -> ReplayReport:
        config = CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_blocks,
            enable_prefix_caching=requests[0].hash_ids is not None,
        )
        return replay(
            some, config, scheduler_config=scheduler_config, load=args.load, progress=True
        )

    report = replayed(num_blocks)
    roomy = replayed(None) if num_blocks is not None and was_short(report) else report
    print(_heading(some, requests, report, shape))
    print(clock_line(report, args.load, at_once=some[0].arrival == some[-1].arrival))
    print(report)
    if flags := flags_line(report.advice, FLAGS):
        print(flags)
    print(f"\n{pool_sentence(report, roomy, args.load, shape)}\n")
    answers["replay"] = report
    write_results(args, answers)
    return 0


def _heading(
    some: list[Request], requests: list[Request], report: ReplayReport, shape: ModelShape | None
) -> str:
    """What is replayed, and what the pool weighs if the model is known."""
    size, num_blocks = report.config.block_size, report.config.num_gpu_blocks or 0
    which = "all" if len(some) == len(requests) else f"the first {len(some):,}"
    text = f"Replay of {which} requests without a model, {num_blocks:,} blocks of {size}"
    if shape is None:
        return text
    pool, peak = (pool_bytes(number, size, shape) for number in (num_blocks, report.peak_blocks))
    return f"{text}: a pool of {gib(pool)}, {gib(peak)} used at peak"


def _attention_shape(shape: ModelShape | None) -> AttentionShape | None:
    """For timing; caches that are quantised are timed as bfloat16."""
    if shape is None:
        return None
    dtype = shape.dtype if shape.dtype in TOLERANCES else "bfloat16"
    return AttentionShape(shape.heads or shape.kv_heads, shape.kv_heads, shape.head_dim, dtype)
