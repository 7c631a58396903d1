"""Paged attention, decode and prefill: one kernel, two tile shapes.

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j],  k[j] = key_cache[block_table[j // B], j % B]

FlashAttention-2's loop (arXiv 2307.08691) over keys that a block table scatters (arXiv 2309.06180):

    program = (query tile, KV head, split); a query tile is TILE.m // group_size tokens of a sequence
    find the sequence and its query rows; keys = what those rows may see, cut to this split
    for each key tile:  ids = block_table[tile];  K, V = cache[ids];  fold softmax(Q K^T) V
    first tiles that only some rows see (window), then whole ones unmasked, then the causal edge
    divide by the denominator, store the output and its log-sum-exp

A sequence whose query fits one decode tile is a decode, whatever else is in the batch: it may be
split along its keys, and `merge.py` combines the parts. The others are prefills. A mixed batch is
one launch of each, in which a program whose sequence belongs to the other returns at once.
"""

import triton
import triton.language as tl

from ._tile import INTERPRETED, Queries, at, attend, finish, load_rows


@triton.jit
def find_tile(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """(sequence, first token) of a query tile, when sequence i starts at tile cu[i] // TOKENS + i."""
    low, high = tl.full((), 0, tl.int32), num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle).to(tl.int32) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    first_tile = tl.load(cu_seqlens_q + low).to(tl.int32) // TOKENS + low
    return low, (tile - first_tile) * TOKENS


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "first_key", "split_size"])
def attention_kernel(
    out, lse, q, kv, block_table, table_stride, seq_lens, cu_seqlens_q, num_seqs,
    extras, scale, out_scale, first_key, split_size,
    DIMS: tl.constexpr, VARIANT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = DIMS.group_size
    TOKENS: tl.constexpr = TILE.m // GROUP
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)

    # the query rows
    if ROWS.prefill:
        seq, start = find_tile(cu_seqlens_q, tl.program_id(0), num_seqs, TOKENS)
    else:
        seq, start = tl.program_id(0), 0
    seq = seq.to(tl.int64)
    if cu_seqlens_q is None:
        first_token, query_len = seq, 1
    else:
        first_token = tl.load(cu_seqlens_q + seq).to(tl.int64)
        query_len = (tl.load(cu_seqlens_q + seq + 1) - first_token).to(tl.int32)
        if (start >= query_len) | (query_len < ROWS.shortest) | (query_len > ROWS.longest):
            return
    row = tl.arange(0, TILE.m)
    token = start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    rows = (token < query_len) & (row < TOKENS * GROUP)

    # the keys that some row sees, [first, end), and those that every row sees
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    context_len = seq_len - query_len
    first_pos, end_pos = context_len + start, context_len + tl.minimum(start + TOKENS, query_len)
    first, end, whole_first, whole_end = first_key, seq_len, first_key, seq_len
    if extras.draft_mask is not None:
        whole_end = tl.maximum(context_len, 0)
    elif VARIANT.causal:
        end, whole_end = end_pos, tl.maximum(first_pos + 1, 0)
    if VARIANT.sliding_window is not None:
        first = tl.maximum(first_key, first_pos + 1 - VARIANT.sliding_window)
        whole_first = tl.maximum(first_key, end_pos - VARIANT.sliding_window)

    # the part of them that belongs to this split; splits meet at tile boundaries
    base = first // TILE.n * TILE.n
    if split_size == 0:
        split_size = tl.cdiv(tl.cdiv(end - base, tl.num_programs(2)), TILE.n) * TILE.n
    start_of_split = (base + split * split_size).to(tl.int32)
    first = tl.maximum(first, start_of_split)
    end = tl.minimum(end, start_of_split + split_size)
    keys = (first, end)
    whole = (tl.maximum(first, whole_first), tl.minimum(end, whole_end))

    tile = load_rows(
        q, ((first_token + token)[:, None], head[:, None]), rows, DIMS.head_dim, TILE.d, True
    )
    if INTERPRETED:
        tile = tile.to(tl.float32)
    slope, draft = None, None
    if extras.alibi_slopes is not None:
        slope = tl.load(extras.alibi_slopes + head, mask=rows, other=0.0)
    if extras.draft_mask is not None:
        draft = at(extras.draft_mask, (seq, tl.where(rows, token, 0), 0))
    queries = Queries(tile, context_len + token, context_len, query_len, slope, draft)
    table = block_table + seq * table_stride
    state = attend(queries, kv, table, kv_head, scale, keys, whole, DIMS, VARIANT, TILE)
    o, natural_lse = finish(state, extras.sinks, head, rows)

    out_row = first_token + token if ROWS.packed else seq * ROWS.longest + token
    dv = tl.arange(0, TILE.dv)[None, :]
    out_mask = rows[:, None] & (dv < DIMS.head_dim_v)
    tl.store(at(out, (split, out_row[:, None], head[:, None], dv)), o * out_scale, mask=out_mask)
    if lse is not None:
        tl.store(at(lse, (split, out_row, head)), natural_lse, mask=rows)
