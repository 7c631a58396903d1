"""Combine the parts of split attention: out = sum_i w[i] part[i],  w = softmax over the parts' lse.

One program per output row and head, folding the parts one after the other: parts that hold no key
change no bit, so a result does not depend on how many of them there are.
"""

import triton
import triton.language as tl

from ._tile import LN2, LOG2E, at


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    out, lse, parts, part_lse, num_parts, cu_seqlens_q, sinks,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = row
    if cu_seqlens_q is not None:  # row is token row % TOKENS of sequence row // TOKENS
        first = tl.load(cu_seqlens_q + row // TOKENS).to(tl.int64)
        query_len = tl.load(cu_seqlens_q + row // TOKENS + 1) - first
        token = first + row % TOKENS
        if (row % TOKENS >= query_len) | (query_len > TOKENS):
            return

    if sinks is None:
        sink = tl.full((), float("-inf"), tl.float32)
    else:
        sink = tl.load(sinks + head).to(tl.float32)
    m = sink
    wide = tl.full((), 0, tl.int64)  # parts times their stride can pass 2**31
    for part in range(num_parts):
        m = tl.maximum(m, tl.load(at(part_lse, (wide + part, row, head))))
    pivot = tl.where(m == float("-inf"), 0.0, m)

    column = tl.arange(0, PADDED)
    acc = tl.zeros((PADDED,), tl.float32)
    total = tl.exp2((sink - pivot) * LOG2E)
    for part in range(num_parts):
        weight = tl.exp2((tl.load(at(part_lse, (wide + part, row, head))) - pivot) * LOG2E)
        width = tl.where(weight > 0, WIDTH, 0)  # an empty part is not read
        values = at(parts, (wide + part, row, head, column))
        acc += weight * tl.load(values, mask=column < width, other=0.0)
        total += weight
    total = tl.where(total == 0.0, 1.0, total)  # nothing seen at all: m is -inf
    tl.store(at(out, (token, head, column)), acc / total, mask=column < WIDTH)
    if lse is not None:
        tl.store(at(lse, (token, head)), m + tl.log2(total) * LN2)
