"""Small cases whose results are known fractions: queries of 0 weigh all visible keys alike."""

import math

import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import paged_attention
from paged_kernels.testing import make_batch

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
FILLERS = (float("nan"), float("inf"), 1000.0)
PHASES = ("decode", "split decode", "prefill")


def counting(seq_lens, query_lens=None, **options):
    return make_batch(seq_lens, query_lens, content="counting", **options)


def last_rows(out):
    """One number per row, after checking that all heads and widths agree."""
    torch.testing.assert_close(out, out[:, :1, :1].expand_as(out), rtol=1e-4, atol=1e-6)
    return out[:, 0, 0].tolist()


def constant_batch(value, seq_len, query_len=None, **options):
    """Queries 0 and every V the same number."""
    query_lens = None if query_len is None else [query_len]
    batch = make_batch([seq_len], query_lens, content="counting", **options)
    block_size = batch.key_cache.shape[1]
    slots = batch.slots
    batch.value_cache[slots // block_size, slots % block_size] = value
    return batch


@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("num_splits", [None, 1, 2, 8])
@pytest.mark.parametrize("seq_len", [1, 5, 15, 16, 17])
def test_unwritten_slots_do_not_reach_a_decode(backend, seq_len, num_splits, filler):
    batch = counting([seq_len], filler=filler)
    (mean,) = last_rows(batch.attend(num_splits=num_splits, backend=backend))
    assert mean == pytest.approx((seq_len - 1) / 2, abs=1e-5)


@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("seq_len", [1, 5, 15, 16, 17])
def test_unwritten_slots_do_not_reach_a_prefill(backend, seq_len, filler):
    batch = counting([seq_len], [seq_len], filler=filler)
    means = last_rows(batch.attend(backend=backend))
    assert means == pytest.approx([row / 2 for row in range(seq_len)], abs=1e-5)


def test_full_attention_stops_at_the_length_when_queries_outnumber_keys(backend):
    batch = counting([3], [4])
    assert last_rows(batch.attend(causal=False, backend=backend)) == pytest.approx([1.0] * 4)


def test_causal_rows_before_the_sequence_see_nothing(backend):
    batch = counting([3], [5])
    out, lse = batch.attend(return_lse=True, backend=backend)
    assert last_rows(out) == pytest.approx([0, 0, 0, 0.5, 1.0])
    assert lse[:, 0].tolist() == pytest.approx([-math.inf, -math.inf, 0, math.log(2), math.log(3)])


@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_without_keys_are_zero_and_leave_others_alone(backend, num_splits):
    batch = make_batch([5, 0, 0, 9])
    out, lse = batch.attend(num_splits=num_splits, return_lse=True, backend=backend)
    assert (out[1:3] == 0).all() and (lse[1:3] == -math.inf).all()
    alone, alone_lse = batch.rows([0, 3]).attend(
        num_splits=num_splits, return_lse=True, backend=backend
    )
    assert torch.equal(out[[0, 3]], alone) and torch.equal(lse[[0, 3]], alone_lse)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8, 64])
def test_a_sink_counts_once_whatever_the_splits(backend, num_splits):
    batch = constant_batch(1.0, 64)
    sinks = torch.full((4,), 2.0)
    out = batch.attend(sliding_window=8, sinks=sinks, num_splits=num_splits, backend=backend)
    assert last_rows(out) == pytest.approx([8 / (8 + math.e**2)], abs=1e-6)  # 0.519850


def test_a_sink_counts_once_in_every_prefill_row(backend):
    batch = constant_batch(1.0, 64, 64)
    out = batch.attend(sliding_window=8, sinks=torch.full((4,), 2.0), backend=backend)
    want = [n / (n + math.e**2) for n in (min(row + 1, 8) for row in range(64))]
    assert last_rows(out) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_row_with_only_a_sink_is_zero_with_its_lse(backend, num_splits):
    batch = make_batch([0, 3])
    out, lse = batch.attend(
        sinks=torch.full((4,), 2.0), num_splits=num_splits, return_lse=True, backend=backend
    )
    assert (out[0] == 0).all() and lse[0].tolist() == pytest.approx([2.0] * 4)


