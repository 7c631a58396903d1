"""What the kernels cost on GPUs that are not here: compiled ahead of time, read from machine code.

    python -m bench.static [--json FILE] [--check]

Needs a process without TRITON_INTERPRET. --check exits with 1 when a figure breaks its budget.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paged_kernels import aot
from paged_kernels._heuristics import planned_for
from paged_kernels._launch import Launch
from paged_kernels.copy_kernel import plan_copy
from paged_kernels.testing import make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write
from tqdm import tqdm

from .machine_code import MATRIX_OPCODES, Cubin, amd_usage, staged_tiles

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


def cases() -> Iterator[tuple[str, int, int, int, Launch]]:
    """(target, heads, KV heads, head_dim, launch) of everything reported."""
    for target, device in aot.DEVICES.items():
        with planned_for(device):
            for heads, kv_heads, head_dim in (
                (32, 8, 128),
                (32, 32, 128),
                (32, 8, 64),
                (32, 8, 256),
            ):
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


def table(reports: Sequence[Report]) -> str:
    """The reports as text, a line each."""
    head = (
        "kernel   target   heads    D  tile       warps stages  regs spill  shared KiB  per SM"
        "  buffers  in flight KiB  load B  instr/KV B  instr at " + "/".join(map(str, LENGTHS))
    )
    lines = [head, "-" * len(head)]
    for r in reports:
        line = (
            f"{r.kernel:8} {r.target:7} {r.num_heads:3}/{r.num_kv_heads:<3} {r.head_dim:4}  {r.tile:10}"
            f" {r.num_warps:5} {r.num_stages:6} {r.registers:5} {r.spilled:5}"
            f"  {r.shared_memory / KIB:10.1f}"
        )
        if r.programs_per_sm is not None:
            line += f"  {r.programs_per_sm:6}"
        if r.instructions_per_kv_byte is not None:
            counts = "/".join(str(count) for count in r.instructions.values())
            line += (
                f"  {r.buffers:7}  {r.kib_in_flight:13.0f}  {r.load_bytes:6}"
                f"  {r.instructions_per_kv_byte:10.4f}  {counts} {r.matrix_opcode}"
            )
        lines.append(line)
    return "\n".join(lines)


def broken_budgets(reports: Sequence[Report]) -> list[str]:
    """A line for each figure out of bounds."""
    return [
        f"{r.kernel} on {r.target} ({r.num_heads}/{r.num_kv_heads} heads, D {r.head_dim}): "
        f"{budget.figure} is {getattr(r, budget.figure)}, budget {budget.bound}"
        for budget in BUDGETS
        for r in reports
        if budget.broken_by(r)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    reports = [report(*case) for case in tqdm(list(cases()), desc="compiling", unit="kernel")]
    print(table(reports))
    broken = broken_budgets(reports)
    print(*broken, sep="\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")
    return int(args.check and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
