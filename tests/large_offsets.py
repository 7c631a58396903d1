"""Caches, queries and outputs whose elements lie past 2^31: run as a script, by its test.

Memory is reserved and hardly touched, so gigabytes of it cost next to nothing. Code that computes
offsets in 32 bits ends the process here, which is why this is not run inside pytest.
"""

import sys

import torch

from paged_kernels import paged_attention, reshape_and_cache

PAST = 2**31  # elements
HEADS, WIDTH = 2, 16


def far_cache(block_size=128):
    """A cache of more than 2^31 elements, of which only the last blocks are written: V = K."""
    block = block_size * HEADS * WIDTH
    num_blocks = PAST // block + 3
    return torch.empty(num_blocks, block_size, HEADS, WIDTH, dtype=torch.float16)


def counting(cache, block_ids, num_tokens):
    """Value i at position i of a sequence in `block_ids`."""
    block_size = cache.shape[1]
    for position in range(num_tokens):
        cache[block_ids[position // block_size], position % block_size] = position
    return torch.tensor([block_ids], dtype=torch.int32), torch.tensor([num_tokens])


def check_attention(backend):
    cache = far_cache()
    last = len(cache) - 1
    table, seq_lens = counting(cache, [last, last - 1], 200)
    query = torch.zeros(3, HEADS, WIDTH, dtype=torch.float16)
    for name, num_splits in (("decode", 1), ("split decode", 3)):
        out = paged_attention(
            query[:1], cache, cache, table, seq_lens, num_splits=num_splits, backend=backend
        )
        assert (out - 99.5).abs().max() < 0.1, name
    out = paged_attention(
        query, cache, cache, table, seq_lens,
        cu_seqlens_q=torch.tensor([0, 3]), max_seq_len=200, backend=backend,
    )  # fmt: skip
    want = torch.tensor([98.5, 99.0, 99.5])[:, None, None]
    assert (out - want).abs().max() < 0.1, "prefill"


def check_rows(backend):
    """Query and output rows 2^30 elements apart."""
    cache = torch.ones(1, 16, HEADS, WIDTH, dtype=torch.float16)
    far = torch.empty(PAST + 4096, dtype=torch.float16)
    query = far.as_strided((3, HEADS, WIDTH), (2**30, WIDTH, 1))
    out = far.as_strided((3, HEADS, WIDTH), (2**30, WIDTH, 1), 1024)
    query.zero_()
    table, lens = torch.zeros(3, 1, dtype=torch.int32), torch.full((3,), 5)
    starts = torch.arange(4)
    for options in ({}, {"num_splits": 2}, {"cu_seqlens_q": starts}):
        out.zero_()
        paged_attention(query, cache, cache, table, lens, out=out, backend=backend, **options)
        assert (out == 1).all(), f"rows {options}"


def check_write(backend):
    width, slot = 576, 3_728_300  # slot * width passes 2^31 at slot 3,728,271
    cache = torch.empty(slot // 16 + 2, 16, 1, width, dtype=torch.float16)
    cache.view(-1, width)[[0, slot - 1, slot + 1]] = 7
    row = torch.arange(width, dtype=torch.float16).view(1, 1, width)
    for slots in (torch.tensor([slot]), torch.tensor([slot], dtype=torch.int32)):
        cache.view(-1, width)[slot] = 7
        reshape_and_cache(row, row, cache, cache, slots, backend=backend)
        assert torch.equal(cache.view(-1, width)[slot], row.view(-1)), "write"
        assert (cache.view(-1, width)[[0, slot - 1, slot + 1]] == 7).all(), "write beside"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in (check_attention, check_rows, check_write):
        print(check.__name__, flush=True)
        check(sys.argv[1])
    print("done")
