"""What a quantised cache stores, byte by byte, and that new tokens attend to what was stored."""

import pytest
import torch
from attention_cases import BACKENDS, QUANTISED
from paged_kernels import reshape_and_cache
from paged_kernels._quantise import quantise_int8, round_to_int8
from paged_kernels.testing import guarded_empty, make_batch

FP8 = QUANTISED[:2]
E4M3, E5M2, INT8 = QUANTISED


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).int()


def assert_same_bytes(got, want, backend):
    """Exact in torch; within one unit where the interpreter does the cast."""
    if backend == "triton":
        assert (bits(got) - bits(want)).abs().max() <= 1
    else:
        assert torch.equal(bits(got), bits(want))


def stored(rows, dtype, backend, scale=None, num_kv_heads=1):
    """The cache [tokens, num_kv_heads, head_dim] after `rows` were written, with its scale."""
    num_tokens, _, head_dim = rows.shape
    shape = (1, num_tokens, num_kv_heads)
    cache = torch.zeros(*shape, head_dim).to(dtype)
    if dtype == INT8:
        scale = guarded_empty(shape, torch.float32)
    slots = torch.arange(num_tokens)
    reshape_and_cache(
        rows, rows, cache, cache.clone(), slots, k_scale=scale, v_scale=scale, backend=backend
    )
    return cache[0], scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_saturates_and_keeps_nan(backend, dtype):
    limit = torch.finfo(dtype).max
    x = [limit, limit + 1, 1.2 * limit, 1e6, -1e6, float("inf"), -float("inf"), float("nan")]
    x += [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -4.0, 8.0]
    got, _ = stored(torch.tensor(x).view(1, 1, 16), dtype, backend)
    want = [limit] * 4 + [-limit, limit, -limit, float("nan"), *x[8:]]
    assert torch.equal(got.float().flatten().nan_to_num(7), torch.tensor(want).nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_is_the_nearest_number_to_x_over_scale(backend, dtype):
    rows = 3 * torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0))
    per_head = torch.tensor([0.3, 0.007])
    for scale, divisor in ((per_head, per_head[:, None]), (0.1, torch.tensor(0.1)), (None, 1.0)):
        got, _ = stored(rows, dtype, backend, scale, num_kv_heads=2)
        limit = torch.finfo(dtype).max
        want = (rows / divisor).clamp(-limit, limit).to(dtype)
        assert_same_bytes(got, want, backend)


def test_int8_rounds_to_nearest_even_and_saturates():
    x = torch.tensor([2.7, -2.7, 0.5, 1.5, 127.6, 300.0, -300.0])
    assert round_to_int8(x).tolist() == [3, -3, 0, 2, 127, 127, -128]


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_scale_is_absmax_over_127_of_each_head(backend):
    rows = torch.zeros(3, 2, 16)
    rows[0, 0, :4] = torch.tensor([127.0, -2.5, 1.5, 0.5])  # scale 1: ties go to even
    rows[1, 1, :2] = torch.tensor([-254.0, 3.0])  # scale 2
    got, scale = stored(rows, INT8, backend, num_kv_heads=2)
    assert scale[0].tolist() == [[1.0, 1.0], [1.0, 2.0], [1.0, 1.0]]  # 1 where all is zero
    assert got[0, 0, :4].tolist() == [127, -2, 2, 0]
    assert got[1, 1, :2].tolist() == [-127, 2]
    assert (got[2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_has_no_bias(backend):
    rows = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(0))
    got, scale = stored(rows, INT8, backend)
    exact, exact_scale = quantise_int8(rows)
    assert torch.equal(scale[0], exact_scale)
    assert_same_bytes(got, exact, backend)
    real = got.float() * scale[0].unsqueeze(-1)
    # Truncation would shrink every number by half a step on average, 0.011 here.
    assert (rows.abs() - real.abs()).mean().abs() < 0.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_keeps_nan_in_the_scale(backend):
    rows = torch.ones(2, 1, 16)
    rows[0, 0, 3] = float("nan")
    _, scale = stored(rows, INT8, backend)
    assert scale[0, 0].isnan().all() and scale[0, 1].item() == pytest.approx(1 / 127)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_padding_slots_of_a_quantised_cache_are_not_written(backend, dtype, query_dtype):
    batch = make_batch([5], cache_dtype=dtype, dtype=query_dtype)
    memory = [batch.key_cache, batch.value_cache]
    memory += [s for s in (batch.k_scale, batch.v_scale) if isinstance(s, torch.Tensor)]
    before = [tensor.clone() for tensor in memory]
    reshape_and_cache(
        batch.key, batch.value, batch.key_cache, batch.value_cache, torch.full((5,), -1),
        k_scale=batch.k_scale, v_scale=batch.v_scale, backend=backend,
    )  # fmt: skip
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, memory, strict=True))
    batch.check_guards()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_a_cached_prefix_changes_nothing(backend, dtype):
    # 64 tokens at once, or 48 that were cached and 16 new: new tokens attend to what was stored.
    whole = make_batch([64], [64], cache_dtype=dtype)
    chunk = make_batch([64], [16], cache_dtype=dtype)
    chunk.query.copy_(whole.query[48:])
    torch.testing.assert_close(
        chunk.attend(backend=backend), whole.attend(backend=backend)[48:], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_attention_is_near_that_over_a_plain_cache(backend, dtype):
    plain = make_batch([40, 7]).attend(backend=backend)
    quantised = make_batch([40, 7], cache_dtype=dtype).attend(backend=backend)
    step = {E4M3: 2**-4, E5M2: 2**-3, INT8: 1 / 127}[dtype]
    assert 0 < (quantised - plain).abs().max() <= 4 * step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("phase", ["decode", "split decode", "prefill"])
def test_sinks_reach_every_kind_of_cache(backend, dtype, phase):
    batch = make_batch([64], [8] if phase == "prefill" else None, cache_dtype=dtype)
    batch.query.zero_()
    ones = torch.ones(64, 2, 16)
    options = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    if dtype != INT8:
        options = {"k_scale": None, "v_scale": None}
    reshape_and_cache(
        ones, ones, batch.key_cache, batch.value_cache, batch.slots, **options, backend="reference"
    )
    options |= {"num_splits": 4 if phase == "split decode" else None, "backend": backend}
    sinks = torch.full((4,), 2.0)
    out = batch.attend(sliding_window=8, sinks=sinks, **options)
    torch.testing.assert_close(out, torch.full_like(out, 0.519850), rtol=0, atol=1e-4)