def test_softcap_comes_before_the_mask(backend):
    # Capped after it, each masked slot would score -5 and leak 1000 into the mean.
    batch = constant_batch(1.0, 1, filler=1000.0)
    assert last_rows(batch.attend(softcap=5.0, backend=backend)) == [1.0]


def test_softcap_bounds_the_natural_scores(backend):
    batch = make_batch([2], num_heads=1, num_kv_heads=1)
    batch.query.fill_(1.0)
    tokens = (batch.slots // 16, batch.slots % 16)
    batch.key_cache[tokens] = torch.tensor([0.0, 5.0])[:, None, None]  # scores 0 and 80 * scale
    batch.value_cache[tokens] = torch.tensor([0.0, 1.0])[:, None, None]
    out, lse = batch.attend(scale=0.5, softcap=3.0, return_lse=True, backend=backend)
    capped = 3 * math.tanh(40 / 3)
    assert last_rows(out) == pytest.approx([1 / (1 + math.exp(-capped))], abs=1e-6)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(capped)), abs=1e-5)


def test_a_tight_softcap_saturates(backend):
    batch = make_batch([2], num_heads=1, num_kv_heads=1)
    batch.query.fill_(100.0)
    tokens = (batch.slots // 16, batch.slots % 16)
    batch.key_cache[tokens] = torch.tensor([100.0, -100.0])[:, None, None]
    batch.value_cache[tokens] = torch.tensor([1.0, 0.0])[:, None, None]
    out, lse = batch.attend(softcap=0.5, return_lse=True, backend=backend)
    assert last_rows(out) == pytest.approx([1 / (1 + math.exp(-1))], abs=1e-6)
    assert lse.item() == pytest.approx(math.log(math.exp(0.5) + math.exp(-0.5)), abs=1e-6)


@pytest.mark.parametrize("window", [1, 4, 9, 10, 11, 15, 16, 17, 100])
@pytest.mark.parametrize("phase", PHASES)
def test_a_window_counts_the_query_itself(backend, phase, window):
    batch = counting([10], [10] if phase == "prefill" else None)
    num_splits = 3 if phase == "split decode" else None
    out = batch.attend(sliding_window=window, num_splits=num_splits, backend=backend)
    keys = min(window, 10)  # window 4: keys 6..9, mean 7.5
    assert last_rows(out)[-1] == pytest.approx(9 - (keys - 1) / 2)


def test_a_window_without_causal_bounds_only_the_past(backend):
    out = counting([6], [6]).attend(causal=False, sliding_window=2, backend=backend)
    oldest = [max(0, row - 1) for row in range(6)]
    assert last_rows(out) == pytest.approx([(first + 5) / 2 for first in oldest])


@pytest.mark.parametrize("window", [None, 8, 40])
def test_each_row_of_a_long_prefill_sees_its_own_past(backend, window):
    # Tiles that a row sees not at all, in part, and whole; none may turn NaN.
    batch = counting([100], [70], num_heads=2, num_kv_heads=1)
    out = batch.attend(sliding_window=window, backend=backend)
    want = [(max(0, row + 1 - (window or 100)) + row) / 2 for row in range(30, 100)]
    assert last_rows(out) == pytest.approx(want, abs=1e-4)


def test_queries_of_every_length_are_served(backend):
    lengths = list(range(20))
    batch = counting(lengths, lengths, num_heads=2, num_kv_heads=1)
    want = [row / 2 for length in lengths for row in range(length)]
    assert last_rows(batch.attend(backend=backend)) == pytest.approx(want, abs=1e-5)


def test_causal_is_aligned_to_the_last_key(backend):
    assert last_rows(counting([10], [3]).attend(backend=backend)) == pytest.approx([3.5, 4.0, 4.5])


def test_sequences_without_queries_are_passed_over(backend):
    options = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    batch = counting([0, 3, 0, 5], [0, 1, 0, 1], **options)
    assert last_rows(batch.attend(backend=backend)) == pytest.approx([1.0, 2.0])
    assert last_rows(batch.attend(max_query_len=1, backend=backend)) == pytest.approx([1.0, 2.0])
    some = counting([7, 4, 9], [0, 1, 0], **options)
    assert last_rows(some.attend(backend=backend)) == pytest.approx([1.5])


@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 8, 12, 16, 20])
@pytest.mark.parametrize("phase", PHASES)
def test_each_query_head_reads_its_own_kv_head(backend, phase, group_size):
    query_lens = [5] if phase == "prefill" else None
    batch = constant_batch(
        torch.arange(1.0, 4)[:, None], 20, 5 if query_lens else None,
        num_heads=3 * group_size, num_kv_heads=3,
    )  # fmt: skip
    out = batch.attend(num_splits=2 if phase == "split decode" else None, backend=backend)
    want = torch.arange(3 * group_size) // group_size + 1.0
    torch.testing.assert_close(out, want[:, None].expand_as(out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 17, 32, 64, 128, 256, 784])
