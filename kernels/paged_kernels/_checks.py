"""The one validation: what the public functions get becomes what every backend can trust.

Shapes, dtypes, devices and strides are checked always and cost no device sync. The values inside
tensors are a matter for `_value_checks`, which runs where reading them is cheap or asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._backends import debugging, resolve_backend
from ._cache_checks import check_cache_dtype, check_caches, checked_scale
from ._require import (
    FLOAT32,
    FLOAT_DTYPES,
    INT_DTYPES,
    require_bool,
    require_inference,
    require_int,
    require_no_overlap,
    require_number,
    require_tensor,
    require_unit_stride,
    require_vector,
)
from ._value_checks import check_attention_values, check_write_values
from .options import AttentionCall, Dims, Variant


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    scale: float | None,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    num_splits: int | None,
    split_size: int | None,
    common_prefix_len: int | None,
    draft_mask: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    backend: str | None,
) -> tuple[AttentionCall, str]:
    """The validated call of `paged_attention`, its outputs allocated, and the name of its backend."""
    backend = _check_query_and_caches(query, key_cache, value_cache, backend)
    require_inference(query=query, key_cache=key_cache, value_cache=value_cache)
    _check_lengths(query, block_table, seq_lens, cu_seqlens_q)
    _check_head_vectors(query, alibi_slopes=alibi_slopes, sinks=sinks)
    if scale is not None:
        require_number("scale", scale)
    _check_splits(num_splits, split_size)
    require_bool("return_lse", return_lse)

    num_tokens, num_heads, head_dim = query.shape
    num_seqs, table_width = block_table.shape
    block_size = key_cache.shape[1]
    shortest, longest = (1, 1) if cu_seqlens_q is None else (0, num_tokens)
    if draft_mask is not None:
        side = _check_draft_mask(draft_mask, num_seqs, max_query_len, query.device)
        longest = min(longest, side)
    out = _checked_out(out, query, value_cache.shape[3])
    call = AttentionCall(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_query_len=_bound("max_query_len", max_query_len, shortest, longest),
        max_seq_len=_bound("max_seq_len", max_seq_len, 0, table_width * block_size),
        scale=head_dim**-0.5 if scale is None else float(scale),
        variant=Variant(causal, sliding_window, softcap),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=checked_scale("k_scale", k_scale, key_cache),
        v_scale=checked_scale("v_scale", v_scale, value_cache),
        draft_mask=draft_mask,
        num_splits=num_splits,
        split_size=split_size,
        common_prefix_len=_checked_prefix(common_prefix_len, block_size, table_width),
        out=out,
        lse=query.new_empty((num_tokens, num_heads), dtype=torch.float32) if return_lse else None,
        dims=Dims(num_heads, key_cache.shape[2], head_dim, value_cache.shape[3], block_size),
    )
    if _values_are_checked(query.device, backend):
        check_attention_values(call)
    return call, backend


def check_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    backend: str | None,
) -> tuple[float | Tensor | None, float | Tensor | None, str]:
    """Validate `reshape_and_cache`; the scales as the backends take them, and the backend's name."""
    axes = "[num_tokens, num_kv_heads, head_dim"
    require_tensor("key", key, FLOAT_DTYPES, axes + "]", (None,) * 3, None)
    device = key.device
    backend = resolve_backend(backend, device)
    check_caches(key_cache, value_cache, device, backend)
    require_vector("slot_mapping", slot_mapping, INT_DTYPES, "[num_tokens]", None, device)
    num_kv_heads, head_dim = key_cache.shape[2:]
    require_tensor("key", key, FLOAT_DTYPES, axes + "]", (None, num_kv_heads, head_dim), device)
    require_tensor(
        "value",
        value,
        (key.dtype,),
        axes + "_v]",
        (None, num_kv_heads, value_cache.shape[3]),
        device,
    )
    for name, tensor in (("key", key), ("value", value)):
        require_unit_stride(name, tensor)
        if len(tensor) < len(slot_mapping):
            raise ValueError(
                f"{name} must have a row for each of the {len(slot_mapping)} slots, "
                f"got {len(tensor)} rows"
            )
    check_cache_dtype("key", key, key_cache)
    require_inference(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    scales = (
        checked_scale("k_scale", k_scale, key_cache),
        checked_scale("v_scale", v_scale, value_cache),
    )
    if _values_are_checked(device, backend):
        check_write_values(key_cache, slot_mapping, *scales)
    return *scales, backend


def _check_query_and_caches(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, backend: str | None
) -> str:
    """Heads and widths fit together; the name of the backend."""
    axes = "[num_tokens, num_heads, head_dim]"
    require_tensor("query", query, FLOAT_DTYPES, axes, (None,) * 3, None)
    require_unit_stride("query", query)
    backend = resolve_backend(backend, query.device)
    check_caches(key_cache, value_cache, query.device, backend)
    _, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape[3] != head_dim:
        raise ValueError(
            f"query must have the head_dim of key_cache, {key_cache.shape[3]}, got {head_dim}"
        )
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query must have a multiple of the {num_kv_heads} KV heads of key_cache, "
            f"got {num_heads} heads"
        )
    check_cache_dtype("query", query, key_cache)
    return backend


