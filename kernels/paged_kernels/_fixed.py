"""Attention under `split_size`: a row's bits depend on that row alone.

Rounding follows the shape of a product and the place in it, so every product has one shape, a tile
of FIXED_TOKENS query tokens against FIXED_KEYS keys in float32, cut at multiples of either position
and padded. Merging a split that a row cannot see leaves the row as it is, bit for bit. Which split
size was asked for makes no difference to that, and none here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._pages import Pages
from ._rows import Queries, add_sinks, attend_tile, no_keys, score_bias, seen_keys, written_out
from .merge_states import State, merge_two
from .options import AttentionCall

FIXED_TOKENS = 16
FIXED_KEYS = 256


def attend_fixed(
    call: AttentionCall, pages: Pages, seq: int, queries: Queries, keys: range
) -> Iterator[tuple[int, State]]:
    """(First token, state) of each tile over all `keys` and the sinks."""
    num_tokens = len(queries.rows)
    lead = queries.position % FIXED_TOKENS
    padded = _padded_queries(queries, lead, -(lead + num_tokens) % FIXED_TOKENS)
    begins = range(0, len(padded.rows), FIXED_TOKENS)
    states = [no_keys(call, FIXED_TOKENS) for _ in begins]
    for start in range(keys.start - keys.start % FIXED_KEYS, keys.stop, FIXED_KEYS):
        split = range(start, start + FIXED_KEYS)
        key, value = _padded_keys(pages, seq, split, keys)
        for tile, begin in enumerate(begins):
            tokens = range(begin, begin + FIXED_TOKENS)
            seen = seen_keys(call, padded, tokens, split)
            bias = score_bias(call, padded, tokens, split, seen, key.dtype)
            rows = padded.rows[begin : tokens.stop]
            part = attend_tile(call, written_out, rows, key, value, seen, bias)
            states[tile] = merge_two(states[tile], part)
    for begin, state in zip(begins, states, strict=True):
        out, lse = add_sinks(call, state)
        real = slice(max(lead - begin, 0), lead + num_tokens - begin)
        yield begin + real.start - lead, State(out[real], lse[real])


def _padded_queries(queries: Queries, lead: int, tail: int) -> Queries:
    rows = F.pad(queries.rows, (0, 0, 0, 0, lead, tail))
    mask = queries.draft_mask
    if mask is not None:  # the keys of the lead are earlier ones, which all new tokens see
        mask = F.pad(mask, (lead, 0, lead, tail), value=True)
    return Queries(rows, queries.position - lead, queries.seq_len, mask)


def _padded_keys(pages: Pages, seq: int, split: range, keys: range) -> tuple[Tensor, Tensor]:
    """K and V of the split in float32, zeros for what lies outside `keys`."""
    sides: list[Tensor] = []
    for piece in pages.pieces(seq, max(split.start, keys.start), min(split.stop, keys.stop)):
        first = piece.start - split.start
        for i, x in enumerate((piece.key, piece.value)):
            if len(sides) <= i:
                sides.append(x.new_zeros((len(split), *x.shape[1:]), dtype=torch.float32))
            sides[i][first : first + len(x)] = x
    return sides[0], sides[1]
