"""Decodes of short sequences, several at a time.

Alone, each would cost more in Python and in waking threads than in arithmetic. Sequences of about
the same length are read as one rectangle of keys, slot by slot: a shorter one repeats its own last
key in place of those it lacks, which a mask hides, so that no slot is read that no token owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._pages import GATHER_BYTES, Pages, token_bytes
from ._rows import can_flash, flash
from .merge_states import State
from .options import AttentionCall

SHORT_BYTES = 1 << 20  # of K; longer sequences keep the machine busy one by one
GROUP_BYTES = GATHER_BYTES  # of K


def short_groups(
    call: AttentionCall, pages: Pages, query_lens: Sequence[int], keys: Sequence[range]
) -> Iterator[list[int]]:
    """The decodes that are worth it, in groups whose shortest has at least half the longest's keys."""
    one_by_one = call.num_splits is not None or call.split_size is not None
    own_bias = call.draft_mask is not None or call.alibi_slopes is not None
    if one_by_one or own_bias or not (pages.joinable and can_flash(call)):
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


def attend_group(
    call: AttentionCall, pages: Pages, query: Tensor, seqs: list[int], keys: list[range]
) -> State:
    """Attention of `query` [len(seqs), num_heads, head_dim], one row a sequence, over its keys."""
    device = query.device
    first = torch.tensor([r.start for r in keys], device=device)[:, None]
    last = torch.tensor([r.stop - 1 for r in keys], device=device)[:, None]
    longest = max(map(len, keys))
    position = first + torch.arange(longest, device=device)
    key, value = pages.rectangle(seqs, torch.minimum(position, last))
    bias = None
    if min(map(len, keys)) < longest:
        bias = torch.zeros((), dtype=key.dtype).where(position <= last, float("-inf"))
        bias = bias[:, None, None]
    rows = query.view(len(seqs), key.shape[2], -1, query.shape[2]).to(key.dtype)
    return flash(call, rows, key.transpose(1, 2), value.transpose(1, 2), bias)