def _check_lengths(
    query: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None
) -> None:
    """The table and the lengths are of one number of sequences."""
    device, axes = query.device, "[num_seqs, max_blocks_per_seq]"
    require_tensor("block_table", block_table, INT_DTYPES, axes, (None, None), device)
    require_unit_stride("block_table", block_table)
    num_seqs = block_table.shape[0]
    require_vector("seq_lens", seq_lens, INT_DTYPES, "[num_seqs]", num_seqs, device)
    if cu_seqlens_q is not None:
        axes = "[num_seqs + 1]"
        require_vector("cu_seqlens_q", cu_seqlens_q, INT_DTYPES, axes, num_seqs + 1, device)
    elif query.shape[0] != num_seqs:
        raise ValueError(
            f"query must have one row per sequence without cu_seqlens_q, {num_seqs} as in "
            f"block_table, got {query.shape[0]}"
        )


def _check_head_vectors(query: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None:
            axes, num_heads = "[num_heads]", query.shape[1]
            require_vector(name, vector, FLOAT32, axes, num_heads, query.device)
            require_inference(**{name: vector})


def _bound(name: str, hint: int | None, least: int, most: int) -> int:
    """The upper bound of some lengths: the caller's, when it is the tighter one."""
    if hint is None:
        return most
    require_int(name, hint, least)
    return min(hint, most)


def _checked_out(out: Tensor | None, query: Tensor, head_dim_v: int) -> Tensor:
    shape = (*query.shape[:2], head_dim_v)
    if out is None:
        return query.new_empty(shape)
    axes = "[num_tokens, num_heads, head_dim_v]"
    require_tensor("out", out, (query.dtype,), axes, shape, query.device)
    require_unit_stride("out", out)
    require_no_overlap("out", out)
    require_inference(out=out)
    return out


def _check_draft_mask(
    draft_mask: Tensor, num_seqs: int, max_query_len: int | None, device: torch.device
) -> int:
    """Its side, which bounds the query lengths too."""
    axes = "[num_seqs, max_query_len, max_query_len]"
    require_tensor("draft_mask", draft_mask, (torch.bool,), axes, (num_seqs, None, None), device)
    _, rows, columns = draft_mask.shape
    if rows != columns or (max_query_len is not None and rows < max_query_len):
        raise ValueError(
            f"draft_mask must be {axes} with max_query_len {max_query_len}, "
            f"got shape {list(draft_mask.shape)}"
        )
    return rows


def _check_splits(num_splits: int | None, split_size: int | None) -> None:
    if num_splits is not None:
        require_int("num_splits", num_splits, 1)
    if split_size is not None:
        require_int("split_size", split_size, 1)
        if num_splits is not None:
            raise ValueError(
                f"split_size must be None when num_splits is given, got split_size={split_size} "
                f"and num_splits={num_splits}"
            )


def _checked_prefix(common_prefix_len: int | None, block_size: int, table_width: int) -> int:
    if common_prefix_len is None:
        return 0
    require_int("common_prefix_len", common_prefix_len, 0)
    if common_prefix_len % block_size or common_prefix_len > table_width * block_size:
        raise ValueError(
            f"common_prefix_len must be a multiple of block_size {block_size}, at most "
            f"{table_width * block_size} for this block_table, got {common_prefix_len}"
        )
    return common_prefix_len


def _values_are_checked(device: torch.device, backend: str) -> bool:
    return debugging() or (device.type == "cpu" and backend != "triton")
