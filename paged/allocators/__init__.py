"""Block allocators behind one interface (`base`)."""

from paged.config import CacheConfig

from .base import BlockAllocator
from .buddy import BuddyAllocator
from .naive import NaiveBlockAllocator
from .prefix_caching import PrefixCachingBlockAllocator

__all__ = [
    "BlockAllocator",
    "BuddyAllocator",
    "NaiveBlockAllocator",
    "PrefixCachingBlockAllocator",
    "gpu_allocator",
]


def gpu_allocator(config: CacheConfig) -> BlockAllocator:
    """The pool of GPU blocks that the settings describe; ValueError when they have no number."""
    if not isinstance(config, CacheConfig):
        raise TypeError(f"config is {config!r}; it must be a CacheConfig")
    if config.num_gpu_blocks is None:
        raise ValueError(
            "num_gpu_blocks of the config is None; set it, or let config.sized(free_bytes, "
            "total_bytes, bytes_per_block) count the blocks"
        )
    if not config.enable_prefix_caching:
        return NaiveBlockAllocator(config.num_gpu_blocks, config.free_order)
    return PrefixCachingBlockAllocator(
        config.num_gpu_blocks,
        config.block_size,
        free_order=config.free_order,
        max_cached_blocks=config.max_cached_blocks,
        hash_fn=config.hash_fn,
        hash_seed=config.hash_seed,
    )
