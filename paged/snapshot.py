"""The state of a manager as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block_table import BlockTable

if TYPE_CHECKING:
    from .allocators import BlockAllocator, PrefixCachingBlockAllocator
    from .block_manager import BlockSpaceManager


def snapshot(manager: BlockSpaceManager) -> dict[str, Any]:
    """Dicts, lists, numbers and strings only; free blocks in the order they will be used."""
    counter = manager.prefix_counter
    return {
        "block_size": manager.config.block_size,
        "gpu": _pool(manager.gpu),
        "cpu": _pool(manager.cpu),
        "cache": _cache(manager.cache) if manager.cache else None,
        "sequences": [_table(table) for table in manager.tables.values()],
        "swapped": [_table(table) for table in manager.swapped.values()],
        "prefix_queried_tokens": counter.queried_tokens,
        "prefix_hit_tokens": counter.hit_tokens,
    }


def _pool(pool: BlockAllocator) -> dict[str, Any]:
    return {
        "num_blocks": pool.num_blocks,
        "num_free": pool.num_free,
        "free": pool.free_blocks(),
        "ref_counts": {block: n for block, n in enumerate(pool.ref_counts) if n},
    }


def _cache(cache: PrefixCachingBlockAllocator) -> dict[str, Any]:
    published = {}
    for entry in sorted(cache.index.entries(), key=lambda entry: entry.block):
        parent = entry.parent
        above = parent.block if parent is not None and parent.tokens else None
        published[entry.block] = {"parent": above, "digest": entry.digest.hex()}
    return {"published": published, "evictable": cache.cached_blocks()}


def _table(table: BlockTable) -> dict[str, Any]:
    return {
        "seq_id": table.seq_id,
        "blocks": table.blocks.copy(),
        "num_tokens": table.num_tokens,
        "num_computed": table.num_computed,
        "num_published": table.num_published,
        "num_cached": table.num_cached,
    }
