"""Times on a GPU, and the rates that they are measured against: see `gpu`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
import triton
import triton.language as tl
from paged_kernels._roofline import costs
from paged_kernels.testing import validated_call
from torch import Tensor

from bench.gpu_rivals import OURS, RIVALS, SDPA, Problem, Run, Shape, paged

DECODES = (
    Shape("1 x 128k", 1, 1, 131_072),
    Shape("8 x 8k", 8, 1, 8192),
    Shape("64 x 4k", 64, 1, 4096),
    Shape("256 x 512", 256, 1, 512),
    Shape("16 x 4k, group 1", 16, 1, 4096, num_kv_heads=32),
)
PREFILLS = (
    Shape("1 x 8k", 1, 8192, 8192),
    Shape("8 x 2k", 8, 2048, 2048),
    Shape("4 x 512 of 8k", 4, 512, 8192),
)
QUICK_SHAPES = (DECODES[1], DECODES[3], PREFILLS[1])
CHECKED_QUERIES = 32  # last ones of a sequence


class WrongKernelError(Exception):
    """Our own kernel errs: nothing that it does is worth timing."""


@dataclass
class Row:
    """One provider on one shape. Times in milliseconds; those of a skipped provider are 0."""

    phase: str
    case: str
    provider: str
    bytes: int  # that must move
    flops: int
    median: float = 0.0
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0
    rounds: int = 0
    graph: bool = False  # replayed from a CUDA graph, so that no launch is waited for
    host_us: float = 0.0  # of one call that is launched from Python
    max_error: float = 0.0  # over the largest value, against float64
    skipped: str | None = None


def times_ms(run: Run, num_copies: int, rounds: int) -> tuple[list[float], bool]:
    """(milliseconds of each round, whether CUDA graphs were replayed)."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for copy in 2 * list(range(num_copies)):
            run(copy)
    torch.cuda.synchronize()
    calls = [partial(run, copy) for copy in range(num_copies)]
    try:
        replays = [_captured(call).replay for call in calls]
    except RuntimeError:  # it waits for the device, or allocates in a way of its own
        torch.cuda.synchronize()
        return _timed(calls, rounds), False
    return _timed(replays, rounds), True


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _timed(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each round; the calls take turns, so that each finds its data cold."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    for call in calls:
        call()
    for number, (start, end) in enumerate(events):
        start.record()
        calls[number % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(sums, x, size, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read all of x and store next to nothing."""
    total = tl.zeros((CHUNK,), tl.float32)
    lane = tl.arange(0, CHUNK)
    for start in range(tl.program_id(0) * CHUNK, size, tl.num_programs(0) * CHUNK):
        total += tl.load(x + start + lane)
    tl.store(sums + tl.program_id(0), tl.sum(total))


def bandwidths(device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Bytes per second that can be read, and that a copy reads and writes together."""
    size = 1 << 29  # float32: 2 GiB, many times any L2 cache
    x = torch.ones(size, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.zeros(16 * num_sms, device=device)
    reading = []
    for per_sm in (4, 8, 16):
        for chunk in (2048, 4096, 8192):
            programs = per_sm * num_sms
            call = partial(read_kernel[(programs,)], sums, x, size, CHUNK=chunk, num_warps=8)
            reading.append(median(_timed([call], rounds)))
            read = int(sums[:programs].double().sum())
            if read != size:
                raise WrongKernelError(f"the read kernel summed {read} of {size} ones")
    half = size // 2
    copying = median(_timed([partial(x[:half].copy_, x[half:])], rounds))
    return {"read": 4e3 * size / min(reading), "copy": 4e3 * size / copying}


def matmul_flops(device: torch.device, rounds: int = 20) -> float:
    """Flops per second of a large bfloat16 matrix product."""
    n = 8192
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device=device)
    return 2e3 * n**3 / median(_timed([partial(torch.matmul, a, b)], rounds))


def measure(shape: Shape, device: torch.device, rounds: int, deadline: float) -> list[Row]:
    """All providers on one shape; ours first. WrongKernelError when it errs.

    deadline: `time.monotonic()` past which no other provider than SDPA is started.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    kv_bytes = 4 * shape.num_seqs * shape.seq_len * shape.num_kv_heads * shape.head_dim
    problem = Problem(shape, device, num_copies=max(2, math.ceil(4 * l2_bytes / kv_bytes)))
    cost = costs(validated_call(**problem.arguments(0)))
    phase = "decode" if shape.query_len == 1 else "prefill"
    rows = []
    for name, build in {OURS: paged, **RIVALS}.items():
        row = Row(phase, shape.name, name, cost.bytes, cost.flops)
        rows.append(row)
        if time.monotonic() > deadline and name not in (OURS, SDPA):
            row.skipped = "out of time"
            continue
        try:
            run = build(problem)
            row.max_error = largest_error(problem, run)
            if not row.max_error <= 2**-6:  # twice what rounding weights and output costs
                raise WrongKernelError(f"{shape.name}: error {row.max_error:.2g}")
            milliseconds, row.graph = times_ms(run, problem.num_copies, rounds)
            row.host_us = host_us(run)
        except Exception as error:  # whatever another project may raise is no matter of ours
            if name == OURS:
                raise
            row.skipped = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            continue
        row.lower_quartile, row.median, row.upper_quartile = quantiles(milliseconds, n=4)
        row.rounds = rounds
    return rows


def largest_error(problem: Problem, run: Run) -> float:
    """Over the largest value, of the last queries of the first and the last sequence."""
    shape, copy = problem.shape, problem.num_copies - 1
    out = run(copy).reshape(shape.num_seqs, shape.query_len, shape.num_heads, shape.head_dim)
    worst = 0.0
    for seq in {0, shape.num_seqs - 1}:
        exact = _exact(problem, copy, seq)
        error = out[seq, -len(exact) :].double() - exact
        if not bool(error.isfinite().all()):
            return math.inf
        worst = max(worst, float(error.abs().max() / exact.abs().max()))
    return worst


def _exact(problem: Problem, copy: int, seq: int) -> Tensor:
    """float64 [queries, num_heads, head_dim]."""
    shape, queries = problem.shape, min(problem.shape.query_len, CHECKED_QUERIES)
    query = problem.query.view(
        shape.num_seqs, shape.query_len, shape.num_kv_heads, -1, shape.head_dim
    )
    q = query[seq, -queries:].double() * shape.head_dim**-0.5
    scores = torch.einsum("qhgd,khd->hgqk", q, problem.keys[copy][seq].double())
    after = torch.ones(queries, shape.seq_len, device=q.device).triu(shape.seq_len - queries + 1)
    weights = scores.masked_fill(after.bool(), -math.inf).softmax(-1)
    out = torch.einsum("hgqk,khd->qhgd", weights, problem.values[copy][seq].double())
    return out.flatten(1, 2)


def host_us(run: Run, calls: int = 50) -> float:
    """Microseconds until a call returns, its kernels still to run."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run(0)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * elapsed / calls
