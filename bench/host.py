"""Host time of one decode call: everything but Triton's own launch, which is taken out.

    python -m bench.host [--repeats N]

CPU tensors stand in for GPU tensors: the same checks run and the same launches are planned, none
is made. Allocating the output is included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

os.environ["TRITON_INTERPRET"] = "1"  # lets the backend take CPU tensors; no kernel runs

import torch
from paged_kernels import paged_attention, reshape_and_cache
from paged_kernels._launch import Launch
from paged_kernels.testing import make_batch


def microseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Time of each of `repeats` rounds, a call, after a warm-up."""
    rounds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(200):
            call()
        rounds.append((time.perf_counter() - start) / 200 * 1e6)
    return sorted(rounds[1:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args(argv).repeats
    torch.set_num_threads(1)

    batch = make_batch(
        [1024] * 64, num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    out = torch.empty_like(batch.query)

    def decode(**options: object) -> Callable[[], object]:
        return lambda: paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            max_seq_len=1024,
            backend="triton",
            **options,  # type: ignore[arg-type]
        )

    new = torch.zeros(64, 8, 128, dtype=torch.bfloat16)
    slots = torch.arange(64)
    calls = {
        "decode": decode(num_splits=1),
        "decode into out": decode(num_splits=1, out=out),
        "split decode (two launches)": decode(),
        "reshape_and_cache": lambda: reshape_and_cache(
            new, new, batch.key_cache, batch.value_cache, slots, backend="triton"
        ),
    }
    Launch.run = lambda self: None  # type: ignore[method-assign]
    print(f"{'call':30} {'median':>8} {'min':>8} {'p80':>8}  microseconds, {repeats} rounds of 200")
    for name, call in calls.items():
        rounds = microseconds(call, repeats)
        p80 = rounds[int(0.8 * (len(rounds) - 1))]
        print(f"{name:30} {statistics.median(rounds):8.1f} {rounds[0]:8.1f} {p80:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
