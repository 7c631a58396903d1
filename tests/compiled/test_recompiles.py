"""Sizes that change from step to step do not compile a kernel anew."""

import pytest
import torch
from paged_kernels import aot
from paged_kernels.copy_kernel import plan_copy
from paged_kernels.testing import validated_call
from paged_kernels.triton_backend import plan, plan_write

HEADS, KV_HEADS, WIDTH, BLOCK = 8, 2, 64, 16
CACHE = torch.zeros(64, BLOCK, KV_HEADS, WIDTH, dtype=torch.bfloat16)


def attention(num_seqs, query_len, seq_len, table_width, offset=0, **options):
    """The launches for `num_seqs` equal sequences; rows and tables start `offset` elements on."""
    tokens = num_seqs * query_len
    query = torch.zeros(tokens + offset, HEADS, WIDTH, dtype=torch.bfloat16)[offset:]
    table = torch.zeros(num_seqs + offset, table_width, dtype=torch.int32)[offset:]
    lens = torch.full((num_seqs + offset,), seq_len, dtype=torch.int32)[offset:]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
    return plan(
        validated_call(
            query=query,
            key_cache=CACHE,
            value_cache=CACHE,
            block_table=table,
            seq_lens=lens,
            cu_seqlens_q=None if query_len == 1 else starts,
            max_query_len=query_len,
            max_seq_len=min(seq_len, table_width * BLOCK),
            **options,
        )
    )


SIZES = [
    *((num_seqs, 100, 8) for num_seqs in range(1, 65)),
    *((3, seq_len, 20) for seq_len in range(1, 301)),
    *((3, 10, width) for width in (3, 4, 8, 16, 17, 48, 100, 1000, 1024, 4095, 4096)),
]
NARROW = [(3, 10, 1), (3, 20, 2)]


def number_compiled(launch_lists):
    """How many kernels the launches take, by kernel name."""
    compiled = {}
    for launch in (launch for launches in launch_lists for launch in launches):
        kernel = aot.compiled(launch, "sm_90")
        compiled.setdefault(launch.kernel.__name__, set()).add(kernel.hash)
    return {name: len(hashes) for name, hashes in compiled.items()}


@pytest.mark.parametrize(
    ("query_len", "options"),
    [(1, {"num_splits": 1}), (1, {"num_splits": 4}), (1, {"split_size": 64}), (3, {}), (40, {})],
    ids=["decode", "split decode", "fixed splits", "drafts", "prefill"],
)
def test_one_compile_serves_all_batches_lengths_and_table_widths(query_len, options):
    calls = (
        attention(num_seqs, query_len, max(seq_len, query_len), width, **options)
        for num_seqs, seq_len, width in (SIZES if query_len > 3 else SIZES + NARROW)
    )
    counts = number_compiled(calls)
    # a mixed batch has a kernel for each of its phases
    assert counts.pop("attention_kernel") == (2 if query_len == 40 else 1)
    assert all(count == 1 for count in counts.values())


def test_misaligned_rows_compile_at_most_three_times():
    calls = [attention(4, 1, 100, 8, offset, num_splits=1) for offset in (0, 1, 2, 3, 4, 8, 5)]
    assert number_compiled(calls)["attention_kernel"] <= 3


def test_one_compile_serves_all_writes_and_copies():
    def write(tokens, first=0):
        new = torch.zeros(tokens, KV_HEADS, WIDTH, dtype=torch.bfloat16)
        return [plan_write(new, new, CACHE, CACHE, torch.arange(tokens + first)[first:])]

    pairs = [torch.tensor([[i, 63 - i] for i in range(n)]) for n in range(1, 20)]
    copies = [[plan_copy([CACHE] * layers, p)] for layers in (1, 2, 40) for p in pairs]
    counts = number_compiled([*(write(tokens) for tokens in range(1, 65)), *copies])
    assert counts == {"write_kernel": 1, "copy_kernel": 1}
    assert number_compiled([write(4), write(4, 1), write(4, 3)])["write_kernel"] <= 3
