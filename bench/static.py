"""What the kernels cost on GPUs that are not here: compiled ahead of time, read from machine code.

Figures are those of one version of Triton. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import operator
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from paged_kernels import aot
from paged_kernels._heuristics import planned_for
from paged_kernels._launch import Launch
from paged_kernels.copy_kernel import plan_copy
from paged_kernels.testing import make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write
from tqdm import tqdm

from bench.charts import bar_chart
from bench.machine_code import MATRIX_OPCODES, Cubin, amd_usage, staged_tiles
from bench.records import BenchError, Record, exact_record, text_table
from bench.report import Result

KIB = 1024
LENGTHS = (512, 4096, 32768)
SM_SHARED_MEMORY = {"sm_80": 164 * KIB, "sm_90": 228 * KIB, "sm_100": 228 * KIB}
SM_REGISTERS = 65536


@dataclass
class Report:
    """One kernel on one target. None: this target's code does not tell."""

    kernel: str  # decode, prefill, merge, write, copy
    target: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tile: str = "-"  # rows x keys
    num_warps: int = 4
    num_stages: int = 0
    registers: int = 0  # per thread
    spilled: int = 0  # stack bytes on NVIDIA, registers on AMD
    shared_memory: int = 0  # bytes per program
    programs_per_sm: int | None = None
    load_bytes: int | None = None  # per lane, of the K and V loads
    buffers: int | None = None  # of each K and V tile
    tiles_in_flight: float | None = None  # that the loop's wait leaves running
    kib_in_flight: float | None = None  # K and V, per multiprocessor
    instructions_per_kv_byte: float | None = None  # warp-level, unmasked loop
    instructions: dict[int, int] = field(default_factory=dict)  # per warp, by sequence length
    matrix_opcode: str | None = None


class Budget(NamedTuple):
    """A bound on one figure of the reports that it applies to."""

    figure: str
    compare: Callable[[Any, Any], bool]
    bound: Any
    applies: Callable[[Report], bool]

    def broken_by(self, report: Report) -> bool:
        return self.applies(report) and not self.compare(getattr(report, self.figure), self.bound)


def _attention(report: Report) -> bool:
    return report.kernel in ("decode", "prefill") and report.target in SM_SHARED_MEMORY


def _common(report: Report) -> bool:
    """Attention at the head widths of most models; wider ones cost registers."""
    return _attention(report) and report.head_dim <= 128


def _decode(report: Report) -> bool:
    return report.kernel == "decode" and _common(report) and report.head_dim == 128


BUDGETS = (
    Budget("spilled", operator.eq, 0, lambda report: True),
    Budget("buffers", operator.ge, 2, _attention),
    Budget("tiles_in_flight", operator.ge, 1, _attention),
    Budget("kib_in_flight", operator.ge, 40, _common),
    Budget("load_bytes", operator.eq, 16, _attention),
    Budget("instructions_per_kv_byte", operator.le, 0.040, _decode),
    Budget(
        "matrix_opcode",
        operator.eq,
        "HGMMA",
        lambda r: (r.kernel, r.target) == ("prefill", "sm_90"),
    ),
)


SIZES = ((32, 8, 128), (32, 32, 128), (32, 8, 64), (32, 8, 256))  # heads, KV heads, head_dim


def cases(quick: bool = False) -> Iterator[tuple[str, int, int, int, Launch]]:
    """(target, heads, KV heads, head_dim, launch) of everything reported; quick: of a part."""
    targets = {"sm_90": aot.DEVICES["sm_90"]} if quick else aot.DEVICES
    for target, device in targets.items():
        with planned_for(device):
            for heads, kv_heads, head_dim in SIZES[:1] if quick else SIZES:
                for launch in _launches(heads, kv_heads, head_dim):
                    yield target, heads, kv_heads, head_dim, launch


def _launches(num_heads: int, num_kv_heads: int, head_dim: int) -> list[Launch]:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    batch = make_batch([64, 32], [64, 1], dtype=torch.bfloat16, block_size=16, **sizes)  # type: ignore[arg-type]
    arguments = {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
    }
    mixed = validated_call(**arguments, cu_seqlens_q=batch.cu_seqlens_q, num_splits=2)
    new = torch.empty(8, num_kv_heads, head_dim, dtype=torch.bfloat16)
    caches = (batch.key_cache, batch.value_cache)
    copy = plan_copy([cache.contiguous() for cache in caches], torch.tensor([[0, 1]]))
    assert copy is not None
    return [*plan(mixed), plan_write(new, new, *caches, torch.arange(8)), copy]


def name_of(launch: Launch) -> str:
    """decode, prefill, merge, write or copy."""
    if "ROWS" in launch.constants:
        return "prefill" if launch.constants["ROWS"].prefill else "decode"
    return str(launch.kernel.__name__).removesuffix("_kernel")


