"""Attention of query rows over one contiguous piece of keys, in plain torch.

The query heads that share a KV head are packed into rows, `[num_kv_heads, tokens * group_size,
head_dim]`, so that K and V are read once for all of them. Rows are taken a tile at a time: its
scores stay in cache, and keys that none of its rows can see are never touched.

A state is `[tokens, num_kv_heads, group_size, ..]` throughout the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._pages import Piece, read_dtype
from .merge_states import State
from .options import AttentionCall

TILE_ROWS = 256


class Queries(NamedTuple):
    """The new tokens of a sequence, which are its last."""

    rows: Tensor  # [num_tokens, num_heads, head_dim]
    position: int  # of the first
    seq_len: int
    draft_mask: Tensor | None = None  # bool [num_tokens, num_tokens]


def attend_piece(
    call: AttentionCall, queries: Queries, piece: Piece
) -> Iterator[tuple[int, State]]:
    """Attention over `piece` alone: (first token, state) of each tile that sees any of it."""
    key, value = piece.key, piece.value
    kernel = flash
    if not can_flash(call):
        kernel, key, value = written_out, key.float(), value.float()
    step = tile_tokens(call)
    for begin in range(0, len(queries.rows), step):
        tokens = range(begin, min(begin + step, len(queries.rows)))
        keys = _keys_in_sight(call, queries, tokens, range(piece.start, piece.start + len(key)))
        if len(keys) > 0:
            part = slice(keys.start - piece.start, keys.stop - piece.start)
            rows = queries.rows[begin : tokens.stop]
            seen = seen_keys(call, queries, tokens, keys)
            bias = score_bias(call, queries, tokens, keys, seen, key.dtype)
            yield begin, attend_tile(call, kernel, rows, key[part], value[part], seen, bias)


def tile_tokens(call: AttentionCall) -> int:
    """Query tokens of a tile."""
    return max(1, TILE_ROWS // call.dims.group_size)


def attend_tile(
    call: AttentionCall,
    kernel: Callable[..., State],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
) -> State:
    """Attention of one tile `query` [tokens, num_heads, head_dim] over `key` [keys, num_kv_heads, ..]."""
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2]).transpose(0, 1)
    rows = grouped.flatten(1, 2).to(key.dtype)
    out, lse = kernel(
        call, rows[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], bias
    )
    out = out.view(*grouped.shape[:3], -1).transpose(0, 1)
    lse = lse.view(grouped.shape[:3]).transpose(0, 1)
    if seen is not None:  # what a softmax over no key gives is a matter of taste: 0 and -inf
        blind = ~seen.any(1)[:, None, None]
        if blind.any():
            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, float("-inf"))
    return State(out, lse)


def no_keys(call: AttentionCall, num_tokens: int) -> State:
    """Attention over nothing."""
    dims = call.dims
    shape = (num_tokens, dims.num_kv_heads, dims.group_size)
    lse = call.query.new_full(shape, float("-inf"), dtype=torch.float32)
    return State(call.query.new_zeros((*shape, dims.head_dim_v)), lse)


def add_sinks(call: AttentionCall, state: State) -> State:
    """One more key, without a value."""
    if call.sinks is None:
        return state
    sinks = call.sinks.view(state.lse.shape[1:])
    weight = torch.sigmoid(state.lse - sinks).nan_to_num_(0.0)  # a sink of -inf is none
    return State(state.out * weight[..., None], torch.logaddexp(state.lse, sinks))


def _keys_in_sight(call: AttentionCall, queries: Queries, tokens: range, keys: range) -> range:
    """Those of `keys` that lie between what the first token's window and the last token end."""
    low, high = keys.start, keys.stop
    if call.variant.causal and queries.draft_mask is None:
        high = min(high, queries.position + tokens.stop)
    if call.variant.sliding_window is not None:
        low = max(low, queries.position + tokens.start - call.variant.sliding_window + 1)
    return range(low, high)


def seen_keys(call: AttentionCall, queries: Queries, tokens: range, keys: range) -> Tensor | None:
    """Which of `keys` each of `tokens` sees, bool [tokens, keys]; None when all see all."""
    draft_mask, window = queries.draft_mask, call.variant.sliding_window
    causal = call.variant.causal and draft_mask is None
    first, last = queries.position + tokens.start, queries.position + tokens.stop - 1
    if not (
        (causal and keys.stop - 1 > first)
        or (draft_mask is not None and keys.stop > queries.position)
        or (window is not None and keys.start <= last - window)
        or keys.stop > queries.seq_len
    ):
        return None
    position, key = _positions(queries, tokens, keys)
    seen = (key < queries.seq_len).expand(len(tokens), -1)
    if causal:
        seen = seen & (key <= position)
    if draft_mask is not None:  # it has a say among the new tokens only
        new = key - queries.position
        among_new = draft_mask[tokens.start : tokens.stop, new.clamp(0, draft_mask.shape[1] - 1)]
        seen = seen & ((new < 0) | among_new)
    if window is not None:
        seen = seen & (key > position - window)
    return seen


def score_bias(
    call: AttentionCall,
    queries: Queries,
    tokens: range,
    keys: range,
    seen: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the scores: [1, 1 or num_kv_heads, rows, keys], or None for nothing."""
    dims = call.dims
    bias: Tensor | None = None
    if call.alibi_slopes is not None:
        position, key = _positions(queries, tokens, keys)
        slopes = call.alibi_slopes.view(dims.num_kv_heads, 1, dims.group_size, 1)
        bias = slopes * (key - position)[:, None]
    if seen is not None:
        bias = torch.zeros((), device=seen.device) if bias is None else bias
        bias = torch.where(seen[:, None], bias, float("-inf"))
    if bias is None:
        return None
    bias = bias.to(dtype).expand(-1 if bias.dim() == 4 else 1, -1, dims.group_size, -1)
    return bias.flatten(1, 2)[None]


def _positions(queries: Queries, tokens: range, keys: range) -> tuple[Tensor, Tensor]:
    """Of the queries [tokens, 1] and of the keys [keys]."""
    device, offset = queries.rows.device, queries.position
    position = torch.arange(offset + tokens.start, offset + tokens.stop, device=device)
    return position[:, None], torch.arange(keys.start, keys.stop, device=device)


def can_flash(call: AttentionCall) -> bool:
    """Whether torch's CPU kernel serves: it caps nothing, and adds a bias in the dtype of the keys."""
    return (
        call.query.device.type == "cpu"
        and call.key_cache.shape == call.value_cache.shape
        and call.variant.softcap is None
        and (call.alibi_slopes is None or read_dtype(call.key_cache) == torch.float32)
    )


def flash(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> State:
    """The kernel under torch's SDPA on CPUs, called by its own name because SDPA returns no lse.

    All tensors are `[batch, num_kv_heads, rows or keys, head_dim or keys]`.
    """
    num_rows = rows.shape[2]
    if num_rows == 1 and rows.dtype == torch.bfloat16:
        rows = rows.expand(-1, -1, 2, -1)  # two rows take an eighth of the time of one
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, key, value, attn_mask=bias, scale=call.scale
    )
    return State(out[:, :, :num_rows], lse[:, :, :num_rows])


def written_out(
    call: AttentionCall, rows: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> State:
    """The same in a few lines of float32, for what that kernel cannot do."""
    scores = torch.matmul(rows, key.transpose(2, 3)).mul_(call.scale)
    softcap = call.variant.softcap
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    top = scores.amax(3, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(3, keepdim=True)
    return State(torch.matmul(weights, value).div_(total), (top + total.log()).squeeze(3))
