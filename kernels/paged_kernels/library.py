"""The public functions as operators of torch: `torch.ops.paged_kernels`.

torch.compile, torch.export and fake tensors follow a call through its operator, which says what the
call writes and what its results look like. `paged_attention` and `reshape_and_cache` take that road
by themselves while traced; an eager call goes straight to its backend, without the operator's cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import check_attention, check_write
from ._require import require_inference
from .api import run_attention, run_write

Scale = float | Tensor | None

_SCALES = "Tensor{} k_scale=None, Tensor{} v_scale=None, float? k_factor=None, float? v_factor=None"
_WRITE = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    f"{_SCALES.format('(c!)?', '(d!)?')}, str? backend=None) -> ()"
)
_ATTENTION = (
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? cu_seqlens_q=None, SymInt? max_query_len=None, SymInt? max_seq_len=None, "
    "float? scale=None, bool causal=True, SymInt? sliding_window=None, float? softcap=None, "
    f"Tensor? alibi_slopes=None, Tensor? sinks=None, {_SCALES.format('?', '?')}, "
    "SymInt? num_splits=None, SymInt? split_size=None, SymInt? common_prefix_len=None, "
    "Tensor? draft_mask=None, str? backend=None) -> (Tensor out, Tensor lse)"
)
_WRITTEN = ("key_cache", "value_cache", "k_scale", "v_scale")  # scales: of an int8 cache


@torch.library.custom_op("paged_kernels::reshape_and_cache", mutates_args=_WRITTEN, schema=_WRITE)
def reshape_and_cache_op(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_factor: float | None = None,
    v_factor: float | None = None,
    backend: str | None = None,
) -> None:
    """`reshape_and_cache`; a scale that is a number comes as `k_factor` or `v_factor`."""
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    scales = (_scale(k_scale, k_factor), _scale(v_scale, v_factor))
    run_write(*tensors, *check_write(*tensors, *scales, backend))


@reshape_and_cache_op.register_fake
def _(*_tensors: Tensor, **_options: Any) -> None:
    """Nothing but the caches and scales changes."""


@torch.library.custom_op("paged_kernels::paged_attention", mutates_args=(), schema=_ATTENTION)
def paged_attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_factor: float | None = None,
    v_factor: float | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    common_prefix_len: int | None = None,
    draft_mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` with `return_lse`; scales as in `reshape_and_cache_op`."""
    call, backend = check_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_query_len,
        max_seq_len,
        scale,
        causal,
        sliding_window,
        softcap,
        alibi_slopes,
        sinks,
        _scale(k_scale, k_factor),
        _scale(v_scale, v_factor),
        num_splits,
        split_size,
        common_prefix_len,
        draft_mask,
        None,
        True,
        backend,
    )
    run_attention(call, backend)
    assert call.lse is not None
    return call.out, call.lse


@paged_attention_op.register_fake
def _(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _head_dim = query.shape
    out = query.new_empty((num_tokens, num_heads, value_cache.shape[3]))
    return out, query.new_empty((num_tokens, num_heads), dtype=torch.float32)


def traced_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Scale,
    v_scale: Scale,
    backend: str | None,
) -> None:
    """`reshape_and_cache` as one node of a graph."""
    require_inference(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    torch.ops.paged_kernels.reshape_and_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        **_split_scales(k_scale, v_scale),
        backend=backend,
    )


def traced_attention(
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
    k_scale: Scale,
    v_scale: Scale,
    num_splits: int | None,
    split_size: int | None,
    common_prefix_len: int | None,
    draft_mask: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` as one node of a graph, and a copy into `out` if there is one."""
    require_inference(query=query, key_cache=key_cache, value_cache=value_cache, sinks=sinks)
    result, lse = torch.ops.paged_kernels.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        **_split_scales(k_scale, v_scale),
        num_splits=num_splits,
        split_size=split_size,
        common_prefix_len=common_prefix_len,
        draft_mask=draft_mask,
        backend=backend,
    )
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype:
            raise ValueError(
                f"out must be {result.dtype} {list(result.shape)}, "
                f"got {out.dtype} {list(out.shape)}"
            )
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _scale(scale: Tensor | None, factor: float | None) -> Scale:
    return factor if scale is None else scale


def _split_scales(k_scale: Scale, v_scale: Scale) -> dict[str, Scale]:
    """A schema has no type for `float | Tensor`: each scale as one of two arguments."""
    split: dict[str, Scale] = {}
    for side, scale in (("k", k_scale), ("v", v_scale)):
        split[f"{side}_{'scale' if isinstance(scale, Tensor) else 'factor'}"] = scale
    return split
