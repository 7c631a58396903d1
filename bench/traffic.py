"""What the kernels ask of memory, counted in Triton's interpreter with the tiles of an H200.

Every unmasked lane of every load and store counts, workspace and block tables included, over the
least possible: the keys and values once, each query once, each output once. Sectors are the
distinct 32-byte pieces of memory that one access touches: lanes that read the same block id share
one, a lone number takes a whole one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from paged_kernels._launch import Launch
from paged_kernels.copy_kernel import plan_copy
from paged_kernels.testing import PagedBatch, make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write
from tqdm import tqdm
from triton.runtime.interpreter import InterpreterBuilder

from bench.charts import bar_chart
from bench.records import BenchError, Record, exact_record, text_table
from bench.report import Result

KIB = 1024
SECTOR = 32  # bytes: the least that a GPU moves
PEER_LENGTHS = (300, 77, 16, 513)  # of the case that other projects' kernels were counted on


@dataclass
class Traffic:
    """What one launch asked of memory."""

    kernel: str = ""
    loaded: int = 0  # bytes
    stored: int = 0
    sectors: int = 0  # of both
    cache_loaded: int = 0  # bytes of K and V, within `loaded`


@dataclass
class Report:
    """One case: its launches beside the least that it could ask for."""

    name: str
    shape: str
    least: int  # bytes
    least_cache: int = 0  # bytes of K and V within `least`; 0: the case is not about them
    launches: list[Traffic] = field(default_factory=list)

    @property
    def bytes_ratio(self) -> float:
        """Bytes asked for over the least possible."""
        return sum(t.loaded + t.stored for t in self.launches) / self.least

    @property
    def sectors_ratio(self) -> float:
        """The same in whole sectors."""
        return sum(t.sectors for t in self.launches) * SECTOR / self.least

    @property
    def cache_ratio(self) -> float | None:
        """How many times each byte of K and V is read, on average."""
        loaded = sum(t.cache_loaded for t in self.launches)
        return loaded / self.least_cache if self.least_cache else None

    def ratios(self) -> dict[str, float]:
        """What is held to budgets."""
        ratios = {"bytes_ratio": self.bytes_ratio, "sectors_ratio": self.sectors_ratio}
        return ratios | ({} if self.cache_ratio is None else {"cache_ratio": self.cache_ratio})


class Case(NamedTuple):
    """A report to fill, and what to run for it."""

    report: Report
    launches: list[Launch]
    caches: tuple[torch.Tensor, ...] = ()  # loads from here count as K and V


# The most of a figure that a case of this name may have.
BUDGETS = {
    "decode": {"bytes_ratio": 1.02, "sectors_ratio": 1.02},
    "split decode": {"bytes_ratio": 1.05, "sectors_ratio": 1.05},
    "prefill": {"bytes_ratio": 3.5, "sectors_ratio": 3.5, "cache_ratio": 3.5},
    "cascade": {"cache_ratio": 1.0},
    "write": {"bytes_ratio": 1.02},
    "copy": {"bytes_ratio": 1.02},
}


@contextmanager
def counted(caches: Sequence[torch.Tensor]) -> Iterator[Traffic]:
    """What the kernels interpreted inside the `with` block load and store."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    ranges = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in caches]

    def lanes(pointers: Any, mask: Any) -> tuple[NDArray[np.uint64], int, int]:
        """Addresses of the unmasked lanes, bytes, sectors."""
        seen = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        width = max(8, pointers.dtype.element_ty.primitive_bitwidth) // 8
        return seen, seen.size * width, np.unique(seen // SECTOR).size

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen, size, sectors = lanes(pointers, mask)
        traffic.loaded += size
        traffic.sectors += sectors
        if seen.size and any(0 <= int(seen[0]) - start < length for start, length in ranges):
            traffic.cache_loaded += size
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _, size, sectors = lanes(pointers, mask)
        traffic.stored += size
        traffic.sectors += sectors
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = counted_load
    InterpreterBuilder.create_masked_store = counted_store
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store


def attention_case(
    name: str,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    common_prefix_len: int = 0,
    num_splits: int | None = None,
) -> Case:
    """Causal attention in float16, blocks of 16 tokens at random places."""
    batch = make_batch(
        seq_lens, query_lens, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        dtype=torch.float16, shared_blocks=common_prefix_len // 16,
    )  # fmt: skip
    options = {"num_splits": num_splits, "common_prefix_len": common_prefix_len or None}
    hints = {"max_seq_len": max(seq_lens), "max_query_len": max(query_lens or [1])}
    launches = plan(validated_call(**batch.arguments(**options, **hints)))

    equal = len(set(seq_lens)) == 1 < len(seq_lens)
    lens = f"{len(seq_lens)} x {seq_lens[0]}" if equal else "/".join(map(str, seq_lens))
    queries = "" if query_lens is None else f"q {'/'.join(map(str, query_lens))} of "
    shape = f"{queries}kv {lens}, {heads[0]}/{heads[1]} heads, D {head_dim}"
    tokens = sum(seq_lens) - common_prefix_len * (len(seq_lens) - 1)
    least_cache = tokens * heads[1] * head_dim * 2 * batch.key.element_size()
    least = least_cache + 2 * batch.query.numel() * batch.query.element_size()
    caches = (batch.key_cache, batch.value_cache)
    return Case(Report(name, shape, least, least_cache), launches, caches)


def cases(quick: bool = False) -> Iterator[Case]:
    """Everything counted. A case that no budget is named after is there to be looked at."""
    yield attention_case("decode", PEER_LENGTHS, head_dim=64, num_splits=1)
    yield attention_case("split decode", [2048], heads=(4, 1))
    yield attention_case("cascade", [300] * 8, common_prefix_len=256)
    yield from block_cases(make_batch([64, 100], num_kv_heads=8, head_dim=128, dtype=torch.float16))
    if quick:
        return
    yield attention_case("decode", [1000, 517, 300, 77], num_splits=1)
    yield attention_case("split decode", [1000, 1024])
    yield attention_case("split decode", [1100, 1500], head_dim=64)
    yield attention_case("split decode, group 8", [1024], heads=(8, 1))
    yield attention_case("split decode, short", PEER_LENGTHS, head_dim=64, num_splits=4)
    yield attention_case("prefill", PEER_LENGTHS, [300, 77, 16, 64], head_dim=64)
    yield attention_case("mixed", [200, 77, 600], [60, 20, 1])
    yield attention_case("cascade, mixed", [300, 260, 320], [1, 4, 40], common_prefix_len=256)


def block_cases(batch: PagedBatch) -> Iterator[Case]:
    """New keys and values written, two blocks copied: each byte is read once and written once."""
    caches = (batch.key_cache, batch.value_cache)
    write = plan_write(batch.key, batch.value, *caches, batch.slots)
    copy = plan_copy(caches, torch.tensor([[0, 1], [2, 3]]))
    assert copy is not None
    least = 2 * (batch.key.numel() + batch.value.numel()) * batch.key.element_size()
    yield Case(Report("write", f"{len(batch.slots)} tokens", least), [write])
    least = 2 * 2 * sum(cache[0].numel() * cache.element_size() for cache in caches)
    yield Case(Report("copy", "2 blocks", least), [copy])


def measure(case: Case) -> Report:
    """Run the launches of a case in the interpreter, one after the other."""
    for launch in case.launches:
        with counted(case.caches) as traffic:
            launch.run()
        traffic.kernel = launch.kernel.fn.__name__
        case.report.launches.append(traffic)
    return case.report


def run(options: Namespace) -> Result:
    """Count every case; a broken budget is a failure."""
    if not triton.knobs.runtime.interpret:
        raise BenchError("triton was imported without TRITON_INTERPRET=1: use a fresh process")
    todo = list(cases(options.quick))
    reports = [measure(case) for case in tqdm(todo, desc="traffic", unit="case")]
    return {
        "reports": [asdict(report) for report in reports],
        "records": [record for report in reports for record in records_of(report)],
        "failures": broken_budgets(reports),
    }


def records_of(report: Report) -> list[Record]:
    """Its ratios, to the byte."""
    what = {"bytes_ratio": "bytes", "sectors_ratio": "sectors", "cache_ratio": "K and V"}
    return [
        exact_record(f"{report.name}, {report.shape}: {what[figure]}", value, "x least")
        for figure, value in report.ratios().items()
    ]


def table(result: Result) -> str:
    """The launches of each case, then all of it over the least possible."""
    rows: list[list[str]] = []
    values = {record["name"]: f"{record['value']:.3f}" for record in result["records"]}
    for r in result["reports"]:
        name = f"{r['name']}, {r['shape']}"
        ratios = [values.get(f"{name}: {what}", "") for what in ("bytes", "sectors", "K and V")]
        rows.append([name, "", "", f"{r['least'] / KIB:.1f}", *ratios])
        for t in r["launches"]:
            moved = (f"{t[what] / KIB:.1f}" for what in ("loaded", "stored"))
            rows.append([f"  {t['kernel']}", *moved, "", "", "", ""])
    head = ["KiB", "loaded", "stored", "least", "bytes / least", "sectors", "K and V"]
    return text_table(head, rows)


def plot(result: Result, path: Path) -> None:
    """Bytes over the least possible."""
    bars = [record for record in result["records"] if record["name"].endswith(": bytes")]
    title = "Bytes that kernels ask for, over the least possible"
    bar_chart(result, path, bars, title, "each byte once")


def broken_budgets(reports: Sequence[Report]) -> list[str]:
    """A line for each figure out of bounds."""
    return [
        f"{r.name} ({r.shape}): {figure} is {getattr(r, figure):.4f}, budget {bound}"
        for r in reports
        for figure, bound in BUDGETS.get(r.name, {}).items()
        if getattr(r, figure) > bound
    ]
