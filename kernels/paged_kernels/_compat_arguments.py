"""What the arguments of other libraries mean here, and which of them are refused."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._backends import debugging
from ._checks import check_attention
from ._require import (
    FLOAT_DTYPES,
    INT_DTYPES,
    kind,
    require_bool,
    require_int,
    require_tensor,
    require_vector,
)
from .api import paged_attention, reshape_and_cache

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(paged_attention).parameters.items()
    if parameter.default is not parameter.empty
}


class AuxRequest(Protocol):
    """torch.nn.attention.varlen.AuxRequest, which older versions of torch lack."""

    @property
    def lse(self) -> bool: ...


def refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None, as it is not honoured, got {kind(value)}")


def check_only(arguments: dict[str, Any]) -> None:
    """Raise what `paged_attention` would raise for these arguments."""
    check_attention(**{**_DEFAULTS, **arguments})


def require_like(
    q: Tensor, name: str, tensor: object, axes: str, sizes: tuple[int | None, ...]
) -> None:
    """On the device and in the dtype of the queries."""
    require_tensor(name, tensor, (q.dtype,), axes, sizes, q.device)


def options(
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
    one_query: bool = False,
) -> dict[str, Any]:
    """As `paged_attention` calls them. The one query of a sequence is its last token: causal."""
    require_bool("causal", causal)
    left, right = window_size
    causal = causal or right == 0 or one_query
    if right > 0 and not causal:
        raise ValueError(
            f"window_size must have -1 or 0 on the right unless causal, got {tuple(window_size)}"
        )
    if alibi_slopes is not None:
        if isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() != 1:
            shape = list(alibi_slopes.shape)
            raise ValueError(f"alibi_slopes must be [nheads], not per sequence, got shape {shape}")
        if not causal:  # they fall off to both sides there, to the past alone here
            raise ValueError("alibi_slopes must come with causal, got causal=False")
    return {
        "scale": scale,
        "causal": causal,
        "sliding_window": left + 1 if left >= 0 else None,
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "num_splits": num_splits or None,
    }


def checked_table(
    block_table: Tensor | None, cache_batch_idx: Tensor | None, k_cache: Tensor, batch: int
) -> Tensor:
    """The block table; of a cache without one, each of whose rows is one block."""
    device = k_cache.device
    if block_table is not None:
        axes = "[batch, max_blocks_per_seq]"
        require_tensor("block_table", block_table, INT_DTYPES, axes, (batch, None), device)
        if cache_batch_idx is not None:
            raise ValueError(
                f"cache_batch_idx must be None with a block_table, got {kind(cache_batch_idx)}"
            )
        return block_table
    if cache_batch_idx is not None:
        require_vector("cache_batch_idx", cache_batch_idx, INT_DTYPES, "[batch]", batch, device)
        return cache_batch_idx.unsqueeze(1)
    if len(k_cache) < batch:
        raise ValueError(
            f"k_cache must have a row for each of the {batch} rows of q, got {len(k_cache)}"
        )
    return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)


def checked_lengths(
    cache_seqlens: int | Tensor, new: int, capacity: int, batch: int, device: torch.device
) -> Tensor:
    """`[batch]` tokens in the cache; checked for room where that costs no sync."""
    if isinstance(cache_seqlens, Tensor):
        require_vector("cache_seqlens", cache_seqlens, INT_DTYPES, "[batch]", batch, device)
        read = not is_compiling() and batch > 0 and (device.type == "cpu" or debugging())
        least, most = map(int, cache_seqlens.aminmax()) if read else (0, 0)
        lengths = cache_seqlens
    else:
        require_int("cache_seqlens", cache_seqlens, 0)
        least = most = cache_seqlens
        lengths = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    if least < 0 or most + new > capacity:
        raise ValueError(
            f"cache_seqlens must be in 0..{capacity - new} for a cache of {capacity} tokens per "
            f"sequence and {new} new ones, got {least}..{most}"
        )
    return lengths


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, before: Tensor
) -> None:
    """Write `[batch, seqlen_new, ...]` behind the `before` tokens of each sequence."""
    page_size = k_cache.shape[1]
    positions = before.unsqueeze(1) + torch.arange(k.shape[1], device=k.device)
    blocks = block_table.gather(1, positions // page_size).long()
    slots = (blocks * page_size + positions % page_size).flatten()
    k, v = (unit_stride(x).flatten(0, 1) for x in (k, v))
    reshape_and_cache(k, v, k_cache, v_cache, slots)


def queries_and_keys(
    names: tuple[str, str, str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    longest: int,
    block_table: Tensor | None,
) -> dict[str, Any]:
    """Packed queries, and the pages of their keys; packed keys are pages of one token, in order."""
    require_tensor(names[0], q, FLOAT_DTYPES, "[total_q, nheads, headdim]", (None,) * 3, None)
    pages = "total_k" if block_table is None else "num_blocks, page_size"
    axes = f"[{pages}, nheads_k, headdim]"
    sizes = (None,) * (2 if block_table is None else 3)
    require_like(q, names[1], k, axes, (*sizes, q.shape[2]))
    require_like(q, names[2], v, axes, (*k.shape[:-1], None))
    if block_table is None:
        assert starts is not None
        k, v = (unit_stride(x).unsqueeze(1) for x in (k, v))
        block_table = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=q.device)
    return {
        "query": unit_stride(q),
        "key_cache": k,
        "value_cache": v,
        "block_table": block_table,
        "max_seq_len": longest,
    }


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
