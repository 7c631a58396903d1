"""Checks that only a GPU can make: long grids, far offsets, recompiles, CUDA graphs: see `gpu`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from paged_kernels import copy_blocks, paged_attention, reshape_and_cache, swap_blocks
from paged_kernels._launch import recorded
from paged_kernels.attention import attention_kernel
from paged_kernels.merge import merge_kernel
from paged_kernels.testing import make_batch
from paged_kernels.write import write_kernel

from bench.gpu_checks import SHORT, Check, assert_same_bytes, checks, run_checks

PAST = 2**31  # elements, or bytes of an int8 cache
ALIGNMENTS = 3  # compiles of one kernel that the alignment of pointers and strides may cost


def limit_checks(sanitize: bool = False) -> Iterator[Check]:
    """All of them; together they take 20 GB."""
    if sanitize:
        yield Check("compute-sanitizer", check_sanitized)
    yield Check("write of 65,536 tokens", check_long_write)
    yield Check("decode of 70,000 sequences", check_many_sequences)
    for dtype in (torch.float16, torch.int8):
        name = str(dtype).removeprefix("torch.")
        yield Check(f"offsets past 2^31, {name}", partial(check_far_blocks, dtype))
    yield Check("rows 2^30 elements apart", check_far_rows)
    yield Check("copy and swap", check_block_moves)
    yield Check("recompiles", check_recompiles)
    for options in ({}, {"num_splits": 4}, {"common_prefix_len": 256}):
        name = ", ".join(options) or "chosen splits"
        yield Check(f"CUDA graph, {name}", partial(check_graph, options))


def check_long_write(device: torch.device, tokens: int = 65_536) -> None:
    """The grid has a program per token."""
    heads, width = 8, 128
    key, value = torch.randn(2, tokens, heads, width, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(tokens, device=device)
    shape = (tokens // 16, 16, heads, width)
    keys, values = torch.zeros(2, *shape, dtype=torch.bfloat16, device=device)
    reshape_and_cache(key, value, keys, values, slots, backend="triton")
    for rows, cache in ((key, keys), (value, values)):
        assert_same_bytes(cache.view(tokens, heads, width)[slots], rows)


def check_many_sequences(device: torch.device, num_seqs: int = 70_000) -> None:
    """Attention to one key is its value."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float16, "device": device, "generator": generator}
    query = torch.randn(num_seqs, 2, 64, **options)
    key_cache, value_cache = torch.randn(2, 512, 16, 1, 64, **options)
    table = torch.randint(512, (num_seqs, 1), device=device, dtype=torch.int32)
    seq_lens = torch.ones(num_seqs, device=device, dtype=torch.int32)
    for num_splits in (None, 2):
        out = paged_attention(
            query, key_cache, value_cache, table, seq_lens, num_splits=num_splits, backend="triton"
        )
        assert isinstance(out, torch.Tensor)
        want = value_cache[table[:, 0].long(), 0].expand_as(out)
        assert torch.equal(out, want), f"num_splits {num_splits}"


