"""What the torch backend does in one call, as far as lengths and block ids decide it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ._known import known_of
from ._pages import is_joinable
from ._short import Group, make_group, short_groups
from .options import AttentionCall


class Plan(NamedTuple):
    """All layers of a step that agree in their options share one."""

    starts: Sequence[int]  # first query row of each sequence, and where the last ends
    query_lens: list[int]
    keys: list[range]  # of each sequence, that its queries have yet to see
    shares_prefix: bool  # all rows see the common prefix at once, before these
    groups: list[Group]
    alone: list[int]  # sequences that are in no group


def plan_of(call: AttentionCall) -> Plan:
    """The plan that the last call left, or a new one."""
    return known_of(call).once(_options(call), lambda: _make(call))


def _options(call: AttentionCall) -> Hashable:
    """All that a plan depends on but the numbers."""
    bias = call.draft_mask is not None, call.alibi_slopes is not None
    prefix_and_splits = call.common_prefix_len, call.num_splits, call.split_size
    cache = call.dims, call.key_cache.dtype, is_joinable(call), call.query.device
    return ("plan", call.variant, *bias, *prefix_and_splits, *cache)


def _make(call: AttentionCall) -> Plan:
    lengths = call.seq_lens.tolist()
    starts: Sequence[int] = range(len(lengths) + 1)
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    query_lens = [b - a for a, b in pairwise(starts)]
    shares_prefix = starts[-1] > 0 and call.reads_prefix_once
    begin = call.common_prefix_len if shares_prefix else 0
    keys = [_keys(call, begin, n, q) for n, q in zip(lengths, query_lens, strict=True)]
    groups = [make_group(call, seqs, starts, keys) for seqs in short_groups(call, query_lens, keys)]
    rest = {seq for seq, query_len in enumerate(query_lens) if query_len > 0}
    alone = sorted(rest.difference(*(group.seqs for group in groups)))
    return Plan(starts, query_lens, keys, shares_prefix, groups, alone)


def _keys(call: AttentionCall, begin: int, seq_len: int, query_len: int) -> range:
    """What the queries of a sequence have yet to see: from `begin`, or from the first's window."""
    if call.variant.sliding_window is not None:
        begin = max(begin, seq_len - query_len - call.variant.sliding_window + 1)
    return range(begin, seq_len)
