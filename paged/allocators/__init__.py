"""Block allocators behind one interface (`base`)."""

from .base import BlockAllocator
from .buddy import BuddyAllocator
from .naive import NaiveBlockAllocator
from .prefix_caching import PrefixCachingBlockAllocator

__all__ = [
    "BlockAllocator",
    "BuddyAllocator",
    "NaiveBlockAllocator",
    "PrefixCachingBlockAllocator",
]
