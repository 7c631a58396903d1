"""Correctness of the Triton kernels on a device, checked before anything is timed: see `gpu`.

Every check builds its own poisoned inputs and raises AssertionError when a kernel is wrong. What
only a GPU can show is in `gpu_limits`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from paged_kernels import reshape_and_cache
from paged_kernels.copy_kernel import plan_copy
from paged_kernels.testing import (
    PagedBatch,
    assert_matches_reference,
    check_guard,
    guarded_empty,
    make_batch,
    poison,
)
from torch import Tensor
from tqdm import tqdm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)

# Options together, so that few calls turn on each of them for every dtype.
OPTION_SETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "scores": ("softcap", "alibi_slopes", "sinks", "scale"),
    "window": ("sliding_window", "sinks"),
    "not causal": ("not_causal", "softcap"),
    "draft mask": ("draft_mask", "sliding_window"),
    "cascade": ("common_prefix_len", "sinks", "softcap"),
}
SIZES: tuple[dict[str, Any], ...] = (
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "block_size": 32, "layout": "hnd"},
    {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80, "block_size": 1, "fused_query": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 192, "head_dim_v": 128, "block_size": 64},
    {"num_heads": 16, "num_kv_heads": 1, "head_dim": 256, "layout": "interleaved"},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 96, "block_size": 17, "layout": "packed"},
)


class Check(NamedTuple):
    """One check, to be run on a device, perhaps in another process."""

    name: str
    run: Callable[[torch.device], None]


@dataclass
class Outcome:
    """What became of a check; error None: it passed."""

    name: str
    seconds: float
    error: str | None = None


class Lengths(NamedTuple):
    """Of the sequences, and of the queries of a mixed batch."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    mixed_queries: tuple[int, ...]
    prefix: int  # tokens that all share, for cascade; a multiple of every block size but 17


LENGTHS = Lengths((1, 1000, 0, 77, 300), (300, 77, 16, 513, 5), (300, 1, 16, 64, 0), 256)
SHORT = Lengths((1, 40, 0), (21, 20, 3), (1, 20, 0), 128)


def checks(quick: bool = False, lengths: Lengths = LENGTHS) -> Iterator[Check]:
    """Attention over every option and dtype; writing and copying to the byte."""
    sizes = itertools.cycle(SIZES)
    dtypes = [(dtype, None) for dtype in DTYPES]
    stored = list(zip(DTYPES[::-1], QUANTISED, strict=True))
    for dtype, cache_dtype in [*dtypes, *stored]:
        for name, options in OPTION_SETS.items():
            size = next(sizes)
            if "common_prefix_len" in options:
                size = {**size, "block_size": 16}
            if quick and options and (dtype, cache_dtype) != (torch.bfloat16, None):
                continue
            run = partial(check_attention, dtype, cache_dtype, options, size, lengths)
            kind = f"{_name(dtype, cache_dtype)}, {name}, D {size['head_dim']}"
            yield Check(f"attention, {kind}", run)
        next(sizes)  # another size for each option next time
    for dtype in DTYPES:
        for cache_dtype in (None, *QUANTISED):
            name = f"write, {_name(dtype, cache_dtype)}"
            yield Check(name, partial(check_write, dtype, cache_dtype))
    yield Check("copy", check_copy)


def check_attention(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    options: Sequence[str],
    size: dict[str, Any],
    lengths: Lengths,
    device: torch.device,
) -> None:
    """Decode, split decode, prefill and mixed batches against the float64 reference."""
    if cache_dtype == torch.float8_e4m3fn and not _has_e4m3(device):
        return
    prefix = lengths.prefix if "common_prefix_len" in options else 0
    inputs: dict[str, Any] = {
        **size, "dtype": dtype, "cache_dtype": cache_dtype, "device": device,
        "shared_blocks": prefix // 16,
    }  # fmt: skip
    decode = make_batch([prefix + max(n, min(prefix, 1)) for n in lengths.decode], **inputs)
    seq_lens = [prefix + n for n in lengths.mixed]
    mixed = make_batch(seq_lens, lengths.mixed_queries, padding_rows=2, **inputs)
    for batch, longest in ((decode, 1), (mixed, max(lengths.mixed_queries))):
        chosen = _options(batch, options, longest, prefix)
        for name, value in (("num_splits", 1), ("num_splits", 3), ("split_size", 100)):
            assert_matches_reference(batch, "triton", **(chosen | {name: value}))
        assert_matches_reference(batch, "triton", **chosen, return_lse=False)


