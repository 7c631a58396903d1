"""What both public functions ask of the caches and of their scales."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ._quantise import QUANTISED_DTYPES
from ._require import (
    FLOAT32,
    FLOAT_DTYPES,
    dtype_name,
    kind,
    require_inference,
    require_number,
    require_tensor,
    require_unit_stride,
    require_vector,
)

_CACHE_DTYPES = (*FLOAT_DTYPES, *QUANTISED_DTYPES)


def check_caches(
    key_cache: Tensor, value_cache: Tensor, device: torch.device, backend: str
) -> None:
    """Two caches of one pool: the head_dim of the values may differ from that of the keys."""
    axes = "[num_blocks, block_size, num_kv_heads, head_dim"
    require_tensor("key_cache", key_cache, _CACHE_DTYPES, axes + "]", (None,) * 4, device)
    sizes = (*key_cache.shape[:3], None)
    require_tensor("value_cache", value_cache, (key_cache.dtype,), axes + "_v]", sizes, device)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        require_unit_stride(name, tensor)
        if 0 in tensor.shape[1:]:
            raise ValueError(
                f"{name} must have no axis of size 0 but num_blocks, got shape {list(tensor.shape)}"
            )
    if key_cache.dtype == torch.float8_e4m3fn and backend == "triton" and key_cache.is_cuda:
        _check_e4m3(device)


def check_cache_dtype(name: str, tensor: Tensor, key_cache: Tensor) -> None:
    """A plain cache holds the very dtype that is written to it and asked of it."""
    if tensor.dtype != key_cache.dtype and key_cache.dtype not in QUANTISED_DTYPES:
        raise TypeError(
            f"{name} must have the dtype of key_cache unless that is quantised, "
            f"{dtype_name(key_cache.dtype)}, got {dtype_name(tensor.dtype)}"
        )


def checked_scale(
    name: str, scale: float | Tensor | None, key_cache: Tensor
) -> float | Tensor | None:
    """The scale of a quantised cache as the backends take it; None for a plain cache."""
    dtype = key_cache.dtype
    if dtype not in QUANTISED_DTYPES:
        if scale is not None:
            raise ValueError(
                f"{name} must be None unless the cache is quantised, got {kind(scale)} "
                f"with a {dtype_name(dtype)} cache"
            )
        return None
    require_inference(**{name: scale})
    if dtype == torch.int8:
        axes = "[num_blocks, block_size, num_kv_heads]"
        if scale is None:
            raise ValueError(f"{name} must be float32 {axes} for an int8 cache, got None")
        require_tensor(name, scale, FLOAT32, axes, tuple(key_cache.shape[:3]), key_cache.device)
        return scale
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        num_kv_heads = key_cache.shape[2]
        require_vector(name, scale, FLOAT32, "[num_kv_heads]", num_kv_heads, key_cache.device)
        return scale
    require_number(name, scale)
    if scale <= 0:
        raise ValueError(f"{name} must be > 0, got {scale}")
    return float(scale)


@cache
def _check_e4m3(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 9):
        raise ValueError(
            "key_cache must not be float8_e4m3fn below compute capability 8.9, got a GPU of "
            f"{capability[0]}.{capability[1]}: use float8_e5m2, int8 or backend='torch'"
        )
