"""Decodes of short sequences, several at a time.

Alone, each would cost more in Python and in waking threads than in arithmetic. Sequences of about
the same length are read as one rectangle of keys, slot by slot: a shorter one repeats its own last
key in place of those it lacks, which a mask hides, so that no slot is read that no token owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._pages import Pages
from ._rows import can_flash, flash
from .merge_states import State
from .options import AttentionCall

SHORT_BYTES = 1 << 20  # of K; longer sequences keep the machine busy one by one
GROUP_BYTES = 2 << 20  # of K; what one gather writes is still in cache when it is read


def short_groups(
    call: AttentionCall, pages: Pages, query_lens: Sequence[int], key_lens: Sequence[int]
) -> Iterator[list[int]]:
    """The decodes that are worth it, in groups whose shortest has at least half the longest's keys.

    `key_lens` counts the keys that a sequence's query reads.
    """
    one_by_one = call.num_splits is not None or call.split_size is not None
    own_mask = call.draft_mask is not None or call.alibi_slopes is not None
    if one_by_one or own_mask or not (pages.joinable and can_flash(call)):
        return
    token_bytes = call.key_cache[0, 0].nbytes
    short = [
        (key_len, seq)
        for seq, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True))
        if query_len == 1 and 0 < key_len * token_bytes <= SHORT_BYTES
    ]
    short.sort(reverse=True)
    group: list[int] = []
    for key_len, seq in short:
        longest = key_lens[group[0]] if group else key_len
        full = longest * (len(group) + 1) * token_bytes > GROUP_BYTES
        if group and (full or 2 * key_len < longest):
            yield group
            group = []
        group.append(seq)
    if group:
        yield group


def attend_group(
    call: AttentionCall,
    pages: Pages,
    query: Tensor,
    seqs: list[int],
    begins: list[int],
    ends: list[int],
) -> State:
    """Attention of `query` [len(seqs), num_heads, head_dim], one row a sequence, over its keys."""
    device = query.device
    first, last = (torch.tensor(x, device=device)[:, None] for x in (begins, [e - 1 for e in ends]))
    longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
    position = first + torch.arange(longest, device=device)
    key, value = pages.rectangle(seqs, torch.minimum(position, last))
    bias = None
    if min(end - begin for begin, end in zip(begins, ends, strict=True)) < longest:
        bias = torch.zeros((), dtype=key.dtype).where(position <= last, float("-inf"))[
            :, None, None
        ]
    rows = query.unflatten(1, (key.shape[2], -1)).to(key.dtype)
    out, lse = flash(call, rows, key.transpose(1, 2), value.transpose(1, 2), bias)
    return State(out.flatten(1, 2), lse.flatten(1, 2))
