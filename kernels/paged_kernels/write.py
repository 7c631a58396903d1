"""reshape_and_cache: scatter new keys and values into their slots, one program per token.

slot = slot_mapping[token];  cache[slot // B, slot % B] = new[token]   unless slot is -1
"""

import triton
import triton.language as tl

from ._tile import at


@triton.jit
def scatter(cache, new, token, slot, head, rows, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy heads `head` of one token to its slot."""
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    mask = rows & (column < WIDTH)
    values = tl.load(at(new, (token, head, column)), mask=mask)
    tl.store(at(cache, (slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, column)), values, mask=mask)


@triton.jit
def write_kernel(
    key_cache, value_cache, key, value, slot_mapping, DIMS: tl.constexpr, HEADS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    rows = head < DIMS.num_kv_heads
    scatter(key_cache, key, token, slot, head, rows, DIMS.block_size, DIMS.head_dim)
    scatter(value_cache, value, token, slot, head, rows, DIMS.block_size, DIMS.head_dim_v)
