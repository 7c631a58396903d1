"""What paging costs and what it saves, against dense attention on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from paged.config import block_bytes, check_int, check_kind
from paged.provenance import commit, versions

from .attention import (
    AttentionShape,
    Problem,
    default_device,
    default_shape,
    times,
    typical_lengths,
)
from .dense_report import (
    DECODE,
    DENSE,
    GATHERED,
    IN_ORDER,
    PREFILL,
    SHUFFLED,
    AttentionTime,
    DenseComparison,
)
from .reservation import reservations
from .timing import check_timing, lower_quartile, ratio
from .traffic import Traffic, as_requests

if TYPE_CHECKING:
    from torch import Tensor


def compare_with_dense(
    lengths_or_trace: Traffic,
    *,
    shape: AttentionShape | None = None,
    layers: int = 1,
    block_size: int = 16,
    memory: int | None = None,
    device: str | None = None,
    threads: int = 1,
    batch: int = 8,
    longest: int = 2048,
    chunk: int = 128,
    seconds: float = 3.0,
    limit: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> DenseComparison:
    """Paged against dense attention for this traffic: error, time and memory.

    Timed are a decode step of `batch` sequences, whose lengths are those of the traffic at evenly
    spaced ranks, none above `longest`, and a prefill of the last `chunk` tokens of the middle one.
    Dense is torch's SDPA over contiguous K and V. Every way is first compared with float64, then
    they run in turns for `seconds` per phase, and lower quartiles are compared. With one thread on
    the CPU it is CPU time that counts; on a GPU the caches are warm.

    shape, device: by default the heads of Llama 3 8B, on a GPU if there is one.
    memory: bytes for K and V of all `layers`, to count the sequences that fit; None: not counted.
    Memory is worked out for all requests, times for that batch. ValueError for a wrong argument.
    """
    from tqdm import tqdm

    device = default_device() if device is None else device
    shape = default_shape(device) if shape is None else shape
    sizes = {"batch": batch, "longest": longest, "chunk": chunk, "block_size": block_size}
    for name, value in {**sizes, "layers": layers}.items():
        check_int(name, value, minimum=1)
    check_timing(seconds, threads)
    check_int("seed", seed, minimum=0)
    check_kind("shape", shape, AttentionShape)
    check_int("memory", memory, minimum=1, optional=True)
    requests = as_requests(lengths_or_trace, limit=limit)
    bytes_per_token = block_bytes(1, shape.num_kv_heads, shape.head_dim, shape.dtype, layers)
    lengths = typical_lengths(requests, batch, longest)
    middle = lengths[len(lengths) // 2]
    work = {
        DECODE: (lengths, [1] * len(lengths)),
        PREFILL: ([middle], [min(chunk, middle)]),
    }
    rows: list[AttentionTime] = []
    with tqdm(work.items(), unit="phase", disable=not progress) as bar:
        for phase, (seq_lens, query_lens) in bar:
            bar.set_description(phase)
            problem = Problem(seq_lens, query_lens, shape, device=device, seed=seed)
            rows += _timed(
                phase,
                problem,
                block_size,
                device=device,
                threads=threads,
                seconds=seconds,
                seed=seed,
            )
    return DenseComparison(
        requests=len(requests),
        seq_lens={phase: tuple(seq_lens) for phase, (seq_lens, _) in work.items()},
        block_size=block_size,
        shape=shape,
        device=device,
        threads=threads,
        times=tuple(rows),
        memory=tuple(
            reservations(
                requests, block_size, None if memory is None else memory // bytes_per_token
            )
        ),
        bytes_per_token=bytes_per_token,
        versions=versions(),
        commit=commit(),
    )


def _timed(
    phase: str,
    problem: Problem,
    block_size: int,
    *,
    device: str,
    threads: int,
    seconds: float,
    seed: int,
) -> Sequence[AttentionTime]:
    """All ways of attending in one phase, checked, then timed."""
    shuffled, in_order = (
        problem.in_blocks(block_size, shuffled=s, seed=seed) for s in (True, False)
    )
    calls: dict[str, Callable[[], Tensor]] = {
        DENSE: problem.dense,
        SHUFFLED: partial(problem.paged, shuffled),
        IN_ORDER: partial(problem.paged, in_order),
        GATHERED: partial(problem.gathered, shuffled),
    }
    errors = {name: problem.error(call()) for name, call in calls.items()}
    series = times(calls, device=device, threads=threads, seconds=seconds, seed=seed)
    return [
        AttentionTime(
            phase,
            name,
            1e3 * lower_quartile(series[name]),
            ratio(series[name], series[DENSE], lower_quartile),
            errors[name],
        )
        for name in calls
    ]
