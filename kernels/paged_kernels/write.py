"""reshape_and_cache: scatter new keys and values into their slots, one program per token.

    slot = slot_mapping[token];  cache[slot // B, slot % B] = new[token]   unless slot is -1

A quantised cache stores round(new / scale), saturated. fp8: the scale is given, a number or one
per head. int8: it is the head's largest magnitude / 127, found here and kept beside the values.
"""

import triton
import triton.language as tl

from ._tile import at

ROUND = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds a float32 to an integer


@triton.jit
def quantise_int8(values):
    """(int8 values, scale of each row). A NaN shows in the scale of its row."""
    is_nan = values != values
    values = tl.where(is_nan, 0.0, values)
    absmax = tl.max(tl.abs(values), 1)
    absmax = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), absmax)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # of a NaN scale
    rounded = (scaled + ROUND) - ROUND
    return tl.clamp(rounded, -128.0, 127.0).to(tl.int8), scale


@triton.jit
def fp8_bits(values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """The bytes of the nearest fp8 numbers, ties to even, saturated; NaN stays NaN.

    By hand, since what a cast does out of range, and in the interpreter in range, varies.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)  # normal number; below it the steps are even
    is_nan = values != values
    size = tl.where(is_nan, 0.0, tl.minimum(tl.abs(values), LIMIT))
    bits = size.to(tl.int32, bitcast=True)
    bits += (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)
    normal = (bits >> SHIFT) - ((127 - BIAS) << MANTISSA)
    steps = tl.minimum(size, SMALLEST) * (2**MANTISSA / SMALLEST)
    subnormal = ((steps + ROUND) - ROUND).to(tl.int32)
    byte = tl.where(size < SMALLEST, subnormal, normal)
    byte = tl.where(is_nan, 0x7F, byte)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (byte | sign).to(tl.uint8)


@triton.jit
def store_token(
    store, new, token, slot, head, DIMS: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr
):
    """Store some heads of one token in its slot."""
    block, offset = slot // DIMS.block_size, slot % DIMS.block_size
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    rows = head < DIMS.num_kv_heads
    mask = rows[:, None] & (column < WIDTH)
    values = tl.load(at(new, (token, head[:, None], column)), mask=mask, other=0.0)
    if STORED != "plain":
        values = values.to(tl.float32)
    if STORED == "int8":
        values, scale = quantise_int8(values)
        tl.store(at(store.scales, (block, offset, head)), scale, mask=rows)
    elif STORED != "plain":
        scale = tl.full(values.shape, 1.0, tl.float32) * store.scale
        if store.scales is not None:
            scale *= tl.load(at(store.scales, (block, offset, head)), mask=rows, other=1.0)[:, None]
        values = tl.div_rn(values, scale)
        if STORED == "float8_e4m3fn":
            values = fp8_bits(values, 3, 7, 448.0)
        else:
            values = fp8_bits(values, 2, 15, 57344.0)
    tl.store(at(store.cache, (block, offset, head[:, None], column)), values, mask=mask)


@triton.jit
def write_kernel(
    keys, values, key, value, slot_mapping,
    DIMS: tl.constexpr, HEADS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    store_token(keys, key, token, slot, head, DIMS, DIMS.head_dim, STORED)
    store_token(values, value, token, slot, head, DIMS, DIMS.head_dim_v, STORED)
