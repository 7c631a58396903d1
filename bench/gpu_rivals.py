"""What the kernels are timed beside on a GPU, each as its own project would be called: see `gpu`.

A builder takes a problem and returns what to time. It raises where a project is not installed, or
in a release that it was not written for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from paged_kernels import paged_attention
from torch import Tensor

BLOCK_SIZE = 16
OURS, SDPA = "paged", "SDPA"
# Number of the K/V copy -> the output, a view away from [num_seqs, query_len, num_heads, head_dim].
Run = Callable[[int], Tensor]


class Shape(NamedTuple):
    """Equal sequences, whose last `query_len` tokens are queries."""

    name: str
    num_seqs: int
    query_len: int
    seq_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


class Problem:
    """Tensors of a shape: contiguous K and V, and the same in blocks at random places.

    Copies of K and V are used in turn, so that none is in the L2 cache when its turn comes.
    """

    def __init__(self, shape: Shape, device: torch.device, num_copies: int = 2) -> None:
        self.shape, self.device, self.num_copies = shape, device, num_copies
        n, heads = shape.num_seqs, shape.num_kv_heads
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, dtype=torch.bfloat16, device=device)
        self.query = normal(n * shape.query_len, shape.num_heads, shape.head_dim)
        # [num_seqs, tokens, heads, head_dim]
        self.keys = [normal(n, shape.seq_len, heads, shape.head_dim) for _ in range(num_copies)]
        self.values = [normal(n, shape.seq_len, heads, shape.head_dim) for _ in range(num_copies)]
        width = -(-shape.seq_len // BLOCK_SIZE)
        table = torch.randperm(n * width, generator=generator, device=device)
        self.table = table.view(n, width).int()
        self.key_caches = [self._paged(key) for key in self.keys]
        self.value_caches = [self._paged(value) for value in self.values]
        self.seq_lens = torch.full((n,), shape.seq_len, dtype=torch.int32, device=device)
        starts = torch.arange(n + 1, dtype=torch.int32, device=device)
        self.cu_q, self.cu_k = starts * shape.query_len, starts * shape.seq_len

    def _paged(self, rows: Tensor) -> Tensor:
        padding = -self.shape.seq_len % BLOCK_SIZE
        blocks = F.pad(rows, (0, 0, 0, 0, 0, padding)).view(-1, BLOCK_SIZE, *rows.shape[2:])
        return torch.empty_like(blocks).index_copy_(0, self.table.flatten().long(), blocks)

    def arguments(self, copy: int) -> dict[str, Any]:
        """Of `paged_attention`, hints included."""
        decode = self.shape.query_len == 1
        return {
            "query": self.query,
            "key_cache": self.key_caches[copy],
            "value_cache": self.value_caches[copy],
            "block_table": self.table,
            "seq_lens": self.seq_lens,
            "cu_seqlens_q": None if decode else self.cu_q,
            "max_query_len": self.shape.query_len,
            "max_seq_len": self.shape.seq_len,
        }

    @cached_property
    def dense(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Query, keys and values as SDPA likes them: contiguous [num_seqs, heads, tokens, head_dim]."""
        query = self.query.view(self.shape.num_seqs, -1, *self.query.shape[1:])
        keys = [key.transpose(1, 2).contiguous() for key in self.keys]
        values = [value.transpose(1, 2).contiguous() for value in self.values]
        return query.transpose(1, 2).contiguous(), keys, values


def paged(problem: Problem) -> Run:
    out = torch.empty_like(problem.query)
    calls = [problem.arguments(copy) for copy in range(problem.num_copies)]

    def run(copy: int) -> Tensor:
        paged_attention(**calls[copy], out=out, backend="triton")
        return out

    return run


def sdpa(problem: Problem) -> Run:
    """Torch's own attention over contiguous K and V: what "dense" means."""
    from torch.nn.attention.bias import causal_lower_right

    shape, (query, keys, values) = problem.shape, problem.dense
    options: dict[str, Any] = {"enable_gqa": shape.num_heads != shape.num_kv_heads}
    if shape.query_len == shape.seq_len:
        options["is_causal"] = True
    elif shape.query_len > 1:
        options["attn_mask"] = causal_lower_right(shape.query_len, shape.seq_len)

    def run(copy: int) -> Tensor:
        out = F.scaled_dot_product_attention(query, keys[copy], values[copy], **options)
        return out.transpose(1, 2)

    return run


