"""The KV cache of a whole model, and the one-object path over the kernels."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ._quantise import FP8_DTYPES, QUANTISED_DTYPES
from ._require import FLOAT_DTYPES, dtype_name, kind, require_device
from .api import paged_attention, reshape_and_cache
from .blocks import Pairs, copy_blocks, swap_blocks


class Batch(Protocol):
    """What one step tells the kernels; any object with these fields serves."""

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    common_prefix_len: int


class KVCache:
    """K and V of all layers in blocks, with a pool on the device and one on the CPU.

    A pool is one allocation for K and one for V, `[num_layers, num_blocks, block_size,
    num_kv_heads, head_dim]`. Within a layer neighbouring blocks are neighbours in memory, so that a
    sequence whose blocks lie in order is read without a copy; seen with the block first, all layers
    are one tensor, so that swapping takes a few large transfers and not two per layer.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: sizes, each >= 1.
        head_dim_v: head_dim of V; default that of K.
        num_cpu_blocks: blocks of the CPU pool that `swap_out` fills, in pinned memory when `device`
            is a GPU.
        dtype: float32, float16 or bfloat16; float8_e4m3fn, float8_e5m2 or int8 quantise.
        device: where the pool lives.

    Attributes:
        key, value: per layer, `[num_blocks, block_size, num_kv_heads, head_dim]`, uninitialised.
        k_scale, v_scale: per layer, None for a plain cache; fp8: float32 `[num_kv_heads]`, ones, to
            be filled in place before the first write; int8: float32 `[num_blocks, block_size,
            num_kv_heads]`, which `write` fills.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, size or dtype; no such device.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        num_cpu_blocks: int = 0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        _require_size("num_layers", num_layers, 1)
        _require_size("num_blocks", num_blocks, 1)
        _require_size("block_size", block_size, 1)
        _require_size("num_kv_heads", num_kv_heads, 1)
        _require_size("head_dim", head_dim, 1)
        _require_size("head_dim_v", head_dim_v, 1)
        _require_size("num_cpu_blocks", num_cpu_blocks, 0)
        if dtype not in (*FLOAT_DTYPES, *QUANTISED_DTYPES):
            wanted = ", ".join(map(dtype_name, (*FLOAT_DTYPES, *QUANTISED_DTYPES)))
            raise TypeError(f"dtype must be a torch.dtype among {wanted}, got {dtype!r}")
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.head_dim_v = num_kv_heads, head_dim, head_dim_v
        self.num_cpu_blocks, self.dtype = num_cpu_blocks, dtype
        self.device = require_device("device", device)

        self._cpu_pool = self._allocate(num_cpu_blocks, torch.device("cpu"))
        self.k_scale: tuple[Tensor | None, ...]
        self.v_scale: tuple[Tensor | None, ...]
        if dtype in FP8_DTYPES:
            ones = torch.ones(2, num_layers, num_kv_heads, device=self.device)
            self.k_scale, self.v_scale = (tuple(x.unbind()) for x in ones)
        else:
            self.k_scale = self.v_scale = (None,) * num_layers
        self._use(self._allocate(num_blocks, self.device))

    def write(
        self, layer: int, key: Tensor, value: Tensor, batch: Batch, *, backend: str | None = None
    ) -> None:
        """Store the new tokens of `batch`, as `reshape_and_cache` does."""
        self._check(layer, batch, "slot_mapping")
        reshape_and_cache(
            key,
            value,
            self.key[layer],
            self.value[layer],
            batch.slot_mapping,
            k_scale=self.k_scale[layer],
            v_scale=self.v_scale[layer],
            backend=backend,
        )

    def attend(
        self, layer: int, query: Tensor, batch: Batch, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as `paged_attention` does, which also documents the options."""
        self._check(layer, batch, "block_table")
        return paged_attention(
            query,
            self.key[layer],
            self.value[layer],
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            k_scale=self.k_scale[layer],
            v_scale=self.v_scale[layer],
            common_prefix_len=batch.common_prefix_len,
            **options,
        )

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy `(source, destination)` blocks of all layers, as `paged_kernels.copy_blocks` does."""
        copy_blocks([layer for planes in self._pool for layer in planes], pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy `(block, cpu_block)` of all layers from the device to the CPU pool."""
        swap_blocks(_block_first(self._pool), _block_first(self._cpu_pool), pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy `(cpu_block, block)` of all layers from the CPU pool to the device."""
        swap_blocks(_block_first(self._cpu_pool), _block_first(self._pool), pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on the device: K, V and scale planes of all layers."""
        return sum(x.nbytes for x in self._pool)

    def __repr__(self) -> str:
        dims = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        return (
            f"KVCache({self.num_layers} layers, {self.num_blocks} blocks of {self.block_size} slots, "
            f"{self.num_kv_heads} KV heads x {dims}, {dtype_name(self.dtype)} on {self.device}: "
            f"{self.nbytes / 2**20:,.1f} MiB; {self.num_cpu_blocks} CPU blocks)"
        )

    def resize(self, num_blocks: int, pairs: Pairs = ()) -> None:
        """Make the pool larger, or smaller to give memory back. Both pools are held meanwhile.

        Args:
            num_blocks: the new size; blocks below it keep their K, V and scales.
            pairs: what the manager's `resize` returned: blocks in use that move down first.
        """
        _require_size("num_blocks", num_blocks, 1)
        pool = self._allocate(num_blocks, self.device)
        self.copy_blocks(pairs)
        kept = min(num_blocks, self.num_blocks)
        for new, old in zip(pool, self._pool, strict=True):
            new[:, :kept].copy_(old[:, :kept])
        self._use(pool)
        self.num_blocks = num_blocks

    def _check(self, layer: int, batch: Batch, field: str) -> None:
        """A layer of this cache, counted from 0, and a batch that has the field read first."""
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            _require_size("layer", layer, 0)
            raise ValueError(f"layer must be < num_layers {self.num_layers}, got {layer}")
        if not hasattr(batch, field):
            raise TypeError(f"batch must have the field {field}, got {kind(batch)}")
        block_size = getattr(batch, "block_size", self.block_size)
        if block_size != self.block_size:
            raise ValueError(
                f"batch must have the block_size of the cache, {self.block_size}, got {block_size}"
            )

    def _use(self, pool: list[Tensor]) -> None:
        self._pool = pool
        self.key, self.value = (tuple(x.unbind()) for x in pool[:2])
        if self.dtype == torch.int8:
            self.k_scale, self.v_scale = (tuple(x.unbind()) for x in pool[2:])

    def _allocate(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """K, V, and for int8 their scale planes, each with the layer as dim 0."""
        slots = (self.num_layers, num_blocks, self.block_size, self.num_kv_heads)
        pinned = device.type == "cpu" and self.device.type == "cuda"
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        shapes = [((*slots, self.head_dim), self.dtype), ((*slots, self.head_dim_v), self.dtype)]
        if self.dtype == torch.int8:
            shapes += [(slots, torch.float32)] * 2
        return [
            torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
            for shape, dtype in shapes
        ]


def _block_first(pool: list[Tensor]) -> list[Tensor]:
    return [x.transpose(0, 1) for x in pool]


def _require_size(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
