"""Read the K and V of one sequence through its block table, as contiguous pieces.

Neighbouring blocks of a contiguous cache are one tensor already: a long run of consecutive block
ids is handed out as a view. All else is gathered into a workspace, sized so that what was just
gathered is still in cache when it is read. On a CPU each thread keeps its workspace, because fresh
memory costs more in page faults than the copy itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._quantise import QUANTISED_DTYPES
from .options import AttentionCall

GATHER_BYTES = 4 << 20  # K of one gathered piece; larger ones pay page faults in every call
RUN_BYTES = 2 << 20  # a shorter run costs less to copy than to merge as a piece of its own
VIEW_BYTES = 32 << 20  # K of the longest view, for the sake of its scores
KEEP_BYTES = 2 * GATHER_BYTES  # the most that a thread keeps for one use

_kept = threading.local()


class Piece(NamedTuple):
    """The keys `start .. start + len(key) - 1` of a sequence."""

    start: int
    key: Tensor  # [num_keys, num_kv_heads, head_dim], in what `read_dtype` says
    value: Tensor  # [num_keys, num_kv_heads, head_dim_v]


class Pages:
    """The pages of one call. A gathered piece is valid until the next one is asked for."""

    def __init__(self, call: AttentionCall) -> None:
        self._block_size = call.key_cache.shape[1]
        self._key = _Cache("key", call.key_cache, call.k_scale)
        self._value = _Cache("value", call.value_cache, call.v_scale)
        self._table = call.block_table
        self._host_table = call.block_table.cpu().numpy()
        self._joinable = is_joinable(call)
        # Under num_splits, where pieces meet must not depend on where blocks lie.
        self._gather_all = call.num_splits is not None
        block_bytes = self._block_size * token_bytes(call)
        self._gather_blocks = max(1, GATHER_BYTES // block_bytes)
        self._run_blocks = -(-RUN_BYTES // block_bytes)
        self._view_blocks = max(1, VIEW_BYTES // block_bytes)
        if read_dtype(call.key_cache) != call.key_cache.dtype:
            self._view_blocks = self._gather_blocks

    def pieces(self, seq: int, begin: int, end: int) -> Iterator[Piece]:
        """The keys `begin .. end - 1` of sequence `seq`, in order; no other entry is looked up."""
        size = self._block_size
        for i, j, is_run in self._plan(seq, begin // size, -(-end // size)):
            blocks: slice | Tensor = self._table[seq, i:j]
            if is_run:
                block = int(self._host_table[seq, i])
                blocks = slice(block, block + j - i)
            start = max(begin, i * size)
            tokens = slice(start - i * size, min(end, j * size) - i * size)
            yield Piece(start, self._key.blocks(blocks)[tokens], self._value.blocks(blocks)[tokens])

    def slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V in some slots, [num_slots, num_kv_heads, head_dim], of joinable pages."""
        return self._key.slots(slots), self._value.slots(slots)

    def _plan(self, seq: int, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Entries `first .. last - 1` cut into (i, j, whether they are one run of blocks)."""
        if first >= last:
            return
        step = np.diff(self._host_table[seq, first:last])
        follows = (step == 1) & self._joinable
        if follows.all() and not self._gather_all:
            yield from _cut(first, last, self._view_blocks, True)
            return
        done = first
        if last - first > self._run_blocks and not self._gather_all:
            cuts = np.concatenate(([first], np.flatnonzero(~follows) + first + 1, [last]))
            for run in np.flatnonzero(np.diff(cuts) >= self._run_blocks).tolist():
                i, j = int(cuts[run]), int(cuts[run + 1])
                yield from _cut(done, i, self._gather_blocks, False)
                yield from _cut(i, j, self._view_blocks, True)
                done = j
        yield from _cut(done, last, self._gather_blocks, False)


def _cut(i: int, j: int, step: int, is_run: bool) -> Iterator[tuple[int, int, bool]]:
    return ((start, min(start + step, j), is_run) for start in range(i, j, step))


def is_joinable(call: AttentionCall) -> bool:
    """Whether slots are evenly spaced across blocks, so that a view can span them."""
    return all(
        cache.stride(0) == call.dims.block_size * cache.stride(1)
        for cache in (call.key_cache, call.value_cache)
    )


def read_dtype(cache: Tensor) -> torch.dtype:
    """How K and V are handed out: float32 for a quantised cache, and for float16, slow on CPUs."""
    return torch.bfloat16 if cache.dtype == torch.bfloat16 else torch.float32


def token_bytes(call: AttentionCall) -> int:
    """Bytes of one token's K as it is handed out."""
    dims = call.dims
    return dims.num_kv_heads * dims.head_dim * read_dtype(call.key_cache).itemsize


class _Cache:
    """One cache tensor, read some blocks at a time."""

    def __init__(self, name: str, cache: Tensor, scale: float | Tensor | None) -> None:
        self._name = name
        # index_select knows no fp8, and bytes are bytes
        self._cache = cache.view(torch.uint8) if cache.dtype in QUANTISED_DTYPES else cache
        self._dtype = cache.dtype
        self._scale = scale

    def blocks(self, blocks: slice | Tensor) -> Tensor:
        """The tokens of some blocks, [num_blocks * block_size, num_kv_heads, head_dim]."""
        stored = (
            self._cache[blocks] if isinstance(blocks, slice) else self._gather(self._cache, blocks)
        )
        return self._real(stored.flatten(0, 1), lambda planes: planes[blocks].flatten(0, 1))

    def slots(self, slots: Tensor) -> Tensor:
        """The tokens in some slots, [num_slots, num_kv_heads, head_dim]."""
        stored = self._gather(self._cache.flatten(0, 1), slots)
        return self._real(stored, lambda planes: planes.flatten(0, 1)[slots])

    def _gather(self, rows: Tensor, index: Tensor) -> Tensor:
        out = self._workspace("stored", rows.dtype, (len(index), *rows.shape[1:]))
        return torch.index_select(rows, 0, index, out=out)

    def _real(self, stored: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Stored tokens as numbers; `look_up` finds theirs in a plane of scales."""
        dtype = read_dtype(self._cache)
        if dtype == self._dtype:
            return stored
        real = self._workspace("real", dtype, stored.shape).copy_(stored.view(self._dtype))
        if self._scale is None:
            return real
        if isinstance(self._scale, float):
            return real.mul_(self._scale)
        if self._dtype == torch.int8:
            return real.mul_(look_up(self._scale)[..., None])
        return real.mul_(self._scale[:, None])

    def _workspace(self, use: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Memory that is valid until the next workspace of this use in this thread."""
        if self._cache.device.type != "cpu":  # a GPU's allocator keeps memory, and knows of streams
            return torch.empty(shape, dtype=dtype, device=self._cache.device)
        name, num_bytes = f"{self._name} {use}", math.prod(shape) * dtype.itemsize
        buffer: Tensor | None = _kept.__dict__.get(name)
        if buffer is None or len(buffer) < num_bytes:
            with torch.inference_mode(False):  # a tensor of inference mode could serve no other
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes <= KEEP_BYTES:
                _kept.__dict__[name] = buffer
        return buffer[:num_bytes].view(dtype).view(*shape)
