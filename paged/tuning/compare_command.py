"""`python -m paged compare`: what paging costs and saves against dense attention, for a traffic."""

from __future__ import annotations

import argparse

from paged.config import is_cpu
from paged.replay_config import final_length
from paged.sizing import parse_bytes
from paged.trace import Request

from .attention import AttentionShape, default_device, default_shape
from .command_options import (
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
from .dense import compare_with_dense
from .timing import check_timing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_traffic_arguments(parser)
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--block-size",
        type=positive,
        default=16,
        metavar="N",
        help="tokens per block (default: 16)",
    )
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="of torch on the CPU; more than one pay on an idle machine alone",
    )
    add("--batch", type=positive, default=8, metavar="N", help="sequences in the timed decode step")
    add(
        "--longest",
        type=positive,
        default=2048,
        metavar="TOKENS",
        help="of a sequence in the timed steps (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=3.0,
        help="to time each phase for (default: %(default)s)",
    )
    add_result_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print memory and time, paged beside dense."""
    check_timing(args.seconds, args.threads)
    check_results(args)
    described = model(args)
    memory_tokens(args, described)  # refuses one without room for a token
    device = args.device or default_device()
    shape = default_shape(device)
    if described is not None:
        shape = AttentionShape(
            described.heads or described.kv_heads,
            described.kv_heads,
            described.head_dim,
            described.dtype,
        )
    requests = traffic(args)
    comparison = compare_with_dense(
        requests,
        shape=shape,
        layers=1 if described is None else described.layers,
        block_size=args.block_size,
        memory=None if args.kv_memory is None else parse_bytes(args.kv_memory),
        device=device,
        threads=args.threads,
        batch=args.batch,
        longest=args.longest,
        seconds=args.seconds,
        seed=args.seed,
        progress=True,
    )
    print(comparison)
    notes = _notes(
        shape, device, is_assumed=described is None, requests=requests, longest=args.longest
    )
    for note in heads_note(described) + notes:
        print(f"note: {note}")
    write_results(args, {"dense": comparison})
    return 0


def _notes(
    shape: AttentionShape, device: str, *, is_assumed: bool, requests: list[Request], longest: int
) -> list[str]:
    """What to know before the figures are believed."""
    notes = []
    if is_assumed:
        notes.append(
            "without --config the shape is assumed and memory is that of one layer; what the"
            " schemes take relative to each other does not depend on it"
        )
    if requests[0].hash_ids is not None:
        notes.append(
            "the memory table counts every request alone: prefixes that requests share are left"
            " out; python -m paged tune replays the trace with them"
        )
    if is_cpu(device) and shape.dtype != "float32":
        notes.append(
            f"dense attention itself is slow in {shape.dtype} on a CPU: --dtype float32 compares"
            " more fairly"
        )
    if any(final_length(request) > longest for request in requests):
        notes.append(
            f"sequences are timed at {longest:,} tokens at most (--longest); memory is that of"
            " their full lengths"
        )
    return notes