def sdpa_packed(problem: Problem) -> Run:
    """SDPA with the query heads of a KV head as rows: its best form of a decode."""
    shape = problem.shape
    if shape.query_len > 1 or shape.num_heads == shape.num_kv_heads:
        raise ValueError("only decodes of grouped heads have rows to pack")
    rows = problem.query.view(shape.num_seqs, shape.num_kv_heads, -1, shape.head_dim)
    _, keys, values = problem.dense
    return lambda copy: F.scaled_dot_product_attention(rows, keys[copy], values[copy])


def flex(problem: Problem) -> Run:
    """FlexAttention, compiled, over contiguous K and V."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, (query, keys, values) = problem.shape, problem.dense
    offset = shape.seq_len - shape.query_len

    def causal(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + offset

    mask = None
    if shape.query_len > 1:
        sizes = (None, None, shape.query_len, shape.seq_len)
        mask = create_block_mask(causal, *sizes, device=problem.device)
    attend: Any = torch.compile(flex_attention, dynamic=False)

    def run(copy: int) -> Tensor:
        out: Tensor = attend(query, keys[copy], values[copy], block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def varlen(problem: Problem) -> Run:
    """torch.nn.attention.varlen over packed K and V."""
    from torch.nn.attention.varlen import varlen_attn

    shape = problem.shape
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True}
    if "is_causal" not in known:
        options = {"window_size": (-1, 0)}
    if shape.num_heads != shape.num_kv_heads:
        options["enable_gqa"] = True  # TypeError in releases that know no grouped heads
    lengths = (problem.cu_q, problem.cu_k, shape.query_len, shape.seq_len)

    def run(copy: int) -> Tensor:
        key, value = problem.keys[copy].flatten(0, 1), problem.values[copy].flatten(0, 1)
        out = varlen_attn(problem.query, key, value, *lengths, **options)
        assert isinstance(out, Tensor)
        return out

    return run


def flash_attn(problem: Problem) -> Run:
    """flash-attn's decode and prefill over contiguous K and V (it wants pages of 256 tokens)."""
    attend, query = import_module("flash_attn").flash_attn_with_kvcache, problem.query
    query = query.view(problem.shape.num_seqs, -1, *query.shape[1:])

    def run(copy: int) -> Tensor:
        out: Tensor = attend(
            query, problem.keys[copy], problem.values[copy],
            cache_seqlens=problem.seq_lens, causal=True,
        )  # fmt: skip
        return out

    return run


def flashinfer(problem: Problem) -> Run:
    """FlashInfer over the same blocks; planned beforehand, as its users do once per step."""
    library = import_module("flashinfer")
    shape, width = problem.shape, problem.table.shape[1]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=problem.device)
    last = torch.full_like(problem.seq_lens, (shape.seq_len - 1) % BLOCK_SIZE + 1)
    pages = (starts * width, problem.table.flatten(), last)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    if shape.query_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=shape.num_heads > shape.num_kv_heads
        )
        wrapper.plan(
            *pages, *heads, q_data_type=problem.query.dtype, kv_data_type=problem.query.dtype
        )
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(problem.cu_q, *pages, *heads, causal=True, q_data_type=problem.query.dtype)
    caches = list(zip(problem.key_caches, problem.value_caches, strict=True))
    return lambda copy: wrapper.run(problem.query, caches[copy])


def vllm(problem: Problem) -> Run:
    """vLLM's Triton kernel over the same blocks."""
    attend = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    shape, out = problem.shape, torch.empty_like(problem.query)
    segments = 16  # as its engine calls it
    parts = partial(torch.empty, device=problem.device, dtype=torch.float32)
    rows = (len(out), shape.num_heads, segments)
    options = {
        "seq_threshold_3D": 128 // shape.num_kv_heads,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": parts((*rows, shape.head_dim)),
        "softmax_segm_max": parts(rows),
        "softmax_segm_expsum": parts(rows),
    }

    def run(copy: int) -> Tensor:
        attend(
            problem.query, problem.key_caches[copy], problem.value_caches[copy], out,
            problem.cu_q, shape.query_len, problem.seq_lens, shape.seq_len,
            shape.head_dim**-0.5, True, (-1, -1), problem.table, 0.0, None, None, None, **options,
        )  # fmt: skip
        return out

    return run


# In the order in which they are timed: those that compile last come last.
RIVALS: dict[str, Callable[[Problem], Run]] = {
    SDPA: sdpa,
    "SDPA, packed rows": sdpa_packed,
    "varlen_attn": varlen,
    "flash-attn": flash_attn,
    "FlashInfer": flashinfer,
    "vLLM Triton": vllm,
    "FlexAttention": flex,
}
