"""Paged attention in plain torch, on CPU and GPU tensors alike.

One sequence at a time: its pages come as a few contiguous pieces of keys (`_pages`), its query rows
attend to each piece (`_rows`), and the partial results are merged by their lse. A sequence is never
mixed with its batch mates, except in a common prefix, which all rows of the batch read at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ._pages import Pages
from ._quantise import FP8_DTYPES, quantise_fp8, quantise_int8
from ._rows import attend_piece
from .merge_states import merge_attention_states
from .options import AttentionCall


@torch.no_grad()
def attend(call: AttentionCall) -> None:
    """Fill `call.out` and `call.lse`. Lengths are read on the host: GPU tensors cost a sync."""
    pages = Pages(call)
    seq_lens = call.seq_lens.tolist()
    num_seqs = len(seq_lens)
    starts = range(num_seqs + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    prefix = _shared_prefix(call, pages, seq_lens, starts)
    for seq, seq_len in enumerate(seq_lens):
        tokens = slice(starts[seq], starts[seq + 1])
        if tokens.start < tokens.stop:
            shared = None if prefix is None else (prefix[0][tokens], prefix[1][tokens])
            out, lse = _attend_sequence(call, pages, seq, seq_len, tokens, shared)
            call.out[tokens] = out
            if call.lse is not None:
                call.lse[tokens] = lse
    call.out[starts[num_seqs] :] = 0.0
    if call.lse is not None:
        call.lse[starts[num_seqs] :] = float("-inf")


@torch.no_grad()
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> None:
    """Store row i of `key` and `value` in slot `slot_mapping[i]`, padding slots excepted."""
    written = slot_mapping >= 0
    key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slots = slot_mapping.long()
    block_size = key_cache.shape[1]
    place = (slots // block_size, slots % block_size)
    _store(key, key_cache, place, k_scale)
    _store(value, value_cache, place, v_scale)


State = tuple[
    Tensor, Tensor
]  # out [num_tokens, num_heads, head_dim_v], lse [num_tokens, num_heads]


def _attend_sequence(
    call: AttentionCall,
    pages: Pages,
    seq: int,
    seq_len: int,
    tokens: slice,
    shared: State | None,
) -> State:
    query = call.query[tokens]
    num_tokens = len(query)
    first_position = seq_len - num_tokens
    draft_mask = call.draft_mask
    if draft_mask is not None:
        draft_mask = draft_mask[seq, :num_tokens, :num_tokens]

    begin = 0 if shared is None else call.common_prefix_len
    if call.variant.sliding_window is not None:
        begin = max(0, first_position - call.variant.sliding_window + 1)
    states = (
        attend_piece(call, query, piece, first_position, draft_mask)
        for piece in pages.pieces(seq, begin, seq_len)
    )
    state = _merge_all(states, shared)
    if state is None:
        state = (
            torch.zeros_like(call.out[tokens]),
            query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32),
        )
    if call.sinks is not None:  # a key without a value is one more partial result
        sink = call.sinks.expand(num_tokens, -1)
        state = merge_attention_states((state[0], torch.zeros_like(state[0])), (state[1], sink))
    return state


def _merge_all(states: Iterable[State], merged: State | None) -> State | None:
    """Merged as they come, in float32, so that only two are ever held."""
    for out, lse in states:
        if merged is None:
            merged = out, lse
        else:
            merged = merge_attention_states((merged[0].float(), out), (merged[1], lse))
    return merged


def _shared_prefix(
    call: AttentionCall, pages: Pages, seq_lens: list[int], starts: list[int] | range
) -> State | None:
    """The common prefix, attended to by all rows at once; None when each should read its own."""
    fixed = call.num_splits is not None or call.split_size is not None
    if (
        call.common_prefix_len == 0
        or fixed
        or call.variant.sliding_window is not None
        or call.alibi_slopes is not None
    ):
        return None
    # the shared blocks stand in the row of any sequence that has tokens
    owner = next((i for i, n in enumerate(seq_lens) if starts[i] < starts[i + 1]), None)
    if owner is None:
        return None
    query = call.query[: starts[len(seq_lens)]]
    pieces = pages.pieces(owner, 0, call.common_prefix_len)
    return _merge_all((attend_piece(call, query, piece) for piece in pieces), None)


def _store(
    x: Tensor, cache: Tensor, place: tuple[Tensor, Tensor], scale: float | Tensor | None
) -> None:
    if cache.dtype in FP8_DTYPES:
        assert scale is not None
        # as bytes: index_put_ knows no fp8
        x, cache = quantise_fp8(x, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
    elif cache.dtype == torch.int8:
        assert isinstance(scale, Tensor)
        x, scale[place] = quantise_int8(x)
    cache[place] = x
