"""Paged attention: kernels over a KV cache that is kept in blocks."""

from ._explain import explain
from .api import paged_attention, reshape_and_cache
from .blocks import copy_blocks, swap_blocks
from .dense import dense_attention
from .kv_cache import KVCache
from .merge_states import merge_attention_states

__all__ = [
    "KVCache",
    "copy_blocks",
    "dense_attention",
    "explain",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
    "swap_blocks",
]
