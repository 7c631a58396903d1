"""Caches, queries and outputs whose elements lie past 2^31: run as a script, by its test.

Tensors are sparse files, of which only what is touched takes room. Code that computes offsets in 32
bits ends the process here, which is why this is not run inside pytest.
"""

import sys
import tempfile
from pathlib import Path

import torch
from paged_kernels import paged_attention, reshape_and_cache
from paged_kernels._launch import Strided
from paged_kernels.testing import validated_call

PAST = 2**31  # elements
HEADS, WIDTH = 2, 16


def reserve(*shape, dtype=torch.float16):
    """A tensor of zeros that takes no memory before it is written."""
    size = torch.Size(shape).numel()
    with tempfile.TemporaryDirectory() as folder:  # the mapping outlives the name
        file = str(Path(folder) / "sparse")
        return torch.from_file(file, shared=True, size=size, dtype=dtype).view(shape)


def far_cache(block_size=128):
    """A cache of more than 2^31 elements, of which only the last blocks are written: V = K."""
    block = block_size * HEADS * WIDTH
    num_blocks = PAST // block + 3
    return reserve(num_blocks, block_size, HEADS, WIDTH)


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
    far = reserve(PAST + 4096)
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
    cache = reserve(slot // 16 + 2, 16, 1, width)
    cache.view(-1, width)[[0, slot - 1, slot + 1]] = 7
    row = torch.arange(width, dtype=torch.float16).view(1, 1, width)
    for slots in (torch.tensor([slot]), torch.tensor([slot], dtype=torch.int32)):
        cache.view(-1, width)[slot] = 7
        reshape_and_cache(row, row, cache, cache, slots, backend=backend)
        assert torch.equal(cache.view(-1, width)[slot], row.view(-1)), "write"
        assert (cache.view(-1, width)[[0, slot - 1, slot + 1]] == 7).all(), "write beside"


def check_parts():
    """Partial results of a split decode 2^30 elements apart, written and merged."""
    from paged_kernels import triton_backend

    cache = torch.zeros(8, 16, 1, WIDTH)
    for block in range(8):
        cache[block] = block
    query = torch.zeros(1, 1, WIDTH)
    table, seq_lens = torch.arange(8, dtype=torch.int32)[None], torch.tensor([48])
    call = validated_call(
        query=query, key_cache=cache, value_cache=cache, block_table=table, seq_lens=seq_lens,
        num_splits=3,
    )  # fmt: skip
    attention, merge = triton_backend.plan(call)
    parts = reserve(3, 2**30, dtype=torch.float32)[:, :WIDTH].unflatten(1, (1, 1, WIDTH))
    far = Strided(parts, parts.stride())
    attention._replace(args=(far, *attention.args[1:])).run()
    assert parts[:, 0, 0, 0].tolist() == [0, 1, 2]
    merge._replace(args=(*merge.args[:2], far, *merge.args[3:])).run()
    assert (call.out - 1).abs().max() < 1e-6


def check_scales(backend):
    """int8 scales 2^30 elements apart from block to block, written and read."""
    cache = torch.zeros(3, 16, 1, WIDTH, dtype=torch.int8)
    planes = reserve(PAST + 4096, dtype=torch.float32)
    k_scale = planes.as_strided((3, 16, 1), (2**30, 1, 1))
    v_scale = planes.as_strided((3, 16, 1), (2**30, 1, 1), 1024)
    rows = torch.full((1, 1, WIDTH), 127 * 3.0)
    scales = {"k_scale": k_scale, "v_scale": v_scale, "backend": backend}
    reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor([32]), **scales)
    assert k_scale[2, 0, 0] == v_scale[2, 0, 0] == 3.0, "write"
    table, lens = torch.tensor([[2]]), torch.tensor([1])
    out = paged_attention(torch.zeros(1, 1, WIDTH), cache, cache, table, lens, **scales)
    assert (out == 127 * 3.0).all(), "read"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "triton":
        check_parts()
    for check in (check_attention, check_rows, check_write, check_scales):
        print(check.__name__, flush=True)
        check(sys.argv[1])
    print("done")
