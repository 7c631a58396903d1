"""Device code that the attention kernels share: addressing, loading, scoring, online softmax.

A tile row is one (query token, head of the group) pair, so grouped-query attention is no special
case. Inside, softmax runs in base 2, because `exp2` is one instruction: scores carry the factor
log2(e) from the start. Natural logarithms are what leaves a kernel.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The interpreter multiplies the bit patterns of bfloat16, so there queries, and with them all dot
# operands, are widened to float32. It is the one difference from the compiled kernels.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Queries(NamedTuple):
    """The rows of one query tile."""

    tile: tl.tensor  # [M, D]
    pos: tl.tensor  # [M], positions in the sequence
    context_len: tl.tensor  # position of the first query token of the sequence
    query_len: tl.tensor
    slope: tl.tensor | None  # [M], of ALiBi
    draft: tl.tensor | None  # [M], pointers to the rows of the draft mask


@triton.jit
def at(x, index):
    """Address of the element (or tile of elements) `index` of the strided tensor `x`."""
    offset = 0
    for axis in tl.static_range(len(index)):
        offset += index[axis] * x.strides[axis]
    return x.ptr + offset


@triton.jit
def load_rows(x, index, rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Load rows `index` of x as a [rows, PADDED] tile: 0 past WIDTH and, if MASKED, outside `rows`."""
    column = tl.arange(0, PADDED)[None, :]
    pointers = at(x, index + (column,))  # noqa: RUF005  (Triton compiles no starred tuple)
    if MASKED:
        tile = tl.load(pointers, mask=rows[:, None] & (column < WIDTH), other=0.0)
    elif PADDED > WIDTH:
        tile = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def tanh(x):
    """Exact to float32: by exponentials, and near 0, where those cancel, by its series."""
    near = tl.abs(x) < 0.25
    y = tl.where(near, x, 0.0)
    yy = y * y
    series = y * (1 + yy * (-1 / 3 + yy * (2 / 15 + yy * (-17 / 315 + yy * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    size = (1 - e) / (1 + e)
    return tl.where(near, series, tl.where(x < 0, -size, size))


@triton.jit
def score(queries, k, scale, k_pos, exists, VARIANT: tl.constexpr, MASKED: tl.constexpr):
    """Base-2 scores [M, N]; scale may differ from key to key. If MASKED, unseen pairs are -inf."""
    s = tl.dot(queries.tile, tl.trans(k), input_precision="ieee")
    if VARIANT.softcap is not None:
        s = tanh(s * (scale / VARIANT.softcap)) * (VARIANT.softcap * LOG2E)
    else:
        s *= scale * LOG2E
    distance = k_pos[None, :] - queries.pos[:, None]
    if queries.slope is not None:
        s += (queries.slope * LOG2E)[:, None] * distance
    if MASKED:
        seen = exists[None, :]
        if queries.draft is not None:
            new = (k_pos - queries.context_len)[None, :]
            among = (new >= 0) & (new < queries.query_len)
            drafted = tl.load(queries.draft[:, None] + new, mask=among, other=0) != 0
            seen &= (new < 0) | drafted
        elif VARIANT.causal:
            seen &= distance <= 0
        if VARIANT.sliding_window is not None:
            seen &= distance > -VARIANT.sliding_window
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def online_softmax(state, s, v, v_scale):
    """Fold scores s [M, N] and values v [N, D] into the running (acc, max, denominator)."""
    acc, m, l = state
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: avoid inf - inf
    alpha = tl.exp2(m - pivot)
    p = tl.exp2(s - pivot[:, None])
    l = l * alpha + tl.sum(p, 1)
    acc *= alpha[:, None]
    if v_scale is None:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    else:  # relative to the largest, so that small scales do not make float16 weights vanish
        top = tl.max(v_scale, 0)
        top = tl.where(top > 0, top, 1.0)
        p *= (v_scale / top)[None, :]
        acc += top * tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, m_new, l


@triton.jit
def attend_tiles(
    state, queries, kv, table, kv_head, scale, keys, tiles,
    DIMS: tl.constexpr, VARIANT: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles starting in [tiles[0], tiles[1]), tiles[0] a multiple of TILE.n, into state.

    MASKED tiles may reach outside keys = [first, end), where nothing is loaded, and may hold pairs
    that the variant hides. Other tiles are seen whole by every row, and pay for no mask.
    """
    for start in tl.range(tiles[0], tiles[1], TILE.n):
        k_pos = start + tl.arange(0, TILE.n)
        exists = (k_pos >= keys[0]) & (k_pos < keys[1])
        if MASKED:
            block = tl.load(table + k_pos // DIMS.block_size, mask=exists, other=0)
        else:
            block = tl.load(table + k_pos // DIMS.block_size)
        block, slot = block.to(tl.int64), (k_pos % DIMS.block_size).to(tl.int64)
        row = (block[:, None], slot[:, None], kv_head)
        k = load_rows(kv.key, row, exists, DIMS.head_dim, TILE.d, MASKED)
        v = load_rows(kv.value, row, exists, DIMS.head_dim_v, TILE.dv, MASKED)
        # Stored values are exact in the dtype of the queries; scales join the scores and weights.
        k, v = k.to(queries.tile.dtype), v.to(queries.tile.dtype)
        k_scale, v_scale = scale, None
        if kv.key_scale is not None:
            plane = at(kv.key_scale, (block, slot, kv_head))
            k_scale = scale * tl.load(plane, mask=exists, other=0.0)[None, :]
        if kv.value_scale is not None:
            v_scale = tl.load(at(kv.value_scale, (block, slot, kv_head)), mask=exists, other=0.0)
        s = score(queries, k, k_scale, k_pos, exists, VARIANT, MASKED)
        state = online_softmax(state, s, v, v_scale)
    return state


@triton.jit
def attend(
    queries, kv, table, kv_head, scale, keys, whole,
    DIMS: tl.constexpr, VARIANT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of a query tile over keys = [first, end): (acc [M, D], max [M], denominator [M]).

    Every row sees all of whole = [first, end): the tiles inside it are the unmasked interior.
    """
    M: tl.constexpr = TILE.m
    DV: tl.constexpr = TILE.dv
    m = tl.full((M,), float("-inf"), tl.float32)
    state = (tl.zeros((M, DV), tl.float32), m, tl.zeros((M,), tl.float32))

    first = keys[0] // TILE.n * TILE.n
    inner = tl.minimum(tl.cdiv(whole[0], TILE.n) * TILE.n, tl.cdiv(keys[1], TILE.n) * TILE.n)
    outer = tl.maximum(inner, tl.minimum(whole[1], keys[1]) // TILE.n * TILE.n)
    if VARIANT.sliding_window is not None:
        state = attend_tiles(
            state, queries, kv, table, kv_head, scale, keys, (first, inner),
            DIMS, VARIANT, TILE, True,
        )  # fmt: skip
    state = attend_tiles(
        state, queries, kv, table, kv_head, scale, keys, (inner, outer),
        DIMS, VARIANT, TILE, False,
    )  # fmt: skip
    return attend_tiles(
        state, queries, kv, table, kv_head, scale, keys, (outer, keys[1]),
        DIMS, VARIANT, TILE, True,
    )  # fmt: skip


@triton.jit
def finish(state, sinks, head, rows):
    """Normalised output and natural lse. A sink joins the denominator, without a value."""
    acc, m, l = state
    if sinks is not None:
        sink = tl.load(sinks + head, mask=rows, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - pivot)
        acc, m, l = acc * alpha[:, None], m_new, l * alpha + tl.exp2(sink - pivot)
    l = tl.where(l == 0.0, 1.0, l)  # no key and no sink: output 0, and lse the -inf that m is
    return acc / l[:, None], (m + tl.log2(l)) * LN2
