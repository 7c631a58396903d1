"""The least that a call must move and compute, and the least time that it can take on a GPU.

The bound is the roofline of Williams et al. 2009: whichever takes longer at its peak rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._launch import Launch
from .options import AttentionCall


class Peaks(NamedTuple):
    """Rates that the maker of a GPU gives, which no kernel passes."""

    bytes: float  # per second, of memory
    matrix_flops: float  # per second, dense, 16-bit operands, float32 sums
    float32_flops: float  # per second, exact, without matrix units


# By the names that drivers give them.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": Peaks(1.555e12, 312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": Peaks(2.039e12, 312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": Peaks(1.935e12, 312e12, 19.5e12),
    "NVIDIA L4": Peaks(0.300e12, 121e12, 30.3e12),
    "NVIDIA L40S": Peaks(0.864e12, 362e12, 91.6e12),
    "NVIDIA GeForce RTX 4090": Peaks(1.008e12, 165e12, 82.6e12),
    "NVIDIA H100 80GB HBM3": Peaks(3.35e12, 989e12, 67e12),
    "NVIDIA H100 PCIe": Peaks(2.0e12, 756e12, 51e12),
    "NVIDIA H200": Peaks(4.8e12, 989e12, 67e12),
    "NVIDIA B200": Peaks(8.0e12, 2250e12, 75e12),
    "AMD Instinct MI300X": Peaks(5.3e12, 1307e12, 163e12),
}


class Costs(NamedTuple):
    """What a call must move and compute, whatever the kernel; `parts` is what splitting adds."""

    cache: int  # bytes: each key and value that some query sees, once
    query: int
    out: int  # the log-sum-exp included
    parts: int  # partial results, written and read
    block_ids: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.cache + self.query + self.out + self.parts + self.block_ids

    def seconds(self, peaks: Peaks, dtype: torch.dtype) -> tuple[float, float]:
        """To move the bytes, and to compute: neither can be beaten. dtype: of the queries."""
        exact = dtype == torch.float32
        flops = peaks.float32_flops if exact else peaks.matrix_flops
        return self.bytes / peaks.bytes, self.flops / flops


def costs(call: AttentionCall, launches: Sequence[Launch] = ()) -> Costs:
    """Of a call, with the partial results that its launches exchange.

    Lengths are read from CPU tensors; for others they are the most that the call's bounds allow.
    """
    dims, itemsize = call.dims, call.query.element_size()
    query_lens, seq_lens = _lengths(call)
    keys, pairs, blocks = 0, 0, 0
    for (query_len, seq_len), count in Counter(zip(query_lens, seq_lens, strict=True)).items():
        seen, visible = _visible(call, query_len, seq_len)
        keys, pairs = keys + count * seen, pairs + count * visible
        blocks += count * -(-seen // dims.block_size)
    if call.variant.sliding_window is None:  # a window may end before the shared blocks do
        keys -= call.common_prefix_len * max(0, sum(map(bool, query_lens)) - 1)
    scales = [s for s in (call.k_scale, call.v_scale) if isinstance(s, Tensor) and s.dim() == 3]
    slot = (dims.head_dim + dims.head_dim_v) * call.key_cache.element_size() + 4 * len(scales)
    return Costs(
        cache=keys * dims.num_kv_heads * slot,
        query=sum(query_lens) * dims.num_heads * dims.head_dim * itemsize,
        out=call.out.numel() * itemsize + (0 if call.lse is None else 4 * call.lse.numel()),
        parts=sum(_parts_bytes(launch, query_lens) for launch in launches),
        block_ids=blocks * call.block_table.element_size(),
        flops=2 * pairs * dims.num_heads * (dims.head_dim + dims.head_dim_v),
    )


def _parts_bytes(launch: Launch, query_lens: Sequence[int]) -> int:
    """Float32 values and log-sum-exps that a merge reads, and that were written for it."""
    if "TOKENS" not in launch.constants:
        return 0
    _, _, values, _, _, cu_seqlens_q, _ = launch.args
    num_parts, rows, num_heads, width = values.ptr.shape
    if cu_seqlens_q is not None:  # room for TOKENS of each sequence, used by those of few
        most = launch.constants["TOKENS"]
        rows = sum(query_len for query_len in query_lens if query_len <= most)
    return 2 * 4 * int(num_parts * rows * num_heads * (width + 1))


def _lengths(call: AttentionCall) -> tuple[list[int], list[int]]:
    """Query tokens and keys of each sequence."""
    num_seqs = len(call.seq_lens)
    if call.query.device.type != "cpu":
        each, more = divmod(len(call.query), num_seqs)
        query_lens = [min(call.max_query_len, each + (seq < more)) for seq in range(num_seqs)]
        return query_lens, [call.max_seq_len] * num_seqs
    if call.cu_seqlens_q is None:
        return [1] * num_seqs, call.seq_lens.tolist()
    query_lens = [end - start for start, end in pairwise(call.cu_seqlens_q.tolist())]
    return query_lens, call.seq_lens.tolist()


def _visible(call: AttentionCall, query_len: int, seq_len: int) -> tuple[int, int]:
    """(keys that some query of a sequence sees, pairs that are seen). A draft mask hides none."""
    if query_len == 0 or seq_len == 0:
        return 0, 0
    pos = torch.arange(seq_len - query_len, seq_len)
    first, end = torch.zeros_like(pos), torch.full_like(pos, seq_len)
    if call.variant.causal and call.draft_mask is None:
        end = (pos + 1).clamp(min=0)
    if call.variant.sliding_window is not None:
        first = (pos + 1 - call.variant.sliding_window).clamp(min=0)
    return seq_len - int(first[0]), int((end - first).clamp(min=0).sum())
