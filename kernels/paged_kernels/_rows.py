"""Attention of query rows over one contiguous piece of keys, in plain torch.

The query heads that share a KV head are packed into rows, `[num_kv_heads, tokens * group_size,
head_dim]`, so that K and V are read once for all of them. Rows are taken a tile at a time: its
scores stay in cache, and keys that none of its rows can see are never touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._pages import Piece
from .merge_states import State
from .options import AttentionCall

TILE_ROWS = 256


def attend_piece(
    call: AttentionCall,
    query: Tensor,
    piece: Piece,
    first_position: int | None = None,
    draft_mask: Tensor | None = None,
) -> State:
    """Attention of `query` over `piece` alone.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, consecutive tokens of one sequence.
        first_position: position of the first of them. None: rows of any sequences, each of which
            sees the whole piece.
        draft_mask: bool `[num_tokens, num_tokens]` of this sequence.
    """
    num_tokens, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = piece.value.shape
    key, value = piece.key.transpose(0, 1)[None], piece.value.transpose(0, 1)[None]
    attend = flash
    if not can_flash(call):
        attend, key, value = _written_out, key.float(), value.float()

    states = []
    tile = max(1, TILE_ROWS // (num_heads // num_kv_heads))
    for begin in range(0, num_tokens, tile):
        tokens = slice(begin, min(begin + tile, num_tokens))
        grouped = query[tokens].unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
        rows = grouped.flatten(1, 2).to(key.dtype)[None]
        keys, seen, bias = slice(0, num_keys), None, None
        if first_position is not None:
            keys, seen = _visible(call, tokens, piece, first_position, draft_mask)
            if keys.start >= keys.stop:
                states.append(no_keys(call, query[tokens]))
                continue
            bias = _bias(call, seen, tokens, keys, piece.start - first_position, rows.dtype)
        out, lse = attend(call, rows, key[:, :, keys], value[:, :, keys], bias)
        out = out.view(*grouped.shape[:3], -1).transpose(0, 1).flatten(1, 2)
        lse = lse.view(grouped.shape[:3]).transpose(0, 1).flatten(1, 2)
        if seen is not None:  # what a softmax over no key gives is a matter of taste: 0 and -inf
            blind = ~seen.any(1)[:, None]
            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, float("-inf"))
        states.append(State(out, lse))
    if len(states) == 1:
        return states[0]
    return State(
        torch.cat([state.out for state in states]), torch.cat([state.lse for state in states])
    )


def no_keys(call: AttentionCall, query: Tensor) -> State:
    """Attention of `query` over nothing."""
    out = query.new_zeros((*query.shape[:2], call.value_cache.shape[3]))
    return State(out, query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32))


def _visible(
    call: AttentionCall,
    tokens: slice,
    piece: Piece,
    first_position: int,
    draft_mask: Tensor | None,
) -> tuple[slice, Tensor | None]:
    """The keys of the piece that some of `tokens` see, and bool [tokens, keys]; None: all of it."""
    causal, window = call.variant.causal and draft_mask is None, call.variant.sliding_window
    first, last = first_position + tokens.start, first_position + tokens.stop - 1
    low, high = piece.start, piece.start + len(piece.key)
    if causal:
        high = min(high, last + 1)
    if window is not None:
        low = max(low, first - window + 1)
    keys = slice(low - piece.start, high - piece.start)

    cut_above = high - 1 > first if causal else draft_mask is not None and high > first_position
    cut_below = window is not None and low <= last - window
    if low >= high or not (cut_above or cut_below):
        return keys, None
    distance = _distance(tokens, keys, piece.start - first_position, piece.key.device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    elif draft_mask is not None and high > first_position:
        new = max(low, first_position)
        columns = slice(new - first_position, high - first_position)
        seen[:, new - low :] = draft_mask[tokens, columns]
    if window is not None:
        seen &= distance > -window
    return keys, seen


def _distance(tokens: slice, keys: slice, offset: int, device: torch.device) -> Tensor:
    """Key position - query position, [tokens, keys], when key 0 is `offset` after token 0."""
    token = torch.arange(tokens.start, tokens.stop, device=device)
    return torch.arange(keys.start, keys.stop, device=device) + offset - token[:, None]


def _bias(
    call: AttentionCall,
    seen: Tensor | None,
    tokens: slice,
    keys: slice,
    offset: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the scores: [1, 1 or num_kv_heads, rows, keys], or None for nothing."""
    dims = call.dims
    bias = None
    if call.alibi_slopes is not None:
        distance = _distance(tokens, keys, offset, call.query.device)
        slopes = call.alibi_slopes.view(dims.num_kv_heads, 1, dims.group_size, 1)
        bias = slopes * distance[:, None]
    if seen is not None:
        bias = torch.zeros((), device=seen.device) if bias is None else bias
        bias = torch.where(seen[:, None], bias, float("-inf"))
    if bias is None:
        return None
    bias = bias.to(dtype).expand(-1 if bias.dim() == 4 else 1, -1, dims.group_size, -1)
    return bias.flatten(1, 2)[None]


def can_flash(call: AttentionCall) -> bool:
    """Whether torch's CPU kernel serves: it caps nothing, and adds a bias in the dtype of the keys."""
    quantised = call.k_scale is not None  # then keys are float32
    return (
        call.query.device.type == "cpu"
        and call.key_cache.shape == call.value_cache.shape
        and call.variant.softcap is None
        and (call.alibi_slopes is None or quantised or call.query.dtype == torch.float32)
    )


def flash(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> State:
    """The kernel under torch's SDPA on CPUs, called by its own name because SDPA returns no lse.

    All arguments are `[batch, heads, rows or keys, head_dim or keys]`.
    """
    return State(
        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, key, value, attn_mask=bias, scale=call.scale
        )
    )


def _written_out(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> State:
    scores = torch.matmul(rows, key.transpose(2, 3)).mul_(call.scale)
    softcap = call.variant.softcap
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    lse = torch.logsumexp(scores, dim=3)
    return State(torch.matmul(scores.sub_(lse[..., None]).exp_(), value), lse)