def _options(batch: PagedBatch, names: Sequence[str], longest: int, prefix: int) -> dict[str, Any]:
    """Arguments of `paged_attention` for option names."""
    num_heads, device = batch.query.shape[1], batch.query.device
    generator = torch.Generator().manual_seed(0)
    tree = torch.rand(len(batch.seq_lens), longest, longest, generator=generator) < 0.5
    every = {
        "softcap": 3.0,
        "scale": 1.5 * batch.query.shape[2] ** -0.5,
        "sliding_window": 37,
        "alibi_slopes": (2.0 ** -torch.linspace(1, 8, num_heads)).to(device),
        "sinks": torch.linspace(-1, 3, num_heads).to(device),
        "draft_mask": (tree | torch.eye(longest).bool()).to(device),
        "common_prefix_len": prefix,
    }
    chosen = {name: every[name] for name in names if name in every}
    return chosen | ({"causal": False} if "not_causal" in names else {})


def check_write(dtype: torch.dtype, cache_dtype: torch.dtype | None, device: torch.device) -> None:
    """Every byte as the torch backend writes it: rounding, saturation, NaN, padding slots."""
    if cache_dtype == torch.float8_e4m3fn and not _has_e4m3(device):
        return
    tokens, heads, width = 70, 3, 80
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(tokens, 2 * heads, width, generator=generator)
    rows[1, :, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, 448.0, -464.0, 1e-3, 2.0**-9])  # ties
    rows[2, :, :6] = torch.tensor([6e4, -6e4, float("inf"), -float("inf"), 1e-7, -0.0])
    rows[3, :, 0] = float("nan")
    rows[4] = 0.0
    rows = rows.to(device, dtype)
    slots = torch.randperm(6 * 16, generator=generator)[:tokens].to(device)
    slots[::9] = -1
    scales: list[Any] = [None]
    if cache_dtype == torch.int8:
        scales = ["planes"]
    elif cache_dtype is not None:
        scales += [0.3, torch.tensor([0.3, 0.007, 1.7], device=device)]
    for scale in scales:
        memory = []
        for backend in ("triton", "torch"):
            shape, stored = (6, 16, heads), cache_dtype or dtype
            keys, values = (guarded_empty((*shape, width), stored, device) for _ in range(2))
            planes = [guarded_empty(shape, torch.float32, device) for _ in range(2)]
            k_scale, v_scale = planes if scale == "planes" else (scale, scale)
            reshape_and_cache(
                rows[:, :heads], rows[:, heads:], keys, values, slots,
                k_scale=k_scale, v_scale=v_scale, backend=backend,
            )  # fmt: skip
            memory.append([keys, values, *planes])
            for tensor in memory[-1]:
                check_guard(tensor)
        # The interpreter's casts are within one unit: only a GPU is held to the byte.
        unit = int(device.type == "cpu" and cache_dtype is not None)
        for got, want in zip(*memory, strict=True):
            assert_same_bytes(got, want, unit if got.dtype == cache_dtype else 0)


def check_copy(device: torch.device) -> None:
    """K, V and scale planes of several layers in one launch, to the byte."""
    caches = [
        poison(torch.empty(9, 16, 2, 24, dtype=torch.bfloat16, device=device)),
        torch.randint(-128, 128, (9, 16, 2, 80), dtype=torch.int8, device=device),
        torch.randn(9, 16, 2, device=device),
        torch.randn(9, 2, 5, 16, device=device)[:, 0],
    ]
    pairs = torch.tensor([[0, 8], [3, 1], [3, 2], [7, 5]])
    want = [cache.clone() for cache in caches]
    for tensor in want:
        tensor[pairs[:, 1].to(device)] = tensor[pairs[:, 0].to(device)]
    launch = plan_copy(caches, pairs)
    assert launch is not None
    launch.run()
    for cache, expected in zip(caches, want, strict=True):
        assert_same_bytes(cache, expected)


def assert_same_bytes(got: Tensor, want: Tensor, unit: int = 0) -> None:
    """Equal bit patterns, give or take `unit`; one NaN is as good as another."""
    nan = got.float().isnan()
    assert torch.equal(nan, want.float().isnan()), "NaN in other places"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    difference = (got.view(integer).long() - want.view(integer).long()).masked_fill(nan, 0).abs()
    assert int(difference.max()) <= unit, (
        f"{int((difference > unit).sum())} of {got.numel()} {got.dtype} values differ, "
        f"by up to {int(difference.max())} units"
    )


def run_checks(todo: Sequence[Check], device: torch.device, num_workers: int = 0) -> list[Outcome]:
    """Run all, in processes of their own if num_workers: most of the time is spent compiling."""
    bar = partial(tqdm, total=len(todo), desc="checking", unit="check")
    if num_workers == 0:
        return list(bar(outcome(check, device) for check in todo))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        return list(bar(pool.map(outcome, todo, itertools.repeat(device))))


def outcome(check: Check, device: torch.device) -> Outcome:
    """Run one check to its end, kernels included."""
    start, error = time.perf_counter(), None
    try:
        check.run(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:  # a kernel that does not compile is wrong too
        error = traceback.format_exc(limit=-3)
    return Outcome(check.name, time.perf_counter() - start, error)


def _has_e4m3(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def _name(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if cache_dtype is None else f"{name} over {str(cache_dtype).removeprefix('torch.')}"
