"""Names and signatures from elsewhere, over the kernels of this package.

`flash_attn_with_kvcache` and `flash_attn_varlen_func` are called as in flash-attn 2, `varlen_attn`
as in torch.nn.attention.varlen: the same arguments in the same order with the same meaning, on CPU
tensors too, and for any page size. They have no backward pass. What is not honoured raises
ValueError. One result differs: the log-sum-exp of a row that sees no key is -inf, the logarithm of
an empty sum, where flash-attn 2 says +inf.

Block tables convert to and from FlashInfer's CSR form, log-sum-exps to and from its base 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._compat_arguments import (
    AuxRequest,
    append,
    check_only,
    checked_lengths,
    checked_table,
    options,
    queries_and_keys,
    refuse,
    require_like,
    unit_stride,
)
from ._csr import block_table_to_csr, csr_to_block_table, lse_from_base_2, lse_to_base_2
from ._require import FLOAT_DTYPES, INT_DTYPES, require_int, require_tensor, require_vector
from .api import paged_attention

__all__ = [
    "block_table_to_csr",
    "csr_to_block_table",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "lse_from_base_2",
    "lse_to_base_2",
    "varlen_attn",
]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append `k` and `v` to the cache if given, then attend `q` over it.

    Args:
        q: `[batch, seqlen_q, nheads, headdim]`, the last tokens of their sequences.
        k_cache, v_cache: `[num_blocks, page_size, nheads_k, headdim]` with a `block_table`, else
            `[batch_cache, seqlen_cache, nheads_k, headdim]`; dtype of `q`.
        k, v: `[batch, seqlen_new, nheads_k, headdim]`, written from `cache_seqlens` on, in place.
        rotary_cos, rotary_sin, cache_leftpad: not honoured, must be None.
        cache_seqlens: tokens in the cache before the call, one int or `[batch]`; needed with `k`.
            None: all that the cache can hold.
        cache_batch_idx: `[batch]`, which sequence of a cache without `block_table` is each one's.
        block_table: `[batch, max_blocks_per_seq]`.
        softmax_scale: default `headdim ** -0.5`.
        causal: the mask aligned bottom-right.
        window_size: `(left, right)` keys seen besides a query's own, -1 for all. A bounded view
            to the right is honoured only where it is none: 0, `causal`, or one query per sequence.
        softcap: 0 is off.
        rotary_interleaved: says how to rotate, and so says nothing here.
        alibi_slopes: float32 `[nheads]`, not per sequence, and only where no query sees past itself.
        num_splits: 0: chosen.
        return_softmax_lse: also return float32 `[batch, nheads, seqlen_q]`.

    Returns:
        `[batch, seqlen_q, nheads, headdim]`.

    Raises:
        TypeError, ValueError: as `paged_attention`, and for what is not honoured. The cache is then
            as it was.
    """
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
    axes = "[batch, seqlen_q, nheads, headdim]"
    require_tensor("q", q, FLOAT_DTYPES, axes, (None,) * 4, None)
    batch, seqlen_q, nheads, headdim = q.shape
    axes = "[num_blocks or batch_cache, page_size or seqlen_cache, nheads_k, headdim]"
    require_like(q, "k_cache", k_cache, axes, (None, None, None, headdim))
    require_like(q, "v_cache", v_cache, axes, (*k_cache.shape[:3], None))
    block_table = checked_table(block_table, cache_batch_idx, k_cache, batch)
    seqlen_new = 0
    if k is not None and v is not None:
        axes = "[batch, seqlen_new, nheads_k, headdim]"
        require_like(q, "k", k, axes, (batch, None, *k_cache.shape[2:]))
        seqlen_new = k.shape[1]
        require_like(q, "v", v, axes, (batch, seqlen_new, *v_cache.shape[2:]))
    elif k is not None or v is not None:
        raise ValueError(f"{'v' if v is None else 'k'} must be given with the other, got None")
    capacity = block_table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        if seqlen_new:
            raise ValueError("cache_seqlens must be given with k, got None")
        cache_seqlens = capacity
    before = checked_lengths(cache_seqlens, seqlen_new, capacity, batch, q.device)

    arguments = options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits, seqlen_q == 1
    )
    arguments |= {
        "query": unit_stride(q).flatten(0, 1),
        "key_cache": k_cache,
        "value_cache": v_cache,
        "block_table": block_table,
        "seq_lens": before + seqlen_new,
        "return_lse": return_softmax_lse,
    }
    if isinstance(cache_seqlens, int):
        arguments["max_seq_len"] = cache_seqlens + seqlen_new
    if seqlen_q != 1:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
        arguments |= {"cu_seqlens_q": starts, "max_query_len": seqlen_q}
    if k is not None and v is not None:
        if not is_compiling():  # an error must leave the cache as it was
            check_only(arguments)
        append(k, v, k_cache, v_cache, block_table, before)
    result = paged_attention(**arguments)
    shape = (batch, seqlen_q, nheads)
    if isinstance(result, Tensor):
        return result.view(*shape, v_cache.shape[3])
    out, lse = result
    return out.view(*shape, v_cache.shape[3]), lse.view(shape).transpose(1, 2).contiguous()


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed sequences over packed keys, or over pages.

    Args:
        q: `[total_q, nheads, headdim]`.
        k, v: `[total_k, nheads_k, headdim]`; `[num_blocks, page_size, nheads_k, headdim]` with a
            `block_table`.
        cu_seqlens_q, cu_seqlens_k: `[batch + 1]`, prefix sums of the lengths.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        dropout_p: not honoured, must be 0.
        deterministic: of the backward pass; the forward pass always is.
        return_attn_probs: also return float32 `[nheads, total_q]`, the log-sum-exp, and what
            flash-attn returns without dropout in place of the probabilities: an empty tensor.
        block_table: `[batch, max_blocks_per_seq]`.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_with_kvcache`.

    Returns:
        `[total_q, nheads, headdim]`.

    Raises:
        TypeError, ValueError: as `paged_attention`, and for what is not honoured.
    """
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p!r}")
    require_vector("cu_seqlens_q", cu_seqlens_q, INT_DTYPES, "[batch + 1]", None, q.device)
    require_vector("cu_seqlens_k", cu_seqlens_k, INT_DTYPES, "[batch + 1]", None, q.device)
    require_int("max_seqlen_q", max_seqlen_q, 0)
    require_int("max_seqlen_k", max_seqlen_k, 0)
    arguments = options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    arguments |= queries_and_keys(("q", "k", "v"), q, k, v, cu_seqlens_k, max_seqlen_k, block_table)
    result = paged_attention(
        **arguments,
        seq_lens=cu_seqlens_k.diff(),
        cu_seqlens_q=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        return_lse=return_attn_probs,
    )
    if isinstance(result, Tensor):
        return result
    return result[0], result[1].T.contiguous(), q.new_zeros(0)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences over packed keys, or over pages.

    Args:
        query: `[total_q, num_heads, head_dim]`.
        key, value: `[total_k, num_kv_heads, head_dim]`; `[num_pages, page_size, num_kv_heads,
            head_dim]` with a `block_table`.
        cu_seq_q: `[num_seqs + 1]`, prefix sums of the query lengths.
        cu_seq_k: the same of the keys. With a `block_table` it may be None, and says nothing.
        max_q, max_k: upper bounds of the lengths.
        return_aux: with `lse` true, also return the log-sum-exp, float32 `[num_heads, total_q]`:
            what torch returns, though its documentation has the axes the other way round.
        scale: default `head_dim ** -0.5`.
        window_size: `(-1, -1)` all keys, `(-1, 0)` causal, aligned bottom-right, `(w, 0)` causal and
            at most `w` earlier keys. A bounded view to the right is not honoured.
        enable_gqa: whether there may be fewer KV heads than query heads.
        seqused_k: `[num_seqs]`, keys of each sequence that count; needed with a `block_table`.
        block_table: `[num_seqs, max_pages_per_seq]`.
        num_splits: as in `paged_attention`.

    Returns:
        `[total_q, num_heads, head_dim]`.

    Raises:
        TypeError, ValueError: as `paged_attention`, and for what is not honoured.
    """
    require_vector("cu_seq_q", cu_seq_q, INT_DTYPES, "[num_seqs + 1]", None, query.device)
    require_int("max_q", max_q, 0)
    require_int("max_k", max_k, 0)
    if cu_seq_k is not None:
        require_vector("cu_seq_k", cu_seq_k, INT_DTYPES, "[num_seqs + 1]", None, query.device)
    elif block_table is None:
        raise ValueError("cu_seq_k must be given without a block_table, got None")
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k must be given with a block_table, got None")
    if getattr(return_aux, "max_scores", False):
        raise ValueError("return_aux must ask for lse alone, got max_scores")
    arguments = options(scale, False, window_size, num_splits=num_splits)
    arguments |= queries_and_keys(
        ("query", "key", "value"), query, key, value, cu_seq_k, max_k, block_table
    )
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} query heads over {key.shape[-2]} KV "
            f"heads, got {enable_gqa!r}"
        )
    lengths = seqused_k
    if lengths is None:
        assert cu_seq_k is not None
        lengths = cu_seq_k.diff()
    result = paged_attention(
        **arguments,
        seq_lens=lengths,
        cu_seqlens_q=cu_seq_q,
        max_query_len=max_q,
        return_lse=return_aux is not None and return_aux.lse,
    )
    return result if isinstance(result, Tensor) else (result[0], result[1].T.contiguous())
