"""The reference against what can be worked out by hand, and against torch's own attention."""

import math

import pytest
import torch
from paged_kernels.options import Variant
from paged_kernels.reference import dense_attend, visible
from paged_kernels.testing import assert_close, make_batch, validated_call


def picture(query_len, seq_len, draft_mask=None, **variant):
    query_pos = torch.arange(seq_len - query_len, seq_len)
    seen = visible(query_pos, torch.arange(seq_len), Variant(**variant), draft_mask)
    return ["".join(map(str, row)) for row in seen.int().tolist()]


def test_causal_is_bottom_right():
    assert picture(3, 5) == ["11100", "11110", "11111"]
    assert picture(5, 3) == ["000", "000", "100", "110", "111"]


def test_a_window_bounds_the_past_and_causal_the_future():
    assert picture(3, 5, sliding_window=2) == ["01100", "00110", "00011"]
    assert picture(3, 5, sliding_window=2, causal=False) == ["01111", "00111", "00011"]
    assert picture(2, 3, causal=False) == ["111", "111"]


def test_a_draft_mask_rules_among_the_new_tokens():
    mask = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]]).bool()
    assert picture(3, 5, mask) == ["11101", "11010", "11111"]
    assert picture(3, 5, mask, causal=False) == ["11101", "11010", "11111"]
    assert picture(3, 5, mask, sliding_window=3) == ["11101", "01010", "00111"]


def test_scores_are_scaled_capped_biased_and_normalised_in_that_order():
    batch = make_batch([2], num_heads=1, num_kv_heads=1)
    tokens = (batch.slots // 16, batch.slots % 16)
    batch.query.fill_(1.0)
    batch.key_cache[tokens] = torch.tensor([1.0, 2.0])[:, None, None]
    batch.value_cache[tokens] = torch.tensor([0.0, 1.0])[:, None, None]
    call = validated_call(
        **batch.arguments(
            scale=0.25, softcap=5.0, alibi_slopes=torch.tensor([0.5]), sinks=torch.tensor([3.0])
        )
    )
    out, lse = dense_attend(call, torch.float64)
    first = math.exp(5 * math.tanh(16 * 0.25 / 5) - 0.5)
    second = math.exp(5 * math.tanh(32 * 0.25 / 5))
    total = first + second + math.exp(3.0)
    assert out.flatten().tolist() == pytest.approx([second / total] * 16, rel=1e-12)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_torch_attention(causal):
    batch = make_batch([12], [12], num_heads=6, num_kv_heads=2, head_dim=32, head_dim_v=16)
    out = batch.attend(causal=causal, backend="reference")
    query, key, value = (x.transpose(0, 1).double() for x in (batch.query, batch.key, batch.value))
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 0), value.repeat_interleave(3, 0), is_causal=causal
    )
    torch.testing.assert_close(out.double(), want.transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_softmax_and_its_log_sum_are_computed_in_float64():
    batch = make_batch([3, 50])
    batch.query.mul_(1000)  # scores in the thousands: exp alone would overflow
    call = validated_call(**batch.arguments())
    out, lse = dense_attend(call, torch.float64)
    assert out.dtype == lse.dtype == torch.float64
    assert out.isfinite().all() and lse.max() > 1000


def test_the_tolerance_refuses_what_is_wrong():
    exact = torch.linspace(1, 2, 8, dtype=torch.float64)
    eager = exact.float()
    assert_close(exact.float(), exact, eager)
    for change in (1e-4, float("nan"), float("inf")):
        wrong = exact.float()
        wrong[3] += change
        with pytest.raises(AssertionError, match="output: "):
            assert_close(wrong, exact, eager)
    empty = torch.tensor([float("-inf"), 1.0], dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([0.0, 1.0]), empty, empty.float())


def test_the_tolerance_grows_with_the_error_of_eager_sums():
    exact = torch.ones(4, dtype=torch.float64)
    eager = exact + torch.tensor([0.0, 0.01, 0.0, 0.0], dtype=torch.float64)
    assert_close(torch.full((4,), 1.014), exact, eager)
    with pytest.raises(AssertionError, match="is granted"):
        assert_close(torch.full((4,), 1.016), exact, eager)
