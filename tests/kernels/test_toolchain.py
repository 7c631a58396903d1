"""What the tests rely on in the interpreter: if Triton changes it, this says so first."""

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import BACKENDS
from paged_kernels.testing import assert_matches_reference, make_batch


@triton.jit
def copy_masked(out, x, n, OTHER: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=OTHER))


def test_masked_loads_return_the_other_value():
    x = torch.arange(16.0)
    for other in (0.0, float("-inf")):
        out = torch.zeros(16)
        copy_masked[(1,)](out, x, 3, OTHER=other)
        assert out.tolist() == [0, 1, 2, *[other] * 13]


@triton.jit
def load_far(out, x, offset):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.load(x + offset + i, mask=i < 0, other=7.0))


def test_masked_off_addresses_are_not_touched():
    out = torch.zeros(16)
    load_far[(1,)](out, torch.zeros(1), 2**40)
    assert (out == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_lens", [None, [2, 17]])
def test_bfloat16_is_not_garbage_in_the_interpreter(backend, query_lens):
    # Its dot product and arithmetic work on bit patterns there, unless a kernel widens first.
    batch = make_batch([5, 40], query_lens, dtype=torch.bfloat16, head_dim=64)
    assert_matches_reference(batch, backend, softcap=5.0)
    assert batch.attend(backend=backend).abs().max() < 5
