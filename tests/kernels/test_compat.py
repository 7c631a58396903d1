"""Signatures from elsewhere, against what their documentation says they mean."""

import inspect
from itertools import pairwise

import pytest
import torch
from paged_kernels.compat import (
    block_table_to_csr,
    csr_to_block_table,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    lse_from_base_2,
    lse_to_base_2,
    varlen_attn,
)

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 8, 4
NO_KEY = float("-inf")


class Aux:
    lse = True


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def oracle(
    q, k, v, *, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, scale=None
):
    """One sequence in float64, as flash-attn documents it: out [q, heads, width], lse [heads, q].

    Query i sees the keys in [i + K - Q - left, i + K - Q + right], both inclusive; ALiBi adds
    -slope * |i + K - Q - j|.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    diagonal = torch.arange(len(q))[:, None] + len(k) - len(q)
    ahead = torch.arange(len(k)) - diagonal  # of each key, before its query where negative
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden, NO_KEY)
    weights = torch.softmax(scores, 2).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(scores, 2)


def close(actual, exact):
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)


VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "causal by window": {"window_size": (-1, 0)},
    "window": {"window_size": (2, 0)},
    "window of one": {"window_size": (0, 0)},
    "causal window": {"causal": True, "window_size": (3, 3)},
    "past bounded": {"window_size": (2, -1)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.0]), "causal": True},
    "scale": {"scale": 0.7},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def flash(variant):
    return {"softmax_scale" if name == "scale" else name: x for name, x in variant.items()}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def sequences(lengths, heads):
    return [torch.randn(length, heads, WIDTH) for length in lengths]


def paged(rows, capacity, num_blocks=16):
    """Rows of each sequence in shuffled pages, NaN elsewhere; the cache and the table."""
    width = capacity // PAGE
    table = torch.randperm(num_blocks)[: len(rows) * width].view(len(rows), width).int()
    cache = torch.full((num_blocks, PAGE, KV_HEADS, WIDTH), float("nan"))
    for seq, row in enumerate(rows):
        for position, token in enumerate(row):
            cache[table[seq, position // PAGE], position % PAGE] = token
    return cache, table


# ---- flash_attn_with_kvcache


@pytest.mark.parametrize("cache_seqlens", [3, ints(3, 3)])
def test_an_append_lands_after_the_cached_tokens_and_is_seen(cache_seqlens):
    # Queries of 0 weigh all visible keys alike: token t has the value t.
    cache = torch.arange(6.0).view(1, 6, 1, 1).expand(2, 6, 1, 16).clone()
    cache[:, 3:] = float("nan")
    new = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1).expand(2, 2, 1, 16)
    key_cache, q = cache.clone(), torch.zeros(2, 2, 1, 16)
    out, lse = flash_attn_with_kvcache(
        q, key_cache, cache, new, new, cache_seqlens=cache_seqlens, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert cache[0, :5, 0, 0].tolist() == cache[1, :5, 0, 15].tolist() == [0, 1, 2, 3, 4]
    assert cache[:, 5].isnan().all() and torch.equal(cache[:, :5], key_cache[:, :5])
    close(out[:, :, 0, 0], torch.tensor([[1.5, 2.0]] * 2).double())
    close(lse, torch.tensor([4.0, 5.0]).double().log().expand(2, 1, 2))


def test_the_cache_batch_index_picks_the_row_to_read_and_to_write():
    cache = torch.zeros(3, 4, 1, 16)
    new = torch.tensor([10.0, 20.0]).view(2, 1, 1, 1).expand(2, 1, 1, 16)
    out = flash_attn_with_kvcache(
        torch.zeros(2, 1, 1, 16), cache, cache.clone(), new, new, cache_seqlens=1,
        cache_batch_idx=ints(2, 0),
    )  # fmt: skip
    assert cache[:, 1, 0, 0].tolist() == [20, 0, 10]
    assert out[:, 0, 0, 0].tolist() == [5, 10]


def test_without_lengths_the_whole_cache_is_attended():
    cache = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 16).contiguous()
    out = flash_attn_with_kvcache(torch.zeros(1, 1, 1, 16), cache, cache)
    assert out.flatten().tolist() == pytest.approx([1.5] * 16)


@variants
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 1), (3, 3), (2, 5), (4, 0), (1, 0)])
def test_kvcache_means_what_flash_attn_documents(variant, is_paged, seqlen_q, seqlen_new):
    before = [7, 0, 3]
    keys, values = (sequences([n + seqlen_new for n in before], KV_HEADS) for _ in range(2))
    q = torch.randn(3, seqlen_q, HEADS, WIDTH)
    cached = [x[:n] for x, n in zip(keys, before, strict=True)]
    key_cache, table = paged(cached, 12)
    values_cached = torch.full_like(key_cache, float("nan"))
    for seq, n in enumerate(before):
        for t in range(n):
            values_cached[table[seq, t // PAGE], t % PAGE] = values[seq][t]
    value_cache = values_cached
    if not is_paged:
        key_cache, value_cache = (
            x[table.long()].flatten(1, 2) for x in (key_cache, value_cache)
        )  # [batch, 12, heads, width]
    new = {}
    if seqlen_new:
        k, v = (
            torch.stack([x[n:] for x, n in zip(side, before, strict=True)])
            for side in (keys, values)
        )
        new = {"k": k, "v": v}
    out, lse = flash_attn_with_kvcache(
        q, key_cache, value_cache, **new, cache_seqlens=ints(*before),
        block_table=table if is_paged else None, return_softmax_lse=True, **flash(variant),
    )  # fmt: skip
    assert lse.shape == (3, HEADS, seqlen_q) and lse.is_contiguous()
    for seq in range(3):
        exact, exact_lse = oracle(q[seq], keys[seq], values[seq], **variant)
        close(out[seq], exact)
        close(lse[seq], exact_lse)


def test_num_splits_and_one_query_change_nothing_but_rounding():
    q, cache = torch.randn(2, 1, HEADS, WIDTH), torch.randn(2, 2, 40, KV_HEADS, WIDTH)
    exact = torch.stack([oracle(q[i], cache[0, i], cache[1, i])[0] for i in range(2)])
    for options in ({"num_splits": 3}, {"causal": True}, {"window_size": (-1, 5)}):
        close(flash_attn_with_kvcache(q, *cache, **options), exact)


# ---- packed sequences


@variants
@pytest.mark.parametrize("is_paged", [True, False])
def test_varlen_func_means_what_flash_attn_documents(variant, is_paged):
    q_lens, k_lens = [3, 0, 5, 4, 1], [7, 4, 2, 4, 0]
    q, k, v = sequences(q_lens, HEADS), sequences(k_lens, KV_HEADS), sequences(k_lens, KV_HEADS)
    table = None
    pages = [torch.cat(k), torch.cat(v)]
    if is_paged:
        (key_cache, table), value_cache = (
            paged(k, 8),
            torch.full((16, PAGE, KV_HEADS, WIDTH), float("nan")),
        )
        for seq, row in enumerate(v):
            for t, token in enumerate(row):
                value_cache[table[seq, t // PAGE], t % PAGE] = token
        pages = [key_cache, value_cache]
    out, lse, probabilities = flash_attn_varlen_func(
        torch.cat(q), *pages, starts(q_lens), starts(k_lens), 5, 7, return_attn_probs=True,
        block_table=table, **flash(variant),
    )  # fmt: skip
    assert lse.shape == (HEADS, 13) and lse.is_contiguous() and probabilities.numel() == 0
    for seq, (first, last) in enumerate(pairwise(starts(q_lens).tolist())):
        exact, exact_lse = oracle(q[seq], k[seq], v[seq], **variant)
        close(out[first:last], exact)
        close(lse[:, first:last], exact_lse)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 0)])
def test_varlen_attn_means_what_torch_documents(window_size):
    q_lens, k_lens = [3, 5], [7, 5]
    q, k, v = sequences(q_lens, HEADS), sequences(k_lens, KV_HEADS), sequences(k_lens, KV_HEADS)
    packed = (torch.cat(q), torch.cat(k), torch.cat(v), starts(q_lens), starts(k_lens), 5, 7)
    options = {"window_size": window_size, "enable_gqa": True, "scale": 0.4}
    out, lse = varlen_attn(*packed, **options, return_aux=Aux())
    used = varlen_attn(*packed, **options, seqused_k=ints(4, 5))
    for seq, (first, last) in enumerate(pairwise(starts(q_lens).tolist())):
        exact, exact_lse = oracle(q[seq], k[seq], v[seq], window_size=window_size, scale=0.4)
        close(out[first:last], exact)
        close(lse[:, first:last], exact_lse)
        n = (4, 5)[seq]
        exact, _ = oracle(q[seq], k[seq][:n], v[seq][:n], window_size=window_size, scale=0.4)
        close(used[first:last], exact)

    cache, table = paged(k, 8)
    out = varlen_attn(
        packed[0], cache, cache, packed[3], None, 5, 7, **options, seqused_k=ints(7, 5),
        block_table=table,
    )  # fmt: skip
    close(out[:3], oracle(q[0], k[0], k[0], window_size=window_size, scale=0.4)[0])


def test_signature_and_result_shapes_are_those_of_the_installed_torch():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs = inspect.signature(varlen.varlen_attn).parameters
    if "num_splits" not in theirs:
        pytest.skip("an older varlen_attn")
    ours = inspect.signature(varlen_attn).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    q = torch.randn(5, 2, WIDTH)
    arguments = (q, q, q, starts([5]), starts([5]), 5, 5)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out, lse = varlen.varlen_attn(*arguments, return_aux=varlen.AuxRequest(lse=True))
    mine, my_lse = varlen_attn(*arguments, return_aux=varlen.AuxRequest(lse=True))
    assert (mine.shape, my_lse.shape) == (out.shape, lse.shape)


def test_a_strided_slice_of_a_fused_projection_is_packed_too():
    qkv = torch.randn(6, HEADS + 2 * KV_HEADS, WIDTH)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    cu = starts([4, 2])
    out = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True)
    close(out[4:], oracle(q[4:], k[4:], v[4:], causal=True)[0])


# ---- backends and graphs


def fused_step(q, key_cache, value_cache, new, lens, table):
    return flash_attn_with_kvcache(
        q, key_cache, value_cache, new, new, cache_seqlens=lens, block_table=table, causal=True,
        window_size=(9, 0), return_softmax_lse=True,
    )  # fmt: skip


def packed_step(q, k, cu, longest):
    return flash_attn_varlen_func(
        q, k, k, cu, cu, longest, longest, causal=True, return_attn_probs=True
    )


@pytest.mark.parametrize("table", [ints(1, 2, 3, 5).view(2, 2), None], ids=["paged", "contiguous"])
def test_the_triton_kernels_serve_every_page_size_that_comes_up(monkeypatch, table):
    # A contiguous cache is one page per sequence, packed keys are pages of one token.
    q, new = torch.randn(2, 3, HEADS, WIDTH), torch.randn(2, 3, KV_HEADS, WIDTH)
    caches = torch.randn(2, 6, 12, KV_HEADS, WIDTH)
    packed = (torch.randn(7, HEADS, WIDTH), torch.randn(7, KV_HEADS, WIDTH), starts([3, 4]), 4)

    def run():
        pools = caches.clone()
        fused = fused_step(q, *pools, new, ints(5, 9), table)
        return [*fused, pools, *packed_step(*packed)]

    expected = run()
    monkeypatch.setattr("paged_kernels._checks.resolve_backend", lambda *_: "triton")
    for actual, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_both_compile_into_one_graph():
    torch._dynamo.reset()
    q, new = torch.randn(2, 1, HEADS, WIDTH), torch.randn(2, 1, KV_HEADS, WIDTH)
    caches = torch.randn(2, 6, PAGE, KV_HEADS, WIDTH)
    traced = caches.clone()
    rest = (new, ints(5, 2), ints(1, 2, 3, 5).view(2, 2))
    packed = (torch.randn(7, HEADS, WIDTH), torch.randn(7, KV_HEADS, WIDTH), starts([3, 4]), 4)
    compiled = [
        torch.compile(f, fullgraph=True, backend="aot_eager") for f in (fused_step, packed_step)
    ]
    results = [*compiled[0](q, *traced, *rest), *compiled[1](*packed), traced]
    expected = [*fused_step(q, *caches, *rest), *packed_step(*packed), caches]
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)


# ---- what is not honoured

CACHE = torch.zeros(2, 8, KV_HEADS, WIDTH)
QUERY = torch.zeros(2, 2, HEADS, WIDTH)
NEW = torch.ones(2, 2, KV_HEADS, WIDTH)
REFUSED = {
    "rotary_cos": {"rotary_cos": torch.ones(8, 4)},
    "rotary_sin": {"rotary_sin": torch.ones(8, 4)},
    "cache_leftpad": {"cache_leftpad": ints(0, 0)},
    "window_size": {"window_size": (-1, 1)},
    "alibi_slopes must be .nheads": {"alibi_slopes": torch.ones(2, HEADS), "causal": True},
    "alibi_slopes must come with causal": {"alibi_slopes": torch.ones(HEADS)},
    "cache_batch_idx": {"cache_batch_idx": ints(0, 1), "block_table": ints(0, 1).view(2, 1)},
    "softcap": {"softcap": -1.0},
    "num_splits": {"num_splits": -1},
    "v must be given": {"k": NEW, "cache_seqlens": 0},
    "k must be given": {"v": NEW, "cache_seqlens": 0},
    "cache_seqlens must be given": {"k": NEW, "v": NEW},
    "cache_seqlens must be in 0..6": {"k": NEW, "v": NEW, "cache_seqlens": 7},
    "cache_seqlens must be in 0..6 .*got 2..7": {"k": NEW, "v": NEW, "cache_seqlens": ints(2, 7)},
    "cache_seqlens must be in 0..8": {"cache_seqlens": ints(9, 1)},
    "block_table": {"block_table": ints(5, 1).view(2, 1), "cache_seqlens": 1},
}


@pytest.mark.parametrize(("name", "arguments"), REFUSED.items(), ids=REFUSED)
def test_kvcache_refuses_by_name_and_leaves_the_cache_alone(name, arguments):
    if "cache_seqlens" not in arguments and "given" not in name:
        arguments = {"k": NEW, "v": NEW, "cache_seqlens": 0, **arguments}
    key_cache, value_cache = CACHE.clone(), CACHE.clone()
    with pytest.raises(ValueError, match=name):
        flash_attn_with_kvcache(QUERY, key_cache, value_cache, **arguments)
    assert not key_cache.any() and not value_cache.any()


def test_packed_functions_refuse_by_name():
    q, cu = torch.zeros(4, 2, WIDTH), starts([4])
    packed = (q, q, q, cu, cu, 4, 4)
    for name, options in {
        "dropout_p": {"dropout_p": 0.1},
        "window_size": {"window_size": (3, 1)},
        "alibi_slopes": {"alibi_slopes": torch.ones(2)},
    }.items():
        with pytest.raises(ValueError, match=name):
            flash_attn_varlen_func(*packed, **options)
    for name, options in {
        "window_size": {"window_size": (-1, 2)},
        "seqused_k": {"block_table": ints(0).view(1, 1)},
    }.items():
        with pytest.raises(ValueError, match=name):
            varlen_attn(*packed, **options)
    with pytest.raises(ValueError, match="cu_seq_k"):
        varlen_attn(q, q, q, cu, None, 4, 4)
    with pytest.raises(ValueError, match="enable_gqa"):
        varlen_attn(q, q[:, :1], q[:, :1], cu, cu, 4, 4)


# ---- FlashInfer


def test_csr_and_block_table_convert_both_ways():
    indptr, indices, last = ints(0, 2, 2, 5), ints(7, 3, 9, 1, 4), ints(1, 0, 4)
    table, seq_lens = csr_to_block_table(indptr, indices, last, PAGE)
    assert table.tolist() == [[7, 3, 0], [0, 0, 0], [9, 1, 4]]
    assert seq_lens.tolist() == [5, 0, 12]
    for back, there in zip(
        block_table_to_csr(table, seq_lens, PAGE), (indptr, indices, last), strict=True
    ):
        assert back.dtype == torch.int32 and torch.equal(back, there)
    wide, _ = csr_to_block_table(indptr, indices, last, PAGE, max_blocks_per_seq=5)
    assert wide.shape == (3, 5) and torch.equal(wide[:, :3], table) and not wide[:, 3:].any()


def test_csr_of_nothing():
    table, seq_lens = csr_to_block_table(ints(0), ints(), ints(), PAGE)
    assert table.shape == (0, 0) and seq_lens.shape == (0,)
    indptr, indices, last = block_table_to_csr(table.int(), seq_lens, PAGE)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0], [], [])


def test_csr_conversions_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="seq_lens must fit the 1 pages of 4"):
        block_table_to_csr(ints(3).view(1, 1), ints(5), PAGE)
    with pytest.raises(ValueError, match="kv_last_page_len"):
        csr_to_block_table(ints(0, 1), ints(3), ints(1, 2), PAGE)
    with pytest.raises(TypeError, match="kv_indices"):
        csr_to_block_table(ints(0, 1), torch.zeros(1), ints(1), PAGE)


def test_lse_changes_base_both_ways():
    lse = torch.tensor([8.0, 1.0]).log()
    torch.testing.assert_close(lse_to_base_2(lse), torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(lse_from_base_2(torch.tensor([3.0, 0.0])), lse)
    assert lse_to_base_2(torch.tensor([NO_KEY])).item() == NO_KEY
