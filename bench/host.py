"""Host time of one call: everything but Triton's own launch, which is taken out.

CPU tensors stand in for GPU tensors: the same checks run and the same launches are planned, none
is made. Allocating the output is included. Beside it, in turns, a call of torch's own attention on
tensors so small that it is host time, too.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from paged_kernels import reshape_and_cache
from paged_kernels._launch import Launch
from paged_kernels.testing import make_batch

from bench.charts import bar_chart
from bench.records import (
    BenchError,
    Record,
    ratio_record,
    spread_text,
    text_table,
    time_in_turns,
    time_record,
)
from bench.report import Result

CALLS = 20  # in a round
NUM_SEQS, SEQ_LEN = 64, 1_024
SDPA = "SDPA on tensors of one number"
OVER = " over SDPA"


def calls(seed: int) -> dict[str, Callable[[], object]]:
    """What is timed: a decode, and the write before it."""
    batch = make_batch(
        [SEQ_LEN] * NUM_SEQS,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        seed=seed,
    )
    out = torch.empty_like(batch.query)

    def decode(**options: object) -> Callable[[], object]:
        return lambda: batch.attend(max_seq_len=SEQ_LEN, backend="triton", **options)

    new = torch.zeros(NUM_SEQS, 8, 128, dtype=torch.bfloat16)
    slots = torch.arange(NUM_SEQS)
    one = torch.zeros(1, 1, 1, 1)
    sizes = f"{NUM_SEQS} x {SEQ_LEN:,}"
    return {
        SDPA: lambda: F.scaled_dot_product_attention(one, one, one, enable_gqa=True),
        f"decode of {sizes}": decode(num_splits=1),
        f"decode of {sizes}, into out": decode(num_splits=1, out=out),
        f"split decode of {sizes} (two launches)": decode(num_splits=2),
        f"reshape_and_cache of {NUM_SEQS} tokens": lambda: reshape_and_cache(
            new, new, batch.key_cache, batch.value_cache, slots, backend="triton"
        ),
    }


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside the `with` block kernels are planned and not run."""
    launch = Launch.run
    Launch.run = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.run = launch  # type: ignore[method-assign]


def run(options: Namespace) -> Result:
    """Time all calls in turns."""
    if not triton.knobs.runtime.interpret:  # lets the backend take CPU tensors
        raise BenchError("triton was imported without TRITON_INTERPRET=1: use a fresh process")
    torch.set_num_threads(options.threads)

    def rounds_of(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(CALLS)]

    works = {name: repeat(rounds_of(call)) for name, call in calls(options.seed).items()}
    with without_launches():
        times = time_in_turns(works, rounds=50 if options.quick else 300, seed=options.seed)
    records: list[Record] = []
    for name, milliseconds in times.items():
        microseconds = [1e3 * value / CALLS for value in milliseconds]
        records.append(time_record(name, microseconds, unit="us"))
        if name != SDPA:
            records.append(ratio_record(name + OVER, milliseconds, times[SDPA], "x SDPA"))
    return {"records": records}


def table(result: Result) -> str:
    """A line for each call."""
    ratios = {r["name"]: f"{r['value']:.1f}" for r in result["records"] if r["kind"] == "ratio"}
    rows = [
        [r["name"], spread_text(r), ratios.get(r["name"] + OVER, "1")]
        for r in result["records"]
        if r["kind"] == "time"
    ]
    return text_table(["host time", "us: quartiles and median", "x SDPA"], rows)


def plot(result: Result, path: Path) -> None:
    """The ratios."""
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    bar_chart(result, path, ratios, "Host time of a call, without Triton's launch", SDPA)