def report(target: str, num_heads: int, num_kv_heads: int, head_dim: int, launch: Launch) -> Report:
    """Compile one launch for one target and read its code."""
    kernel = aot.compiled(launch, target)
    result = Report(name_of(launch), target, num_heads, num_kv_heads, head_dim)
    result.num_warps, result.num_stages = launch.num_warps, launch.num_stages
    result.shared_memory = kernel.metadata.shared
    tile = launch.constants.get("TILE")
    if tile is not None:
        result.tile = f"{tile.m} x {tile.n}"
    if target not in SM_SHARED_MEMORY:
        usage = amd_usage(kernel)
        result.registers, result.spilled = usage["registers"], usage["spilled"]
        return result

    cubin = Cubin(kernel)
    result.registers, result.spilled = cubin.registers, cubin.spilled_bytes
    result.programs_per_sm = min(
        32,
        SM_SHARED_MEMORY[target] // (result.shared_memory + KIB),
        SM_REGISTERS // (32 * launch.num_warps * -(-cubin.registers // 8) * 8),
    )
    if tile is not None:
        _read_loops(result, tile.n, cubin, staged_tiles(kernel))
    return result


def _read_loops(result: Report, keys: int, cubin: Cubin, staged: list[tuple[int, int]]) -> None:
    """Figures of an attention kernel; loops[0] is the unmasked one, loops[-1] the masked edge."""
    hot, edge = cubin.loops[0], cubin.loops[-1]
    key_value = staged[:2]  # the first loop's K and V; the others share their memory
    kv_bytes = sum(size for _, size in key_value)
    result.buffers = min(buffers for buffers, _ in key_value)
    result.load_bytes = hot.load_bytes
    result.tiles_in_flight = hot.tiles_in_flight
    result.kib_in_flight = (result.buffers - 1) * kv_bytes * (result.programs_per_sm or 0) / KIB
    real_bytes = keys * result.head_dim * 2 * 2
    result.instructions_per_kv_byte = hot.instructions * result.num_warps / real_bytes
    straight = cubin.instructions - sum(loop.instructions for loop in cubin.loops)
    result.instructions = {
        length: straight + edge.instructions + (length // keys - 1) * hot.instructions
        for length in LENGTHS
    }
    result.matrix_opcode = next(name for name in MATRIX_OPCODES if hot.opcodes[name])


# Of a report, and the unit of each. What a target's code does not tell is no record.
FIGURES = {
    "registers": "registers",
    "spilled": "bytes",
    "shared_memory": "bytes",
    "buffers": "tiles",
    "tiles_in_flight": "tiles",
    "kib_in_flight": "KiB",
    "load_bytes": "bytes",
    "instructions_per_kv_byte": "instructions",
}


def run(options: Namespace) -> Result:
    """Compile everything; a broken budget is a failure."""
    if triton.knobs.runtime.interpret:
        raise BenchError("triton was imported with TRITON_INTERPRET=1: use a fresh process")
    todo = list(cases(options.quick))
    reports = [report(*case) for case in tqdm(todo, desc="static", unit="kernel")]
    return {
        "reports": [asdict(r) for r in reports],
        "records": [record for r in reports for record in records_of(r)],
        "failures": broken_budgets(reports),
        "exact_for": ["triton"],
    }


def records_of(report: Report) -> list[Record]:
    """Its figures, to the instruction."""
    return [
        exact_record(f"{_title(report)}: {figure.replace('_', ' ')}", value, unit)
        for figure, unit in FIGURES.items()
        if (value := getattr(report, figure)) is not None
    ]


def _title(r: Report) -> str:
    return f"{r.kernel} on {r.target}, {r.num_heads}/{r.num_kv_heads} x {r.head_dim}"


def table(result: Result) -> str:
    """A line for each kernel."""
    rows = []
    for r in (Report(**fields) for fields in result["reports"]):
        cells: list[object] = [r.tile, r.num_warps, r.num_stages, r.registers, r.spilled]
        cells += [
            f"{r.shared_memory / KIB:.1f}",
            "" if r.programs_per_sm is None else r.programs_per_sm,
        ]
        if r.instructions_per_kv_byte is None:
            cells += [""] * 5
        else:
            counts = "/".join(str(count) for count in r.instructions.values())
            cells += [r.buffers, f"{r.kib_in_flight:.0f}", r.load_bytes]
            cells += [f"{r.instructions_per_kv_byte:.4f}", f"{counts} {r.matrix_opcode}"]
        rows.append([_title(r), *cells])
    head = ["kernel", "tile", "warps", "stages", "regs", "spill", "shared KiB", "per SM"]
    head += ["buffers", "in flight KiB", "load B", "instr/KV B", f"instr at {LENGTHS}"]
    return text_table(head, rows)


def plot(result: Result, path: Path) -> None:
    """Instructions per byte of K and V of every decode, over the budget."""
    (bound,) = (b.bound for b in BUDGETS if b.figure == "instructions_per_kv_byte")
    name = ": instructions per kv byte"
    decodes = [
        record | {figure: record[figure] / bound for figure in ("value", "lower", "upper")}
        for record in result["records"]
        if record["name"].startswith("decode") and record["name"].endswith(name)
    ]
    title = "Warp instructions per byte of K and V in the loop of decode, over the budget"
    bar_chart(result, path, decodes, title, f"{bound}, the budget at head_dim 128")


def broken_budgets(reports: Sequence[Report]) -> list[str]:
    """A line for each figure out of bounds."""
    return [
        f"{_title(r)}: {budget.figure} is {getattr(r, budget.figure)}, budget {budget.bound}"
        for budget in BUDGETS
        for r in reports
        if budget.broken_by(r)
    ]
