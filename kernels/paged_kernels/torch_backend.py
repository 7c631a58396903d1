"""Paged attention in plain torch, on CPU and GPU tensors alike.

    for each sequence:
        for each contiguous piece of its keys, a run of blocks or a gathered copy:      _pages
            for each tile of its query rows that sees any of it:                        _rows
                state = merge(state, attention of the tile over the piece)       merge_states

Sequences do not mix, with two exceptions that batch what is too small to be worth a turn of its
own: decodes of short sequences (`_short`), and the common prefix, which all rows read at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._fixed import attend_fixed
from ._known import known
from ._pages import Pages
from ._plan import Plan, plan_of
from ._quantise import FP8_DTYPES, quantise_fp8, quantise_int8
from ._rows import Queries, add_sinks, attend_piece, no_keys, tile_tokens
from ._short import attend_group
from .merge_states import State, merge_two
from .options import AttentionCall


@torch.no_grad()
def attend(call: AttentionCall) -> None:
    """Fill `call.out` and `call.lse`. Lengths are read on the host: GPU tensors cost a sync."""
    plan = plan_of(call)
    pages = Pages(call)
    prefix = _shared_prefix(call, pages, plan) if plan.shares_prefix else None
    for group in plan.groups:
        _store(
            call, group.rows, _finish(call, group.rows, attend_group(call, pages, group), prefix)
        )
    for seq in plan.alone:
        _attend_sequence(call, pages, plan, seq, prefix)

    end = plan.starts[-1]
    if end < len(call.out):
        call.out[end:] = 0.0
        if call.lse is not None:
            call.lse[end:] = float("-inf")


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
    slots = known("slots", slot_mapping)
    rows, place = slots.once(
        ("place", key_cache.shape[1], key.device), lambda: _place(slot_mapping, key_cache.shape[1])
    )
    key, value = (x[: len(slot_mapping)] if rows is None else x[rows] for x in (key, value))
    _write(key, key_cache, place, k_scale)
    _write(value, value_cache, place, v_scale)


def _place(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Which rows are written, None for all, and to which block and offset each."""
    rows = None
    if (slot_mapping < 0).any():
        rows = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping = slot_mapping[rows]
    slots = slot_mapping.long()
    return rows, (slots // block_size, slots % block_size)


def _attend_sequence(
    call: AttentionCall, pages: Pages, plan: Plan, seq: int, prefix: State | None
) -> None:
    """Fill the rows of one sequence, a tile at a time."""
    start, query_len, keys = plan.starts[seq], plan.query_lens[seq], plan.keys[seq]
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


def _shared_prefix(call: AttentionCall, pages: Pages, plan: Plan) -> State:
    """All rows over the common prefix, read once."""
    owner = next(seq for seq, query_len in enumerate(plan.query_lens) if query_len > 0)
    # wherever they are, no row lies before the end of the prefix, and that is all that matters
    rows, length = call.query[: plan.starts[-1]], call.common_prefix_len
    states = []
    for piece in pages.pieces(owner, 0, length):
        tiles = [state for _, state in attend_piece(call, Queries(rows, length, length), piece)]
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
