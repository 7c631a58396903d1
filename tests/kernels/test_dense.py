import itertools

import pytest
import torch
import torch.nn.functional as F
from paged_kernels.dense import dense_attention
from paged_kernels.reference import dense_attend
from paged_kernels.testing import assert_close, make_batch, validated_call

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "plain": {},
    "full": {"causal": False},
    "window": {"sliding_window": 5},
    "full window": {"causal": False, "sliding_window": 5},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 5, "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SLOPES},
}


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def dense(batch, **options):
    """Dense attention over what the cache of `batch` was written from."""
    cu_q = batch.cu_seqlens_q
    if cu_q is None:
        cu_q = torch.arange(len(batch.seq_lens) + 1, dtype=torch.int32)
    cu_k = starts(batch.seq_lens.tolist())
    return dense_attention(
        batch.query, batch.key, batch.value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options
    )


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("query_lens", [None, [1, 3, 0, 17, 9, 4]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_means_what_paged_attention_means(dtype, query_lens, option, return_lse):
    batch = make_batch(
        [30, 3, 5, 17, 7, 0], query_lens, dtype=dtype, padding_rows=2 if query_lens else 0
    )
    got = dense(batch, return_lse=return_lse, **OPTIONS[option])
    call = validated_call(**batch.arguments(**OPTIONS[option]))
    exact, exact_lse = dense_attend(call, torch.float64)
    eager, _ = dense_attend(call, dtype)
    _, eager_lse = dense_attend(call, torch.float32)
    if return_lse:
        assert_close(got[1], exact_lse, eager_lse, "lse")
        got = got[0]
    assert_close(got, exact, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_mask_replaces_causality_among_new_tokens(dtype):
    batch = make_batch([30, 9, 12], [5, 9, 1], dtype=dtype)
    mask = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    call = validated_call(**batch.arguments(draft_mask=mask))
    assert_close(
        dense(batch, draft_mask=mask),
        dense_attend(call, torch.float64)[0],
        dense_attend(call, dtype)[0],
    )


def test_values_may_be_narrower_than_keys():
    batch = make_batch([30, 9], [5, 9], head_dim=24, head_dim_v=8)
    torch.testing.assert_close(dense(batch), batch.attend(backend="reference"), rtol=0, atol=2e-6)


def test_fewer_queries_than_keys_are_aligned_bottom_right():
    key, value = torch.zeros(10, 1, 4), torch.arange(10.0).view(10, 1, 1)
    out = dense_attention(
        torch.zeros(3, 1, 4), key, value, cu_seqlens_q=starts([3]), cu_seqlens_k=starts([10])
    )
    assert out.flatten().tolist() == pytest.approx([3.5, 4.0, 4.5])


@pytest.mark.parametrize("sinks", [None, torch.full((4,), 2.0)])
def test_a_sequence_without_keys_gives_zeros(sinks):
    query, nothing = torch.randn(3, 4, 8), torch.empty(0, 2, 8)
    out, lse = dense_attention(
        query, nothing, nothing,
        cu_seqlens_q=starts([2]), cu_seqlens_k=starts([0]), sinks=sinks, return_lse=True,
    )  # fmt: skip
    assert (out == 0).all()
    assert (lse[:2] == (float("-inf") if sinks is None else 2.0)).all()
    assert (lse[2] == float("-inf")).all()


def sdpa_calls(monkeypatch, *args, **kwargs):
    calls = []
    sdpa = F.scaled_dot_product_attention

    def recording(*a, **k):
        calls.append(a[0].shape[0])
        return sdpa(*a, **k)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    dense(*args, **kwargs)
    return calls


def test_neighbours_of_equal_lengths_go_to_sdpa_together(monkeypatch):
    batch = make_batch([30, 30, 30, 7, 30])
    assert sdpa_calls(monkeypatch, batch) == [3, 1, 1]


@pytest.mark.parametrize("option", ["softcap", "sinks"])
def test_what_sdpa_cannot_do_is_written_out(monkeypatch, option):
    batch = make_batch([30, 7], [3, 7])
    assert sdpa_calls(monkeypatch, batch, **OPTIONS[option]) == []
    assert len(sdpa_calls(monkeypatch, batch)) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(4, 3, 8)}, ValueError, "multiple of the 2 KV heads"),
        ({"key": torch.zeros(6, 2, 4)}, ValueError, "key must be"),
        ({"value": torch.zeros(6, 1, 8)}, ValueError, "value must be"),
        ({"value": torch.zeros(6, 2, 8).half()}, TypeError, "value must be float32"),
        ({"cu_seqlens_q": starts([3, 2])}, ValueError, "cu_seqlens_q must rise"),
        ({"cu_seqlens_q": torch.tensor([1, 4])}, ValueError, "cu_seqlens_q must rise"),
        ({"cu_seqlens_k": starts([6, -2])}, ValueError, "cu_seqlens_k must rise"),
        ({"cu_seqlens_k": starts([6])}, ValueError, "cu_seqlens_k must have 3 entries"),
        ({"cu_seqlens_k": [0, 3, 6]}, TypeError, "cu_seqlens_k must be"),
        ({"scale": "big"}, TypeError, "scale must be"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be"),
        ({"softcap": 0.0}, ValueError, "softcap must be"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must be"),
        ({"alibi_slopes": torch.zeros(4).double()}, TypeError, "alibi_slopes must be"),
        ({"draft_mask": torch.ones(2, 1, 1).bool()}, ValueError, "draft_mask must be"),
        ({"return_lse": 1}, TypeError, "return_lse must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, error, message):
    arguments = {
        "query": torch.zeros(4, 4, 8),
        "key": torch.zeros(6, 2, 8),
        "value": torch.zeros(6, 2, 8),
        "cu_seqlens_q": starts([2, 2]),
        "cu_seqlens_k": starts([3, 3]),
    }
    dense_attention(**arguments)
    with pytest.raises(error, match=message):
        dense_attention(**{**arguments, **change})
