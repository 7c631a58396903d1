"""Dense attention, one sequence at a time, in float64: slow, and so plain that it is obviously right.

    s[i, j] = scale * q_i . k_j                      scores of query i and key j
    s       = softcap * tanh(s / softcap)            when capped
    s      += slope * (position_j - position_i)      when biased
    s       = -inf where query i may not see key j
    lse_i   = log(sum_j exp(s[i, j]) + exp(sink))    the sink only when given
    out_i   = sum_j exp(s[i, j] - lse_i) v_j

Vaswani et al. 2017, "Attention Is All You Need", with the options that came after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._quantise import FP8_DTYPES, quantise_fp8, quantise_int8
from .options import AttentionCall, Variant


def attend(call: AttentionCall) -> None:
    """Fill `call.out` and `call.lse`."""
    out, lse = dense_attend(call, torch.float64)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


def dense_attend(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [num_tokens, num_heads, head_dim_v] and lse [num_tokens, num_heads], computed in `dtype`."""
    num_tokens, num_heads, _ = call.query.shape
    head_dim_v = call.value_cache.shape[3]
    out = call.query.new_zeros((num_tokens, num_heads, head_dim_v), dtype=dtype)
    lse = call.query.new_full((num_tokens, num_heads), float("-inf"), dtype=dtype)
    seq_lens = call.seq_lens.tolist()
    starts = range(num_tokens + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        rows = slice(first, last)
        out[rows], lse[rows] = _attend_one(call, seq, seq_len, call.query[rows].to(dtype))
    return out, lse


def visible(
    query_pos: Tensor, key_pos: Tensor, variant: Variant, draft_mask: Tensor | None
) -> Tensor:
    """Which of the keys [k] each query [q] may see, bool [q, k]. The queries are the last tokens.

    A `draft_mask` [q, q] takes the place of the causal rule among the new tokens, which sit at
    `query_pos`; all of them see every earlier token. The window is on top of either.
    """
    distance = query_pos[:, None] - key_pos[None, :]
    if draft_mask is not None:
        seen = key_pos.expand(len(query_pos), -1) < query_pos[0]
        new = key_pos >= query_pos[0]
        seen[:, new] = draft_mask[:, key_pos[new] - query_pos[0]]
    elif variant.causal:
        seen = distance >= 0
    else:
        seen = torch.ones_like(distance, dtype=torch.bool)
    if variant.sliding_window is not None:
        seen = seen & (distance < variant.sliding_window)
    return seen


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> None:
    """Store row i of `key` and `value` in slot `slot_mapping[i]`; slot -1 is skipped."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            place = divmod(slot, block_size)
            _store(key[token], key_cache, k_scale, place)
            _store(value[token], value_cache, v_scale, place)


def _attend_one(
    call: AttentionCall, seq: int, seq_len: int, query: Tensor
) -> tuple[Tensor, Tensor]:
    query_len, num_heads, _ = query.shape
    device = query.device
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)
    oldest = 0  # what lies before the earliest query's window is not even looked up
    if call.variant.sliding_window is not None:
        oldest = max(0, seq_len - query_len - call.variant.sliding_window + 1)
    key_pos = torch.arange(oldest, seq_len, device=device)
    key = _read(call.key_cache, call.k_scale, call.block_table[seq], key_pos, query.dtype)
    value = _read(call.value_cache, call.v_scale, call.block_table[seq], key_pos, query.dtype)
    group_size = num_heads // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)

    scores = torch.einsum("qhd,khd->hqk", query, key) * call.scale
    if call.variant.softcap is not None:
        scores = call.variant.softcap * torch.tanh(scores / call.variant.softcap)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(query.dtype)
        scores = scores + slopes[:, None, None] * (key_pos - query_pos[:, None])
    draft_mask = call.draft_mask
    if draft_mask is not None:
        draft_mask = draft_mask[seq, :query_len, :query_len]
    seen = visible(query_pos, key_pos, call.variant, draft_mask)
    scores = scores.masked_fill(~seen, float("-inf"))

    logits = scores
    if call.sinks is not None:
        sinks = call.sinks.to(query.dtype)[:, None, None].expand(-1, query_len, 1)
        logits = torch.cat([scores, sinks], dim=2)
    lse = torch.logsumexp(logits, dim=2)  # [num_heads, query_len]
    weights = torch.exp(scores - lse.unsqueeze(2)).masked_fill(~seen, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, value), lse.T


def _read(
    cache: Tensor,
    scale: float | Tensor | None,
    block_ids: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The real numbers [k, num_kv_heads, head_dim] that the cache holds for `positions` [k]."""
    block_size = cache.shape[1]
    block, offset = block_ids[positions // block_size].long(), positions % block_size
    stored = cache[block, offset].to(dtype)
    if scale is None or isinstance(scale, float):
        return stored if scale is None else stored * scale
    if cache.dtype == torch.int8:
        scale = scale[block, offset]  # [k, num_kv_heads]; else [num_kv_heads]
    return stored * scale.to(dtype).unsqueeze(-1)


def _store(x: Tensor, cache: Tensor, scale: float | Tensor | None, place: tuple[int, int]) -> None:
    if cache.dtype in FP8_DTYPES:
        assert scale is not None
        x = quantise_fp8(x, scale, cache.dtype)
    elif cache.dtype == torch.int8:
        assert isinstance(scale, Tensor)
        x, scale[place] = quantise_int8(x)
    cache[place] = x