def check_far_blocks(dtype: torch.dtype, device: torch.device) -> None:
    """Write, decode, split decode and prefill in the last blocks of a cache of 2^31 elements."""
    heads, width, block_size, tokens = 2, 128, 16, 200
    num_blocks = PAST // (block_size * heads * width) + 40
    shape = (num_blocks, block_size, heads)
    keys, values = (torch.empty(*shape, width, dtype=dtype, device=device) for _ in range(2))
    scales: dict[str, Any] = {}
    if dtype == torch.int8:
        scales = {f"{n}_scale": torch.full(shape, float("nan"), device=device) for n in "kv"}
    blocks = num_blocks - 1 - torch.randperm(tokens // block_size + 1, device=device)
    position = torch.arange(tokens, device=device)
    slots = blocks[position // block_size] * block_size + position % block_size
    rows = torch.ones(tokens, heads, width, device=device).half() * position[:, None, None]
    reshape_and_cache(rows, rows, keys, values, slots, **scales, backend="triton")
    query = torch.zeros(40, heads, width, dtype=torch.float16, device=device)
    table, seq_lens = blocks[None].int(), torch.tensor([tokens], device=device)
    attend: Any = partial(paged_attention, **scales, backend="triton")
    for num_splits in (1, 3):
        out = attend(query[:1], keys, values, table, seq_lens, num_splits=num_splits)
        assert float((out - 99.5).abs().max()) < 0.2, f"decode, num_splits {num_splits}"
    starts = torch.tensor([0, 40], device=device)
    out = attend(query, keys, values, table, seq_lens, cu_seqlens_q=starts)
    want = (tokens - 40 + torch.arange(40, device=device)) / 2
    assert float((out - want[:, None, None]).abs().max()) < 0.2, "prefill"

    last = num_blocks - 1
    copy_blocks([keys, values], [(int(blocks[0]), last - 30)])
    for cache in (keys, values):
        assert_same_bytes(cache[last - 30], cache[blocks[0]])


def check_far_rows(device: torch.device) -> None:
    """Query and output rows so far apart that the third starts at 2^31 elements."""
    cache = torch.ones(1, 16, 2, 16, dtype=torch.float16, device=device)
    far = torch.empty(PAST + 4096, dtype=torch.float16, device=device)
    query = far.as_strided((3, 2, 16), (2**30, 16, 1)).zero_()
    out = far.as_strided((3, 2, 16), (2**30, 16, 1), 1024)
    table = torch.zeros(3, 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((3,), 5, device=device)
    every: tuple[dict[str, Any], ...] = (
        {}, {"num_splits": 2}, {"cu_seqlens_q": torch.arange(4, device=device)},
    )  # fmt: skip
    for options in every:
        out.zero_()
        paged_attention(query, cache, cache, table, seq_lens, out=out, **options, backend="triton")
        assert bool((out == 1).all()), f"options {list(options)}"


def check_block_moves(device: torch.device) -> None:
    """Copies within a pool, some of which wait for others, and swaps there and back."""
    pool = [torch.randn(64, 16, 2, 80, device=device).bfloat16() for _ in range(4)]
    pairs = [(0, 1), (1, 2), (9, 60), (60, 9), (5, 5)]
    want = [cache.clone() for cache in pool]
    for tensor, cache in zip(want, pool, strict=True):
        for source, destination in pairs:
            tensor[destination] = cache[source]
    copy_blocks(pool, pairs)
    for got, expected in zip(pool, want, strict=True):
        assert_same_bytes(got, expected)

    host = [torch.zeros(8, *cache.shape[1:], dtype=cache.dtype) for cache in pool]
    swap_blocks(pool, host, [(3, 7), (50, 0)])
    swap_blocks(host, pool, [(7, 20), (0, 21)])
    for cache in pool:
        assert_same_bytes(cache[20:22], cache[[3, 50]])


def check_recompiles(device: torch.device) -> None:
    """A kernel is compiled once for all batches, lengths and table widths."""
    kernels = (attention_kernel, merge_kernel, write_kernel)
    before = [num_compiled(kernel, device) for kernel in kernels]
    with recorded() as launches:
        for batch, length in itertools.product((1, 2, 7, 16, 33, 64), (1, 2, 15, 16, 128, 300)):
            _attend_at_widths(batch, length, device)
    for kernel, known in zip(kernels, before, strict=True):
        options = {repr(launch.options) for launch in launches if launch.kernel is kernel}
        found = num_compiled(kernel, device) - known
        assert 0 < found <= ALIGNMENTS * len(options), (
            f"{kernel.__name__}: {found} compiles for {len(options)} choices of options"
        )


def num_compiled(kernel: Any, device: torch.device) -> int:
    """Variants of a kernel that Triton holds for a device."""
    return len(kernel.device_caches[device.index][0])


def _attend_at_widths(batch: int, length: int, device: torch.device) -> None:
    """Decode, mixed and write, with tables from as narrow as can be to 4,096 blocks."""
    query_lens = [min(length, 1 + 9 * (seq % 5)) for seq in range(batch)]
    sizes: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16, "device": device}
    for queries in (None, query_lens):
        paged = make_batch([length] * batch, queries, **sizes)
        for width in (paged.block_table.shape[1], 33, 100, 1000, 4096):
            table = torch.zeros(batch, width, dtype=torch.int32, device=device)
            table[:, : -(-length // 16)] = paged.block_table[:, : -(-length // 16)]
            for num_splits in (None, 2):
                options = {"block_table": table, "max_seq_len": length, "num_splits": num_splits}
                paged.attend(**options, backend="triton")
        reshape_and_cache(
            paged.key, paged.value, paged.key_cache, paged.value_cache, paged.slots,
            backend="triton",
        )  # fmt: skip


def check_graph(options: dict[str, Any], device: torch.device) -> None:
    """A decode with hints is captured, and replayed on other queries, lengths and blocks."""
    batch = make_batch(
        [1000, 300, 264, 700], num_heads=8, head_dim=128, dtype=torch.bfloat16, shared_blocks=16,
        device=device,
    )  # fmt: skip
    shorter = replace(batch, query=-batch.query, seq_lens=batch.seq_lens - 7)
    options = {**options, "max_seq_len": 1024, "backend": "triton"}
    changing = ("query", "block_table", "seq_lens")
    static = {name: getattr(batch, name).clone() for name in changing}
    out = torch.empty_like(batch.query)

    def attend() -> None:
        paged_attention(**batch.arguments(**options, **static, out=out))

    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):  # compile and load before capturing
            attend()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        for other in (batch, batch.rows([3, 1, 0, 2]), shorter):
            for name in changing:
                static[name].copy_(getattr(other, name))
            graph.replay()
            assert torch.equal(out, other.attend(**options))


def check_sanitized(device: torch.device) -> None:
    """compute-sanitizer sees no access outside a tensor, in this file run as a script."""
    tool = shutil.which("compute-sanitizer")
    assert tool is not None, "compute-sanitizer is not installed"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "1", sys.executable, "-m", __name__]
    # Every tensor an allocation of its own, so that nothing lies beside it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def main() -> int:
    """A few short checks in this process."""
    todo = [check for check in checks(quick=True, lengths=SHORT) if "bfloat16" in check.name]
    errors = [done.error for done in run_checks(todo, torch.device("cuda", 0)) if done.error]
    print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
