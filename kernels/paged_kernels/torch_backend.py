"""Paged attention in plain torch, on CPU and GPU tensors alike.

    for each sequence:
        for each contiguous piece of its keys, a run of blocks or a gathered copy:      _pages
            for each tile of its query rows that sees any of it:                        _rows
                state = merge(state, attention of the tile over the piece)       merge_states

Sequences do not mix, with two exceptions that batch what is too small to be worth a turn of its
own: decodes of short sequences (`_short`), and the common prefix, which all rows read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ._fixed import attend_fixed
from ._pages import Pages
from ._quantise import FP8_DTYPES, quantise_fp8, quantise_int8
from ._rows import Queries, add_sinks, attend_piece, no_keys, tile_tokens
from ._short import attend_group, short_groups
from .merge_states import State, merge_two
from .options import AttentionCall


@torch.no_grad()
def attend(call: AttentionCall) -> None:
    """Fill `call.out` and `call.lse`. Lengths are read on the host: GPU tensors cost a sync."""
    seq_lens = call.seq_lens.tolist()
    starts: Sequence[int] = range(len(seq_lens) + 1)
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    pages = Pages(call)
    prefix = _shared_prefix(call, pages, query_lens, starts)
    begin = 0 if prefix is None else call.common_prefix_len
    keys = [_keys(call, begin, n, q) for n, q in zip(seq_lens, query_lens, strict=True)]

    rest = {seq for seq, query_len in enumerate(query_lens) if query_len > 0}
    for group in short_groups(call, pages, query_lens, keys):
        rows = torch.tensor([starts[seq] for seq in group], device=call.query.device)
        state = attend_group(call, pages, call.query[rows], group, [keys[seq] for seq in group])
        _store(call, rows, _finish(call, rows, state, prefix))
        rest.difference_update(group)
    for seq in sorted(rest):
        _attend_sequence(call, pages, seq, starts[seq], query_lens[seq], keys[seq], prefix)

    call.out[starts[-1] :] = 0.0
    if call.lse is not None:
        call.lse[starts[-1] :] = float("-inf")


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
    key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    slots = slot_mapping.long()
    block_size = key_cache.shape[1]
    place = (slots // block_size, slots % block_size)
    _write(key, key_cache, place, k_scale)
    _write(value, value_cache, place, v_scale)


def _keys(call: AttentionCall, begin: int, seq_len: int, query_len: int) -> range:
    """What the queries of a sequence have yet to see: from `begin`, or from the first's window."""
    if call.variant.sliding_window is not None:
        begin = max(begin, seq_len - query_len - call.variant.sliding_window + 1)
    return range(begin, seq_len)


def _attend_sequence(
    call: AttentionCall,
    pages: Pages,
    seq: int,
    start: int,
    query_len: int,
    keys: range,
    prefix: State | None,
) -> None:
    """Fill the rows `start .. start + query_len - 1`, a tile at a time."""
    draft_mask = call.draft_mask
    if draft_mask is not None:
        draft_mask = draft_mask[seq, :query_len, :query_len]
    query = call.query[start : start + query_len]
    queries = Queries(query, keys.stop - query_len, keys.stop, draft_mask)
    if call.split_size is not None:
        for begin, state in attend_fixed(call, pages, seq, queries, keys):
            _store(call, slice(start + begin, start + begin + len(state.lse)), state)
        return
    states: dict[int, State] = {}
    for piece in pages.pieces(seq, keys.start, keys.stop):
        for begin, part in attend_piece(call, queries, piece):
            states[begin] = merge_two(states[begin], part) if begin in states else part
    step = tile_tokens(call)
    for begin in range(0, query_len, step):
        rows = slice(start + begin, start + min(begin + step, query_len))
        state = states.get(begin) or no_keys(call, rows.stop - rows.start)
        _store(call, rows, _finish(call, rows, state, prefix))


def _shared_prefix(
    call: AttentionCall, pages: Pages, query_lens: list[int], starts: Sequence[int]
) -> State | None:
    """All rows over the common prefix, read once; None when each sequence should read its own."""
    one_by_one = call.num_splits is not None or call.split_size is not None
    by_position = call.variant.sliding_window is not None or call.alibi_slopes is not None
    if call.common_prefix_len == 0 or one_by_one or by_position or starts[-1] == 0:
        return None
    owner = next(seq for seq, query_len in enumerate(query_lens) if query_len > 0)
    # wherever they are, no row lies before the end of the prefix, and that is all that matters
    queries = Queries(call.query[: starts[-1]], call.common_prefix_len, call.common_prefix_len)
    states = []
    for piece in pages.pieces(owner, 0, call.common_prefix_len):
        tiles = [state for _, state in attend_piece(call, queries, piece)]
        states.append(State(*(torch.cat(parts) for parts in zip(*tiles, strict=True))))
    merged = states[0]
    for state in states[1:]:
        merged = merge_two(merged, state)
    return merged


def _finish(call: AttentionCall, rows: slice | Tensor, state: State, prefix: State | None) -> State:
    if prefix is not None:
        state = merge_two(State(prefix.out[rows], prefix.lse[rows]), state)
    return add_sinks(call, state)


def _store(call: AttentionCall, rows: slice | Tensor, state: State) -> None:
    dims = call.dims
    out = call.out.view(-1, dims.num_kv_heads, dims.group_size, dims.head_dim_v)
    out[rows] = state.out.to(out.dtype)
    if call.lse is not None:
        call.lse.view(out.shape[:3])[rows] = state.lse


def _write(
    x: Tensor, cache: Tensor, place: tuple[Tensor, Tensor], scale: float | Tensor | None
) -> None:
    if cache.dtype in FP8_DTYPES:
        assert scale is not None
        # as bytes, because index_put_ knows no fp8
        x, cache = quantise_fp8(x, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)
    elif cache.dtype == torch.int8:
        assert isinstance(scale, Tensor)
        x, scale[place] = quantise_int8(x)
    cache[place] = x