def test_every_block_size_reads_every_token(backend, block_size):
    seq_lens = [1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 5]
    batch = counting(seq_lens, block_size=block_size, num_heads=1, num_kv_heads=1)
    out = batch.attend(max_seq_len=max(seq_lens), backend=backend)
    assert last_rows(out) == pytest.approx([(n - 1) / 2 for n in seq_lens], rel=1e-6)


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_long_sequence_is_read_to_its_end(backend, block_size):
    batch = counting(
        [8192], block_size=block_size, num_heads=1, num_kv_heads=1, dtype=torch.float16
    )
    assert last_rows(batch.attend(backend=backend)) == pytest.approx([4095.5], rel=1e-3)


def test_lse_is_a_natural_logarithm(backend):
    _, lse = counting([8]).attend(return_lse=True, backend=backend)
    assert lse[0].tolist() == pytest.approx([math.log(8)] * 4)  # 2.0794; 3.0 would be base 2


@pytest.mark.parametrize("phase", PHASES)
def test_alibi_is_zero_at_the_query_itself(backend, phase):
    batch = counting([3], [3] if phase == "prefill" else None)
    options = {"alibi_slopes": torch.ones(4), "num_splits": 2 if phase == "split decode" else None}
    out, lse = batch.attend(**options, return_lse=True, backend=backend)
    assert last_rows(out)[-1] == pytest.approx(1.575210, abs=1e-6)
    assert lse[-1].tolist() == pytest.approx([0.407606] * 4, abs=1e-6)


