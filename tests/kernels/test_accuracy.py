"""How far from float64 a result may be: absolutely in float32, against torch's attention below."""

import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels.reference import dense_attend
from paged_kernels.testing import make_batch, validated_call

PHASES = {"decode": None, "prefill": [64, 128]}


def errors(batch, backend, **options):
    """Largest error of the backend, of torch's attention in the same precision, largest output."""
    exact, _ = dense_attend(validated_call(**batch.arguments(**options)), torch.float64)
    got = batch.attend(**options, backend=backend)
    dense = torch.cat([dense_rows(batch, seq, **options) for seq in range(len(batch.seq_lens))])
    return tuple(
        float(x)
        for x in ((got - exact).abs().max(), (dense - exact).abs().max(), exact.abs().max())
    )


def dense_rows(batch, seq, scale=None):
    starts = batch.cu_seqlens_q if batch.cu_seqlens_q is not None else torch.arange(1000)
    ends = batch.seq_lens.cumsum(0)
    length = int(batch.seq_lens[seq])
    keys = slice(int(ends[seq]) - length, int(ends[seq]))
    query = batch.query[starts[seq] : starts[seq + 1]].transpose(0, 1)
    key, value = (x[keys].transpose(0, 1) for x in (batch.key, batch.value))
    mask = torch.ones(query.shape[1], length, dtype=torch.bool).tril(length - query.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
    )[0].transpose(0, 1)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("phase", PHASES)
def test_float32_errs_by_rounding_only(backend, phase):
    batch = make_batch([64, 256], PHASES[phase], head_dim=64)
    error, _, largest = errors(batch, backend)
    assert error <= 2e-6 * largest


@pytest.mark.parametrize("scale", [None, 1, 1.0, 0.05, 8.0])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", torch.float16),
        ("torch", torch.bfloat16),
        ("triton", torch.float16),  # bfloat16 only on a GPU: the interpreter truncates its stores
    ],
)
def test_half_precision_is_as_good_as_torch_attention(backend, dtype, scale):
    for query_lens in PHASES.values():
        batch = make_batch([64, 256], query_lens, head_dim=64, dtype=dtype)
        error, dense, _ = errors(batch, backend, scale=scale)
        assert error <= 1.5 * dense
