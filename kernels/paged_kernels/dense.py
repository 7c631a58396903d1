"""Dense attention over contiguous K and V: what paged attention is compared with.

By torch's scaled_dot_product_attention wherever that can compute it, as a user without pages would
write it; written out in float32 for what it cannot do (softcap, sinks, lse).
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ._require import (
    FLOAT32,
    FLOAT_DTYPES,
    INT_DTYPES,
    require_bool,
    require_inference,
    require_number,
    require_tensor,
    require_vector,
)
from .options import Variant
from .reference import visible


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    draft_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences over packed keys, with the meaning of `paged_attention`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32, float16 or bfloat16.
        key: `[num_keys, num_kv_heads, head_dim]`, dtype of `query`.
        value: `[num_keys, num_kv_heads, head_dim_v]`, dtype of `query`.
        cu_seqlens_q: int32 or int64 `[num_seqs + 1]`, prefix sums of the query lengths.
        cu_seqlens_k: the same of the key lengths. The queries are the last tokens of a sequence.
        scale, causal, sliding_window, softcap, alibi_slopes, sinks, draft_mask: as in
            `paged_attention`.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        `[num_tokens, num_heads, head_dim_v]` in the dtype of `query`; with `return_lse` also
        float32 `[num_tokens, num_heads]`. Rows that see no key, and rows at or past
        `cu_seqlens_q[-1]`: as in `paged_attention`.

    Raises:
        TypeError, ValueError: as `paged_attention`.
    """
    variant = Variant(causal, sliding_window, softcap)
    _check(query, key, value, scale, alibi_slopes, sinks, return_lse)
    starts_q = _checked_starts("cu_seqlens_q", cu_seqlens_q, query)
    starts_k = _checked_starts("cu_seqlens_k", cu_seqlens_k, key)
    num_seqs = len(starts_q) - 1
    if len(starts_k) != num_seqs + 1:
        raise ValueError(
            f"cu_seqlens_k must have {num_seqs + 1} entries like cu_seqlens_q, got {len(starts_k)}"
        )
    if draft_mask is not None:
        axes = "[num_seqs, max_query_len, max_query_len]"
        require_tensor(
            "draft_mask", draft_mask, (torch.bool,), axes, (num_seqs, None, None), query.device
        )
        longest = max((b - a for a, b in pairwise(starts_q)), default=0)
        if min(draft_mask.shape[1:]) < longest:
            raise ValueError(
                f"draft_mask must be {axes} with max_query_len >= {longest}, "
                f"got shape {list(draft_mask.shape)}"
            )
    scale = query.shape[2] ** -0.5 if scale is None else float(scale)

    out = query.new_zeros((*query.shape[:2], value.shape[2]))
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
    sdpa_can = (
        softcap is None
        and sinks is None
        and not return_lse
        and (alibi_slopes is None or query.dtype == torch.float32)  # its bias has query's dtype
    )

    def lengths(seq: int) -> tuple[int, int, int]:  # neighbours of equal lengths are one batch
        own = 0 if draft_mask is None else seq
        return starts_q[seq + 1] - starts_q[seq], starts_k[seq + 1] - starts_k[seq], own

    for (q_len, k_len, _), group in groupby(range(num_seqs), lengths):
        seqs = list(group)
        if q_len == 0 or (k_len == 0 and sinks is None):
            continue
        rows = slice(starts_q[seqs[0]], starts_q[seqs[-1] + 1])
        keys = slice(starts_k[seqs[0]], starts_k[seqs[-1] + 1])
        q = (
            query[rows].unflatten(0, (-1, q_len)).transpose(1, 2)
        )  # [batch, heads, tokens, head_dim]
        k = key[keys].unflatten(0, (len(seqs), k_len)).transpose(1, 2)
        v = value[keys].unflatten(0, (len(seqs), k_len)).transpose(1, 2)
        mask = None if draft_mask is None else draft_mask[seqs[0], :q_len, :q_len]
        if sdpa_can:
            group_out = _sdpa(q, k, v, scale, variant, alibi_slopes, mask)
        else:
            group_out, group_lse = _written_out(q, k, v, scale, variant, alibi_slopes, sinks, mask)
            lse[rows] = group_lse.transpose(1, 2).flatten(0, 1)
        out[rows] = group_out.transpose(1, 2).flatten(0, 1)
    return (out, lse) if return_lse else out


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    variant: Variant,
    alibi_slopes: Tensor | None,
    draft_mask: Tensor | None,
) -> Tensor:
    q_len, k_len = q.shape[2], k.shape[2]
    plain = variant.sliding_window is None and draft_mask is None and alibi_slopes is None
    if plain and (not variant.causal or q_len in (1, k_len)):
        square = variant.causal and q_len > 1  # SDPA's own causal mask is aligned top-left
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=square, scale=scale, enable_gqa=True
        )
    distance, seen = _distance_and_seen(q, k, variant, draft_mask)
    mask = seen
    if alibi_slopes is not None:
        mask = (alibi_slopes[:, None, None] * distance).masked_fill(~seen, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return out.masked_fill(~seen.any(1)[:, None], 0.0)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    variant: Variant,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    draft_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output [batch, num_heads, tokens, head_dim_v] and lse [batch, num_heads, tokens], float32."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    distance, seen = _distance_and_seen(q, k, variant, draft_mask)
    scores = q.float() @ k.transpose(2, 3) * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * distance
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=3)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    weights = torch.exp(scores - lse[..., None]).masked_fill(~seen, 0.0)
    return weights @ v, lse


def _distance_and_seen(
    q: Tensor, k: Tensor, variant: Variant, draft_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Key position - query position, and which keys are seen: both [tokens, keys]."""
    key_pos = torch.arange(k.shape[2], device=k.device)
    query_pos = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=k.device)
    return key_pos - query_pos[:, None], visible(query_pos, key_pos, variant, draft_mask)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> None:
    axes = "[num_tokens, num_heads, head_dim]"
    require_tensor("query", query, FLOAT_DTYPES, axes, (None,) * 3, None)
    _, num_heads, head_dim = query.shape
    sizes: tuple[int | None, ...] = (None, None, head_dim)
    axes = "[num_keys, num_kv_heads, head_dim"
    require_tensor("key", key, (query.dtype,), axes + "]", sizes, query.device)
    sizes = (*key.shape[:2], None)
    require_tensor("value", value, (query.dtype,), axes + "_v]", sizes, query.device)
    num_kv_heads = key.shape[1]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query must have a multiple of the {num_kv_heads} KV heads of key, got {num_heads} heads"
        )
    require_inference(query=query, key=key, value=value, sinks=sinks, alibi_slopes=alibi_slopes)
    for name, vector in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if vector is not None:
            require_vector(name, vector, FLOAT32, "[num_heads]", num_heads, query.device)
    if scale is not None:
        require_number("scale", scale)
    require_bool("return_lse", return_lse)


def _checked_starts(name: str, starts: Tensor, rows: Tensor) -> list[int]:
    require_tensor(name, starts, INT_DTYPES, "[num_seqs + 1]", (None,), rows.device)
    values: list[int] = starts.tolist()
    if not values or values[0] != 0 or values != sorted(values) or values[-1] > len(rows):
        raise ValueError(
            f"{name} must rise from 0 to at most the {len(rows)} rows it cuts, got {values[:8]}"
        )
    return values
