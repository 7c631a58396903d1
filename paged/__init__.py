"""Paged attention's memory side: block tables for the KV cache of many sequences.

Importing this package loads neither torch, triton, numpy nor matplotlib.
"""

from .admission import AllocStatus
from .allocators import (
    BlockAllocator,
    BuddyAllocator,
    NaiveBlockAllocator,
    PrefixCachingBlockAllocator,
)
from .batch import Batch
from .block_manager import BlockSpaceManager
from .config import CacheConfig, block_bytes, num_blocks_that_fit
from .errors import (
    AlreadyAllocatedError,
    InvariantError,
    NoFreeBlocksError,
    NotAllocatedError,
    NotOnGpuError,
    PagedError,
    PromptTooLongError,
    UnsupportedModelError,
)
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig
from .scheduler_output import SchedulerOutput
from .sequence import Sequence, SequenceGroup
from .stats import CacheStats, TierStats

__version__ = "0.1.0"

__all__ = [
    "AllocStatus",
    "AlreadyAllocatedError",
    "Batch",
    "BlockAllocator",
    "BlockSpaceManager",
    "BuddyAllocator",
    "CacheConfig",
    "CacheStats",
    "InvariantError",
    "NaiveBlockAllocator",
    "NoFreeBlocksError",
    "NotAllocatedError",
    "NotOnGpuError",
    "PagedError",
    "PrefixCachingBlockAllocator",
    "PromptTooLongError",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "Sequence",
    "SequenceGroup",
    "TierStats",
    "UnsupportedModelError",
    "block_bytes",
    "num_blocks_that_fit",
]
