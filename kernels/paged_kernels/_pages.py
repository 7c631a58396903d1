"""Read the K and V of one sequence through its block table, as contiguous pieces.

Neighbouring blocks of a contiguous cache are one tensor already: a long run of consecutive block
ids is handed out as a view. All else is gathered, whole blocks at a time, into one workspace per
call, sized so that what was just gathered is still in the last-level cache when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._quantise import QUANTISED_DTYPES
from .options import AttentionCall

GATHER_BYTES = 8 << 20  # K of one gathered piece; V takes about as much again
RUN_BYTES = 2 << 20  # a shorter run costs less to copy than to merge as a piece of its own


class Piece(NamedTuple):
    """The keys `start .. start + len(key) - 1` of a sequence."""

    start: int
    key: Tensor  # [num_keys, num_kv_heads, head_dim], float32 when the cache is quantised
    value: Tensor  # [num_keys, num_kv_heads, head_dim_v]


class Pages:
    """The pages of one call. A gathered piece is valid until the next one is asked for."""

    def __init__(self, call: AttentionCall) -> None:
        self._block_size = call.key_cache.shape[1]
        self._key = _Cache(call.key_cache, call.k_scale)
        self._value = _Cache(call.value_cache, call.v_scale)
        self._table = call.block_table
        self._host_table = call.block_table.cpu().numpy()
        self._joinable = self._key.joinable and self._value.joinable
        block_bytes = call.key_cache[:1].nbytes
        self._gather_blocks = max(1, GATHER_BYTES // block_bytes)
        self._run_blocks = -(-RUN_BYTES // block_bytes)

    def pieces(self, seq: int, begin: int, end: int) -> Iterator[Piece]:
        """The keys `begin .. end - 1` of sequence `seq`, in order; no other entry is looked up."""
        size = self._block_size
        first = begin // size
        ids = self._host_table[seq, first : -(-end // size)]
        for i, j, is_run in self._plan(ids):
            start = (first + i) * size
            stop = start + (j - i) * size
            tokens = slice(max(begin, start) - start, min(end, stop) - start)
            if is_run:
                blocks: slice | Tensor = slice(int(ids[i]), int(ids[i]) + j - i)
            else:
                blocks = self._table[seq, first + i : first + j]
            yield Piece(
                max(begin, start), self._key.read(blocks)[tokens], self._value.read(blocks)[tokens]
            )

    def _plan(self, ids: np.ndarray) -> Iterator[tuple[int, int, bool]]:
        """Cut the entries into (i, j, whether they are consecutive blocks to be read in place)."""
        if len(ids) == 0:
            return
        step = np.diff(ids) if self._joinable else np.zeros(len(ids) - 1)
        cuts = np.concatenate(([0], np.flatnonzero(step != 1) + 1, [len(ids)]))
        is_long = np.diff(cuts) >= min(self._run_blocks, len(ids))
        done = 0
        for run in np.flatnonzero(is_long).tolist():
            i, j = int(cuts[run]), int(cuts[run + 1])
            yield from self._gathers(done, i)
            yield i, j, True
            done = j
        yield from self._gathers(done, len(ids))

    def _gathers(self, i: int, j: int) -> Iterator[tuple[int, int, bool]]:
        for start in range(i, j, self._gather_blocks):
            yield start, min(start + self._gather_blocks, j), False


class _Cache:
    """One cache tensor, read some blocks at a time."""

    def __init__(self, cache: Tensor, scale: float | Tensor | None) -> None:
        # index_select knows no fp8, and bytes are bytes
        self._cache = cache.view(torch.uint8) if cache.dtype in QUANTISED_DTYPES else cache
        self._dtype = cache.dtype
        self._scale = scale
        self._workspace = self._cache.new_empty(0)
        self.joinable = cache.stride(0) == cache.shape[1] * cache.stride(1)

    def read(self, blocks: slice | Tensor) -> Tensor:
        """The tokens of `blocks`, [num_blocks * block_size, num_kv_heads, head_dim]."""
        if isinstance(blocks, slice):
            tokens = self._cache[blocks].flatten(0, 1)
        else:
            shape = (len(blocks), *self._cache.shape[1:])
            if len(self._workspace) < len(blocks):
                self._workspace = self._cache.new_empty(shape)
            gathered = self._workspace[: len(blocks)]
            torch.index_select(self._cache, 0, blocks, out=gathered)
            tokens = gathered.flatten(0, 1)
        if self._scale is None:
            return tokens
        real = tokens.view(self._dtype).float()
        if isinstance(self._scale, float):
            return real.mul_(self._scale)
        if self._dtype == torch.int8:
            return real.mul_(self._scale[blocks].flatten(0, 1)[..., None])
        return real.mul_(self._scale[:, None])
