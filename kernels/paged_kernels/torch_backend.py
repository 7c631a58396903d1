"""Paged attention in plain torch, on CPU and GPU tensors alike.

One sequence at a time: its pages come as a few contiguous pieces of keys (`_pages`), its query rows
attend to each piece (`_rows`), and the partial results are merged by their lse. A sequence is never
mixed with its batch mates, except in a common prefix, which all rows of the batch read at once.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ._pages import Pages
from ._quantise import FP8_DTYPES, quantise_fp8, quantise_int8
from ._rows import attend_piece, no_keys
from ._short import attend_group, short_groups
from .merge_states import State, merge_two
from .options import AttentionCall


@torch.no_grad()
def attend(call: AttentionCall) -> None:
    """Fill `call.out` and `call.lse`. Lengths are read on the host: GPU tensors cost a sync."""
    pages = Pages(call)
    seq_lens = call.seq_lens.tolist()
    num_seqs = len(seq_lens)
    starts = range(num_seqs + 1) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    prefix = _shared_prefix(call, pages, seq_lens, starts)
    begins = _first_keys(
        call, seq_lens, query_lens, 0 if prefix is None else call.common_prefix_len
    )

    key_lens = [end - begin for begin, end in zip(begins, seq_lens, strict=True)]
    grouped = set()
    for seqs in short_groups(call, pages, query_lens, key_lens):
        rows = torch.tensor([starts[seq] for seq in seqs], device=call.query.device)
        state = attend_group(
            call,
            pages,
            call.query[rows],
            seqs,
            [begins[seq] for seq in seqs],
            [seq_lens[seq] for seq in seqs],
        )
        _finish(call, rows, state, prefix)
        grouped.update(seqs)
    for seq in range(num_seqs):
        if query_lens[seq] > 0 and seq not in grouped:
            rows = slice(starts[seq], starts[seq + 1])
            state = _attend_sequence(call, pages, seq, range(begins[seq], seq_lens[seq]), rows)
            _finish(call, rows, state, prefix)
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


def _first_keys(call, seq_lens, query_lens, prefix_len) -> list[int]:
    """The first key that some query of each sequence may see and has yet to."""
    window = call.variant.sliding_window
    if window is None:
        return [prefix_len] * len(seq_lens)
    return [max(0, n - q - window + 1) for n, q in zip(seq_lens, query_lens, strict=True)]


def _attend_sequence(
    call: AttentionCall, pages: Pages, seq: int, keys: range, tokens: slice
) -> State:
    query = call.query[tokens]
    draft_mask = call.draft_mask
    if draft_mask is not None:
        draft_mask = draft_mask[seq, : len(query), : len(query)]
    state = None
    for piece in pages.pieces(seq, keys.start, keys.stop):
        part = attend_piece(call, query, piece, keys.stop - len(query), draft_mask)
        state = part if state is None else merge_two(state, part)
    return state or no_keys(call, query)


def _finish(call: AttentionCall, rows: slice | Tensor, state: State, prefix: State | None) -> None:
    if prefix is not None:
        state = merge_two(State(prefix.out[rows], prefix.lse[rows]), state)
    out, lse = state
    if call.sinks is not None:  # one more key, without a value
        lse = torch.logaddexp(state.lse, call.sinks)
        out = out * torch.exp(state.lse - lse).nan_to_num_(0.0)[..., None]
    call.out[rows] = out.to(call.out.dtype)
    if call.lse is not None:
        call.lse[rows] = lse


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
    state = no_keys(call, query)
    for piece in pages.pieces(owner, 0, call.common_prefix_len):
        state = merge_two(state, attend_piece(call, query, piece))
    return state


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
