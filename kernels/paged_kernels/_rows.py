"""Attention of query rows over one contiguous piece of keys, in plain torch.

The query heads that share a KV head are packed into rows, `[num_kv_heads, tokens * group_size,
head_dim]`, so that K and V are read once for all of them. Rows are taken a tile at a time: its
scores stay in cache, and keys that none of its rows can see are never touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._pages import Piece
from .options import AttentionCall

TILE_ROWS = 256


def attend_piece(
    call: AttentionCall,
    query: Tensor,
    piece: Piece,
    first_position: int | None = None,
    draft_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [num_tokens, num_heads, head_dim_v] and lse [num_tokens, num_heads] over `piece` alone.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, consecutive tokens of one sequence.
        first_position: position of the first of them. None: rows of any sequences, each of which
            sees the whole piece.
        draft_mask: bool `[num_tokens, num_tokens]` of this sequence.
    """
    num_tokens, num_heads, _ = query.shape
    num_keys, num_kv_heads, head_dim_v = piece.value.shape
    group_size = num_heads // num_kv_heads
    attend = _flash if _can_flash(call, piece) else _explicit
    key, value = piece.key.transpose(0, 1), piece.value.transpose(0, 1)
    if attend is _explicit:
        key, value = key.float(), value.float()
    out = value.new_zeros((num_tokens, num_kv_heads, group_size, head_dim_v))
    lse = value.new_full(out.shape[:3], float("-inf"), dtype=torch.float32)

    tile = max(1, TILE_ROWS // group_size)
    for begin in range(0, num_tokens, tile):
        tokens = slice(begin, min(begin + tile, num_tokens))
        grouped = query[tokens].unflatten(1, (num_kv_heads, group_size)).transpose(0, 1)
        rows = grouped.flatten(1, 2).to(key.dtype)
        keys, seen, bias = slice(0, num_keys), None, None
        if first_position is not None:
            keys, seen = _visible(call, tokens, piece, first_position, draft_mask)
            if keys.start >= keys.stop:
                continue
            bias = _bias(call, seen, tokens, keys, piece.start - first_position, rows.dtype)
        tile_out, tile_lse = attend(call, rows, key[:, keys], value[:, keys], bias)
        tile_out = tile_out.view(*grouped.shape[:3], head_dim_v).transpose(0, 1)
        tile_lse = tile_lse.view(grouped.shape[:3]).transpose(0, 1)
        if seen is not None:  # a softmax over no key at all is a matter of taste: ours is 0, -inf
            blind = ~seen.any(1)[:, None, None]
            tile_out = tile_out.masked_fill(blind[..., None], 0.0)
            tile_lse = tile_lse.masked_fill(blind, float("-inf"))
        out[tokens], lse[tokens] = tile_out, tile_lse
    return out.flatten(1, 2), lse.flatten(1, 2)


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
    """What is added to the scores: [1 or num_kv_heads, rows, keys], or None for nothing."""
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
    return bias.flatten(1, 2)


def _can_flash(call: AttentionCall, piece: Piece) -> bool:
    """Whether torch's CPU kernel serves: it caps nothing and adds its bias in the dtype of the keys."""
    return (
        piece.key.device.type == "cpu"
        and piece.key.shape == piece.value.shape
        and call.variant.softcap is None
        and (call.alibi_slopes is None or piece.key.dtype == torch.float32)
    )


def _flash(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kernel under torch's SDPA on CPUs, called by name because SDPA returns no lse."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows[None],
        key[None],
        value[None],
        attn_mask=None if bias is None else bias[None],
        scale=call.scale,
    )
    return out[0], lse[0]


def _explicit(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(rows, key.transpose(1, 2)).mul_(call.scale)
    softcap = call.variant.softcap
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    lse = torch.logsumexp(scores, dim=2)
    return torch.bmm(scores.sub_(lse[..., None]).exp_(), value), lse
