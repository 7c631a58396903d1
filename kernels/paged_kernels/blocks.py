"""Move whole blocks: within a pool (copy-on-write), or between two (swapping)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._backends import has_triton
from ._require import kind

STAGE_BYTES = 64 << 20  # what is read before it is written, at a time

Pairs = Sequence[tuple[int, int]] | Tensor  # (source, destination); or a CPU int64 [N, 2] tensor


def copy_blocks(caches: Sequence[Tensor], pairs: Pairs) -> None:
    """Copy blocks within each cache: `cache[destination] = cache[source]` for every pair.

    All sources are read before any destination is written, so `[(0, 1), (1, 2)]` moves two blocks
    on. A pair `(b, b)` does nothing.

    Args:
        caches: tensors with the block as dim 0, any strides: K, V and scale planes, of all layers.
        pairs: `(source, destination)` block ids, a list or a CPU int64 tensor `[N, 2]`.

    Raises:
        TypeError: ids that are not integers.
        ValueError: an id outside the pool, a destination named twice, caches that do not belong
            together. Nothing has been copied then.
    """
    _check_pool("caches", caches)
    ids = _checked_pairs(pairs, _num_blocks(caches), _num_blocks(caches))
    ids = ids[ids[:, 0] != ids[:, 1]]
    if len(ids) > 0 and not _copy_in_one_launch(caches, ids):
        _move(caches, caches, ids)


def swap_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Pairs) -> None:
    """Copy blocks from one pool to another, on the same or another device.

    `destinations[i][destination] = sources[i][source]` for every pair, ids counted in the pool of
    their side. When it returns, a CPU pool may be read, written or freed at once; work on a GPU
    is ordered by its current stream.

    Args:
        sources: tensors with the block as dim 0, as in `copy_blocks`.
        destinations: as many tensors, equal to `sources` in dtype and in all dims but the first.
        pairs: `(source, destination)` block ids, a list or a CPU int64 tensor `[N, 2]`.

    Raises:
        TypeError, ValueError: as `copy_blocks`, and for pools that do not match.
    """
    _check_pool("sources", sources)
    _check_pool("destinations", destinations)
    if len(sources) != len(destinations):
        raise ValueError(
            "destinations must hold a tensor for each of the "
            f"{len(sources)} sources, got {len(destinations)}"
        )
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            raise ValueError(
                f"destinations[{i}] must match {kind(source)} but for its number of blocks, "
                f"got {kind(destination)}"
            )
    ids = _checked_pairs(pairs, _num_blocks(sources), _num_blocks(destinations))
    if len(ids) > 0:
        _move(sources, destinations, ids)


def _copy_in_one_launch(caches: Sequence[Tensor], ids: Tensor) -> bool:
    """On a GPU, where Triton is there and no copy waits for another."""
    if caches[0].device.type != "cuda" or not has_triton():
        return False
    from .copy_kernel import plan_copy

    launch = plan_copy(caches, ids)
    if launch is not None:
        launch.run()
    return launch is not None


def _move(sources: Sequence[Tensor], destinations: Sequence[Tensor], ids: Tensor) -> None:
    """Staged copies: a fresh buffer stands between the two sides, so neither can be torn."""
    read = ids[:, 0].to(sources[0].device)
    write = ids[:, 1].to(destinations[0].device)
    for source, destination in zip(sources, destinations, strict=True):
        for part, target in zip(
            _slices(source, len(ids)), _slices(destination, len(ids)), strict=True
        ):
            target.index_copy_(0, write, _staged(part, read, target.device))


def _staged(source: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    if source.device.type == "cpu" and device.type == "cuda":
        # pinned and only ours: torch keeps it until the copy is done, the pool is free again now
        buffer = torch.empty((len(ids), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
        torch.index_select(source, 0, ids, out=buffer)
        return buffer.to(device, non_blocking=True)
    return source.index_select(0, ids).to(device)  # to a CPU: waits until the copy is done


def _slices(cache: Tensor, num_pairs: int) -> Iterator[Tensor]:
    """Cut along dim 1, across which blocks are independent, to bound the buffer."""
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)  # indexing knows no fp8
    if cache.dim() == 1:
        return iter((cache,))
    row_bytes = cache[0, 0].numel() * cache.element_size() * num_pairs
    return iter(cache.split(max(1, STAGE_BYTES // max(1, row_bytes)), dim=1))


def _num_blocks(caches: Sequence[Tensor]) -> int:
    return caches[0].shape[0] if caches else 0


def _check_pool(name: str, caches: Sequence[Tensor]) -> None:
    for i, cache in enumerate(caches):
        if not isinstance(cache, Tensor) or cache.dim() == 0:
            raise TypeError(
                f"{name}[{i}] must be a tensor with the block as dim 0, got {kind(cache)}"
            )
        if cache.shape[0] != caches[0].shape[0] or cache.device != caches[0].device:
            raise ValueError(
                f"{name}[{i}] must have {caches[0].shape[0]} blocks on {caches[0].device} like "
                f"{name}[0], got {cache.shape[0]} on {cache.device}"
            )


def _checked_pairs(pairs: Pairs, num_sources: int, num_destinations: int) -> Tensor:
    """The pairs as a CPU int64 tensor [N, 2]."""
    if isinstance(pairs, Tensor):
        if pairs.dtype != torch.int64 or pairs.device.type != "cpu":
            raise TypeError(
                f"pairs must be a list or a CPU int64 tensor, got {kind(pairs)} on {pairs.device}"
            )
        ids = pairs
    else:
        try:
            ids = torch.tensor(
                [[operator.index(b) for b in pair] for pair in pairs], dtype=torch.int64
            )
        except (TypeError, ValueError) as error:
            raise TypeError(f"pairs must be (source, destination) block ids: {error}") from None
        ids = ids.view(0, 2) if len(pairs) == 0 else ids
    if ids.dim() != 2 or ids.shape[1] != 2:
        raise ValueError(f"pairs must be [N, 2], got shape {list(ids.shape)}")
    for column, name, limit in ((0, "source", num_sources), (1, "destination", num_destinations)):
        wrong = (ids[:, column] < 0) | (ids[:, column] >= limit)
        if wrong.any():
            block = int(ids[wrong][0, column])
            raise ValueError(f"pairs must name a {name} block in 0..{limit - 1}, got {block}")
    blocks, counts = ids[:, 1].unique(return_counts=True)
    if (counts > 1).any():
        block = int(blocks[counts > 1][0])
        raise ValueError(f"pairs must name each destination once, got block {block} twice or more")
    return ids
