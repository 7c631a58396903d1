"""Copy blocks of any number of caches in one launch: program (i, c) moves pair i within cache c.

A block of any shape and dtype is a run of 16-byte words: `table` holds each cache's address, the
words from one block to the next, and the words of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch

WORD = 16  # bytes: the widest load


@triton.jit
def copy_kernel(table, pairs, CHUNK: tl.constexpr):
    pair, cache = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = tl.load(table + 3 * cache).to(tl.pointer_type(tl.int64))
    base = tl.multiple_of(base, 16)
    step = 2 * tl.load(table + 3 * cache + 1)  # in int64 halves of words
    size = 2 * tl.load(table + 3 * cache + 2)
    source = base + tl.multiple_of(tl.load(pairs + 2 * pair) * step, 2)
    destination = base + tl.multiple_of(tl.load(pairs + 2 * pair + 1) * step, 2)
    for start in range(0, size, CHUNK):
        half = start + tl.arange(0, CHUNK)
        mask = half // 2 < size // 2  # in pairs, so that both halves move in one access
        tl.store(destination + half, tl.load(source + half, mask=mask), mask=mask)


def plan_copy(caches: Sequence[Tensor], pairs: Tensor) -> Launch | None:
    """The launch that copies `pairs` (CPU int64 [N, 2]) within all `caches`.

    None when it could go wrong: a source that is also a destination, a block that is not one run
    of whole words.
    """
    if torch.isin(pairs[:, 0], pairs[:, 1]).any():
        return None
    rows = []
    for cache in caches:
        size, step = cache[0].numel() * cache.element_size(), cache.stride(0) * cache.element_size()
        if not _dense(cache[0]) or (cache.data_ptr() | size | step) % WORD:
            return None
        rows.append((cache.data_ptr(), step // WORD, size // WORD))
    device = caches[0].device
    table = torch.tensor(rows, dtype=torch.int64)
    args = (_upload(table, device), _upload(pairs.contiguous(), device))
    return Launch(copy_kernel, (len(pairs), len(caches)), args, {"CHUNK": 1024}, device)


def _dense(block: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order."""
    last = sum(
        (size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True)
    )
    return last + 1 == block.numel()


def _upload(host: Tensor, device: torch.device) -> Tensor:
    """To the device without a sync; torch keeps the pinned copy until the transfer is done."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
