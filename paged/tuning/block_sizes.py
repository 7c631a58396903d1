"""Which block size suits a traffic: waste, tables, host time, cache hits and kernels by size."""

from __future__ import annotations

from collections.abc import Sequence

from paged.config import check_int, check_kind, is_cpu
from paged.provenance import commit, versions
from paged.replay import device_wait
from paged.replay_config import final_length
from paged.sequence import as_list
from paged.trace import Request

from .attention import AttentionShape, default_device, default_shape, kernel_time_ratios
from .block_size_report import BlockSizeRow, BlockSizeSweep
from .choice import BASE, Candidate, recommend
from .prefixes import expected_loss, hit_tokens, shared_prefixes
from .side_by_side import Replayed, first_within, replay_side_by_side
from .timing import Ratio
from .traffic import Traffic, TuningError, as_requests, life
from .waste import slots_at_end, slots_over_life

BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_ENTRY_BYTES = 4  # int32


def sweep_block_sizes(
    lengths_or_trace: Traffic,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    *,
    memory_tokens: int | None = None,
    num_seqs: int = 256,
    replayed: bool = True,
    measure_kernels: bool | None = None,
    shape: AttentionShape | None = None,
    device: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> BlockSizeSweep:
    """What each block size costs for this traffic, and which to take.

    The recommendation follows the fixed rule of `paged.tuning.choice`: from 16 up while the cost
    stays within one percentage point of 16's, down to 8 at the least where 16 costs over 10 %.

    memory_tokens: tokens that the memory has room for, to count the sequences that fit.
    num_seqs: sequences in the block table that is counted.
    replayed: also run the first requests through the real scheduler and manager at each size.
    measure_kernels: time a decode step of one layer at each size; None: if there is a GPU. On a
        CPU it is the torch backend that is timed.
    shape, device: of that step; by default the heads of Llama 3 8B, on a GPU if there is one.

    The trace tells shared prefixes in steps of 512 tokens. Where two prompts part within such a
    step is unknown, so what smaller blocks miss there is worked out as an expectation.
    ValueError for a wrong argument, TraceError and TuningError for a traffic that cannot be read.
    """
    from tqdm import tqdm

    sizes = _checked_sizes(block_sizes)
    check_int("num_seqs", num_seqs, minimum=1)
    check_int("memory_tokens", memory_tokens, minimum=1, optional=True)
    check_int("seed", seed, minimum=0)
    check_kind("shape", shape, AttentionShape, optional=True)
    requests = as_requests(lengths_or_trace, limit=limit)
    device = device or ("cpu" if measure_kernels is False else default_device())
    measure_kernels = not is_cpu(device) if measure_kernels is None else measure_kernels
    if measure_kernels:
        device_wait(device)  # refuses one that is absent
    base = min(sizes, key=lambda size: (abs(size - BASE), size))
    some = first_within(requests) if replayed else []
    kernels: dict[int, Ratio] = {}
    runs: dict[int, Replayed] = {}
    shape = shape or default_shape(device)
    with tqdm(total=len(sizes) * replayed + 1, unit="size", disable=not progress) as bar:
        if replayed:
            bar.set_description("replay")
            runs = replay_side_by_side(some, sizes, base, seed=seed, progress=bar.update)
        if measure_kernels:
            bar.set_description("kernels")
            kernels = kernel_time_ratios(requests, sizes, base, shape, device=device, seed=seed)
        bar.update()
    rows = _rows(requests, sizes, runs, kernels, num_seqs, memory_tokens)
    candidates = [
        Candidate(row.block_size, row.cost, row.host_time, row.kernel_time) for row in rows
    ]
    return BlockSizeSweep(
        requests=len(requests),
        replayed_requests=len(some),
        prompt_tokens=sum(request.prompt_len for request in requests),
        longest=max(map(final_length, requests)),
        num_seqs=num_seqs,
        rows=tuple(rows),
        recommendation=recommend(candidates),
        notes=_notes(requests, some, f"{shape} on {device}" if kernels else "not measured"),
        versions=versions(),
        commit=commit(),
    )


def _rows(
    requests: list[Request],
    sizes: Sequence[int],
    runs: dict[int, Replayed],
    kernels: dict[int, Ratio],
    num_seqs: int,
    memory_tokens: int | None,
) -> list[BlockSizeRow]:
    shared = None if requests[0].hash_ids is None else shared_prefixes(requests)
    prompt_tokens = sum(request.prompt_len for request in requests)
    num_steps = sum(len(life(request)) for request in requests)
    longest = max(map(final_length, requests))
    rows = []
    for size in sizes:
        over_life, run = slots_over_life(requests, size), runs.get(size)
        rows.append(
            BlockSizeRow(
                block_size=size,
                waste_at_end=slots_at_end(requests, size).waste,
                waste=over_life.waste,
                table_bytes=num_seqs * -(-longest // size) * TABLE_ENTRY_BYTES,
                waste_replayed=None if run is None else run.waste,
                host_time=None if run is None else run.host_time,
                hit_tokens=None if shared is None else hit_tokens(requests, shared, size),
                hit_loss=None
                if shared is None
                else expected_loss(requests, shared, size) / prompt_tokens,
                kernel_time=kernels.get(size),
                sequences=None
                if memory_tokens is None
                else memory_tokens * num_steps // over_life.held,
            )
        )
    return rows


def _notes(requests: list[Request], some: list[Request], kernels: str) -> tuple[str, ...]:
    notes = []
    if some:
        notes.append(
            f"replayed: the first {len(some):,} of {len(requests):,} requests; host time is that of"
            " a step's scheduling, over the base, with its spread"
        )
    if requests[0].hash_ids is not None:
        notes.append(
            "missed hits: the trace tells shared prefixes in steps of 512 tokens; where prompts part"
            " within such a step is taken as equally likely everywhere"
        )
    notes.append(f"kernel time: {kernels}")
    return tuple(notes)


def _checked_sizes(block_sizes: Sequence[int]) -> list[int]:
    sizes: list[int] = as_list("block_sizes", block_sizes, "ints")
    for size in sizes:
        check_int("block_sizes", size, minimum=1)
    if not sizes or len(set(sizes)) < len(sizes):
        raise TuningError(f"block_sizes is {sizes}; it must hold different sizes in tokens")
    return sorted(sizes)
