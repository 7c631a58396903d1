"""Batches as a server would pass them, made unforgiving: the first half of `testing`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from . import reference
from ._guards import check_guard, guarded_empty, poison
from ._quantise import QUANTISED_DTYPES
from .api import paged_attention

STALE_IDS = (2**31 - 1, -1, -(2**31), 10**6)  # what stands in a table past its last block

Layout = Literal["nhd", "hnd", "interleaved", "packed"]


@dataclass(frozen=True)
class PagedBatch:
    """A batch of sequences in a poisoned pool. `arguments()` is what `paged_attention` takes."""

    query: Tensor  # [num_tokens, num_heads, head_dim], padding rows included
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim_v]
    block_table: Tensor  # [num_seqs, max_blocks_per_seq]
    seq_lens: Tensor  # [num_seqs]
    cu_seqlens_q: Tensor | None  # [num_seqs + 1]
    key: Tensor  # [sum of seq_lens, num_kv_heads, head_dim], what the cache was written from
    value: Tensor  # [sum of seq_lens, num_kv_heads, head_dim_v]
    slots: Tensor  # int64 [sum of seq_lens], where each token lies
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    guarded: list[Tensor] = field(default_factory=list)  # all that lies between guard bands

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Keyword arguments of `paged_attention`, `options` on top."""
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "cu_seqlens_q": self.cu_seqlens_q,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            **options,
        }

    def attend(self, **options: Any) -> Any:
        """`paged_attention` of this batch."""
        return paged_attention(**self.arguments(**options))

    def relabelled(self, seed: int = 1) -> PagedBatch:
        """The same sequences with their blocks at other physical places."""
        num_blocks, block_size = self.key_cache.shape[:2]
        generator = torch.Generator().manual_seed(seed)
        new_place = torch.randperm(num_blocks, generator=generator).to(self.block_table)
        old_place = new_place.argsort()
        is_block = (self.block_table >= 0) & (self.block_table < num_blocks)
        clipped = self.block_table.clamp(0, num_blocks - 1).long()
        scales = [
            scale[old_place] if self.key_cache.dtype == torch.int8 else scale  # type: ignore[index]
            for scale in (self.k_scale, self.v_scale)
        ]
        return replace(
            self,
            key_cache=self.key_cache[old_place],
            value_cache=self.value_cache[old_place],
            block_table=torch.where(is_block, new_place[clipped], self.block_table),
            slots=new_place[self.slots // block_size].long() * block_size + self.slots % block_size,
            k_scale=scales[0],
            v_scale=scales[1],
            guarded=[],
        )

    def rows(self, order: Sequence[int]) -> PagedBatch:
        """The sequences `order` of this batch, in that order, over the same caches."""
        starts = range(len(self.query) + 1) if self.cu_seqlens_q is None else self.cu_seqlens_q
        spans = [range(int(starts[seq]), int(starts[seq + 1])) for seq in order]
        index = torch.tensor(list(order), dtype=torch.int64, device=self.query.device)
        cu_seqlens_q = None
        if self.cu_seqlens_q is not None:
            ends = itertools.accumulate((len(span) for span in spans), initial=0)
            cu_seqlens_q = self.cu_seqlens_q.new_tensor(list(ends))
        return replace(
            self,
            query=self.query[list(itertools.chain.from_iterable(spans))],
            block_table=self.block_table[index],
            seq_lens=self.seq_lens[index],
            cu_seqlens_q=cu_seqlens_q,
        )

    def check_guards(self) -> None:
        """AssertionError when something was written beside the caches or outputs."""
        for view in self.guarded:
            check_guard(view)


def make_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    content: Literal["random", "counting"] = "random",
    layout: Layout = "nhd",
    fused_query: bool = False,
    filler: float = float("nan"),
    padding_rows: int = 0,
    shared_blocks: int = 0,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> PagedBatch:
    """Sequences of `seq_lens` tokens whose last `query_lens` are queries; None: decode.

    Args:
        content: "random" is N(0, 1); "counting" has queries 0 and value `i` at position `i`, so
            that every output is a mean of positions.
        layout: of the caches in memory: "nhd" is contiguous; "hnd" has the heads outside the
            slots; "interleaved" keeps K and V of a block together; "packed" those of a head.
        fused_query: the query is a slice of a fused QKV.
        filler: what the slots that no token owns hold.
        padding_rows: query rows past the last sequence, poisoned.
        shared_blocks: leading blocks that all sequences have in common.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    table, num_blocks = _tables(seq_lens, block_size, shared_blocks, generator)
    slots = torch.tensor(
        [
            row[position // block_size] * block_size + position % block_size
            for row, seq_len in zip(table, seq_lens, strict=True)
            for position in range(seq_len)
        ],
        dtype=torch.int64,
        device=device,
    )
    num_tokens = (len(seq_lens) if query_lens is None else sum(query_lens)) + padding_rows
    key = torch.randn(len(slots), num_kv_heads, head_dim, generator=generator)
    value = torch.randn(len(slots), num_kv_heads, head_dim_v, generator=generator)
    query = torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator)
    if content == "counting":
        query.zero_()
        value = _positions(seq_lens).float()[:, None, None].expand_as(value).contiguous()
    shared = _positions(seq_lens) < shared_blocks * block_size  # has one K and V in all sequences
    for tensor in (key, value):
        tensor[shared] = tensor[_positions(seq_lens)[shared]]
    query[num_tokens - padding_rows :] = float("nan")
    query = query.to(device, dtype)[:, :num_heads]
    key, value = key.to(device, dtype), value.to(device, dtype)

    shape = (num_blocks, block_size, num_kv_heads)
    key_cache, value_cache, guarded = _caches(
        layout, shape, head_dim, head_dim_v, cache_dtype, device
    )
    k_scale, v_scale = _scales(shape, cache_dtype, device)
    poison(key_cache, filler)
    poison(value_cache, filler)
    reference.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale, v_scale)

    def index(values: Sequence[Any], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=index_dtype, device=device).reshape(shape)

    starts = None if query_lens is None else list(itertools.accumulate(query_lens, initial=0))
    return PagedBatch(
        query=query if fused_query else query.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=index(table, len(seq_lens), -1 if seq_lens else 2),
        seq_lens=index(seq_lens, len(seq_lens)),
        cu_seqlens_q=None if starts is None else index(starts, len(starts)),
        key=key,
        value=value,
        slots=slots,
        k_scale=k_scale,
        v_scale=v_scale,
        guarded=guarded,
    )


def _tables(
    seq_lens: Sequence[int], block_size: int, shared_blocks: int, generator: torch.Generator
) -> tuple[list[list[int]], int]:
    """A row of block ids per sequence, random and then stale, and the size of the pool."""
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_of) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    shared = [free.pop() for _ in range(shared_blocks)]
    width = max(blocks_of, default=0) + 2
    stale = itertools.cycle(STALE_IDS)
    table = []
    for n in blocks_of:
        owned = (shared + [free.pop() for _ in range(n - shared_blocks)])[:n]
        table.append(owned + [next(stale) for _ in range(width - n)])
    return table, num_blocks


def _positions(seq_lens: Sequence[int]) -> Tensor:
    """The position of each token in its own sequence, packed."""
    return torch.cat([torch.arange(seq_len) for seq_len in [*seq_lens, 0]])


def _caches(
    layout: Layout,
    shape: tuple[int, int, int],
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Key cache, value cache, and the buffers that they are views of."""
    num_blocks, block_size, num_kv_heads = shape
    if layout == "interleaved":
        if head_dim != head_dim_v:
            raise ValueError(f"interleaved K and V need one head_dim, got {head_dim}, {head_dim_v}")
        both = guarded_empty((num_blocks, 2, *shape[1:], head_dim), dtype, device)
        return both[:, 0], both[:, 1], [both]
    if layout == "packed":
        both = guarded_empty((*shape, head_dim + head_dim_v), dtype, device)
        return both[..., :head_dim], both[..., head_dim:], [both]
    inner = shape if layout == "nhd" else (num_blocks, num_kv_heads, block_size)
    caches = [guarded_empty((*inner, width), dtype, device) for width in (head_dim, head_dim_v)]
    key_cache, value_cache = caches if layout == "nhd" else [c.transpose(1, 2) for c in caches]
    return key_cache, value_cache, caches


def _scales(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str | torch.device
) -> tuple[float | Tensor | None, float | Tensor | None]:
    """One scale of each kind for fp8; poisoned planes for int8, which the write fills."""
    if dtype not in QUANTISED_DTYPES:
        return None, None
    if dtype == torch.int8:
        planes = [guarded_empty(shape, torch.float32, device) for _ in range(2)]
        return planes[0], planes[1]
    return 0.02, torch.linspace(0.01, 0.03, shape[2], device=device)
