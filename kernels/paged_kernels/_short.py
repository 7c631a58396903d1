"""Decodes of short sequences, several at a time.

Alone, each would cost more in Python and in waking threads than in arithmetic. Sequences of about
the same length are read as one rectangle of keys, slot by slot: a shorter one repeats its own last
key in place of those it lacks, which a mask hides, so that no slot is read that no token owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._pages import GATHER_BYTES, Pages, is_joinable, read_dtype, token_bytes
from ._rows import can_flash, flash
from .merge_states import State
from .options import AttentionCall

SHORT_BYTES = 1 << 20  # of K; longer sequences keep the machine busy one by one
GROUP_BYTES = GATHER_BYTES  # of K


class Group(NamedTuple):
    """Sequences that are read together."""

    seqs: list[int]
    rows: Tensor  # int64 [len(seqs)], of the query
    slots: Tensor  # int64 [len(seqs) * most keys]
    bias: Tensor | None  # [len(seqs), 1, 1, most keys]: -inf for repeated keys, if there are any


def short_groups(
    call: AttentionCall, query_lens: Sequence[int], keys: Sequence[range]
) -> Iterator[list[int]]:
    """The decodes that are worth it, in groups whose shortest has at least half the longest's keys."""
    own_bias = call.draft_mask is not None or call.alibi_slopes is not None
    if call.fixes_splits or own_bias or not (is_joinable(call) and can_flash(call)):
        return
    most = GROUP_BYTES // token_bytes(call)  # keys in a group
    limit = SHORT_BYTES // token_bytes(call)
    short = [seq for seq, q in enumerate(query_lens) if q == 1 and 0 < len(keys[seq]) <= limit]
    short.sort(key=lambda seq: len(keys[seq]), reverse=True)
    group: list[int] = []
    for seq in short:
        if group:
            longest = len(keys[group[0]])
            full = longest * (len(group) + 1) > most
            if full or 2 * len(keys[seq]) < longest:
                yield group
                group = []
        group.append(seq)
    if group:
        yield group


def make_group(
    call: AttentionCall, seqs: list[int], starts: Sequence[int], keys: Sequence[range]
) -> Group:
    """Where the keys of each sequence lie; its query is row `starts[seq]`."""
    first = np.array([[keys[seq].start] for seq in seqs])
    last = np.array([[keys[seq].stop - 1] for seq in seqs])
    position = first + np.arange(max(len(keys[seq]) for seq in seqs))
    own = np.minimum(position, last)
    size = call.dims.block_size
    blocks = call.block_table.cpu().numpy()[np.array(seqs)[:, None], own // size]
    slots = blocks.astype(np.int64) * size + own % size
    device, bias = call.query.device, None
    if (position > last).any():
        hidden = torch.tensor(position > last, device=device)[:, None, None]
        bias = torch.zeros(hidden.shape, dtype=read_dtype(call.key_cache), device=device)
        bias.masked_fill_(hidden, float("-inf"))
    rows = torch.tensor([starts[seq] for seq in seqs], device=device)
    return Group(seqs, rows, torch.tensor(slots.ravel(), device=device), bias)


def attend_group(call: AttentionCall, pages: Pages, group: Group) -> State:
    """Attention of one row of each sequence over its keys."""
    query = call.query[group.rows]
    key, value = (
        x.view(len(query), -1, *x.shape[1:]).transpose(1, 2) for x in pages.slots(group.slots)
    )
    rows = query.view(len(query), key.shape[1], -1, query.shape[2]).to(key.dtype)
    return flash(call, rows, key, value, group.bias)
