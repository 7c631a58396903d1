"""Paged attention: kernels over a KV cache that is kept in blocks."""

from .api import paged_attention, reshape_and_cache

__all__ = ["paged_attention", "reshape_and_cache"]