def test_alibi_slopes_belong_to_the_heads_that_were_passed(backend):
    slopes = 2.0 ** -torch.arange(16.0)
    whole = make_batch([40], num_heads=16, num_kv_heads=4)
    want = whole.attend(alibi_slopes=slopes, num_splits=1, backend=backend)
    got = paged_attention(  # heads 8..15, as a second rank would hold them
        whole.query[:, 8:], whole.key_cache[:, :, 2:], whole.value_cache[:, :, 2:],
        whole.block_table, whole.seq_lens, alibi_slopes=slopes[8:], num_splits=1, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(got, want[:, 8:], rtol=1e-6, atol=1e-6)


def test_all_of_a_head_enters_the_scores(backend):
    for head_dim in (16, 32, 64, 80, 96, 112, 128, 192, 256):
        batch = make_batch([2], num_heads=1, num_kv_heads=1, head_dim=head_dim)
        tokens = (batch.slots // 16, batch.slots % 16)
        batch.query.zero_()
        batch.query[..., -1] = 1.0
        batch.key_cache[tokens] = torch.tensor([0.0, math.log(3)])[:, None, None]
        batch.value_cache[tokens] = torch.tensor([0.0, 1.0])[:, None, None]
        out = batch.attend(scale=1.0, backend=backend)
        assert last_rows(out) == pytest.approx([0.75], abs=1e-6), head_dim


def test_entries_before_the_window_are_never_followed(backend):
    batch = counting([20], block_size=4, filler=float("nan"))
    for column in range(3):  # positions 0..11; the window of 8 holds 12..19
        block = int(batch.block_table[0, column])
        batch.key_cache[block], batch.value_cache[block] = float("nan"), float("nan")
        batch.block_table[0, column] = (-1, 2**31 - 1, -(2**31))[column]
    for num_splits in (1, 3):
        out = batch.attend(sliding_window=8, num_splits=num_splits, backend=backend)
        assert last_rows(out) == pytest.approx([15.5])


def test_a_block_may_stand_in_a_table_twice(backend):
    batch = counting([8], block_size=4)
    batch.block_table[0, 1] = batch.block_table[0, 0]
    assert last_rows(batch.attend(backend=backend)) == pytest.approx([1.5])


def test_padding_rows_are_zero_and_minus_infinity(backend):
    batch = counting([4, 6], [2, 3], padding_rows=3)
    out = torch.full((8, 4, 16), float("nan"))
    got, lse = batch.attend(out=out, return_lse=True, backend=backend)
    assert got is out
    assert last_rows(out) == pytest.approx([1.0, 1.5, 1.5, 2.0, 2.5, 0, 0, 0])
    assert (lse[5:] == -math.inf).all() and lse[:5].isfinite().all()


def test_a_draft_mask_replaces_the_causal_rule_among_new_tokens(backend):
    batch = counting([7], [4])  # positions 3..6 are new: a root, two children, a grandchild
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()[None]
    out = batch.attend(draft_mask=mask, backend=backend)
    assert last_rows(out) == pytest.approx([6 / 4, 10 / 5, 11 / 5, 17 / 6])
    windowed = batch.attend(draft_mask=mask, sliding_window=4, backend=backend)
    assert last_rows(windowed) == pytest.approx([6 / 4, 10 / 4, 10 / 3, 14 / 3])


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_a_sink_of_minus_infinity_is_no_sink(backend, num_splits):
    batch = make_batch([0, 5, 2], [1, 1, 4], num_heads=4, num_kv_heads=2)
    sinks = torch.full((4,), -torch.inf)
    options = {"return_lse": True, "num_splits": num_splits}
    out, lse = batch.attend(backend=backend, sinks=sinks, **options)
    plain, plain_lse = batch.attend(backend=backend, **options)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**62])
def test_a_window_longer_than_any_sequence_hides_nothing(backend, window):
    batch = make_batch([40, 7], [1, 5], num_heads=4, num_kv_heads=2)
    got = batch.attend(backend=backend, sliding_window=window)
    torch.testing.assert_close(got, batch.attend(backend=backend), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's own
def test_a_softcap_does_not_hide_a_nan(backend):
    batch = make_batch([20], [3], num_heads=4, num_kv_heads=2)
    batch.query[1] = float("nan")
    out = batch.attend(backend=backend, softcap=5.0)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_a_draft_mask_may_have_any_strides(backend):
    batch = make_batch([20, 9], [4, 3], num_heads=4, num_kv_heads=2)
    mask = torch.tril(torch.rand(2, 4, 4) < 0.5) | torch.eye(4).bool()
    turned = mask.transpose(1, 2).contiguous().transpose(1, 2)
    want = batch.attend(backend=backend, draft_mask=mask)
    torch.testing.assert_close(batch.attend(backend=backend, draft_mask=turned), want)


@pytest.mark.parametrize("prefix", [16, 128])
def test_a_padded_first_row_has_no_part_in_a_promised_prefix(backend, prefix):
    batch = make_batch(
        [prefix + 20, prefix + 9], [1, 3], num_heads=4, num_kv_heads=2, shared_blocks=prefix // 16
    )
    want = batch.attend(backend="reference")
    padded = {
        "block_table": torch.cat([torch.full_like(batch.block_table[:1], 1), batch.block_table]),
        "seq_lens": torch.cat([torch.zeros_like(batch.seq_lens[:1]), batch.seq_lens]),
        "cu_seqlens_q": torch.tensor([0, 0, 1, 4], dtype=torch.int32),
    }
    arguments = {**batch.arguments(), **padded, "common_prefix_len": prefix}
    got = paged_attention(**{**arguments, "backend": backend})
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
