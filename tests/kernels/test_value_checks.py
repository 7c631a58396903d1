"""Values inside tensors are checked where that is cheap, and everywhere when debugging."""

import pytest
import torch
from paged_kernels import paged_attention, reshape_and_cache
from paged_kernels.testing import make_batch

CHECKED = ("reference", "torch")


def tensor(*values):
    return torch.tensor(values, dtype=torch.int32)


BROKEN = [
    ({"seq_lens": tensor(5, -1)}, r"seq_lens must be in 0\.\.48.*got -1 at \[1\]"),
    ({"seq_lens": tensor(5, 49)}, r"seq_lens must be in 0\.\.48.*got 49 at \[1\]"),
    ({"max_seq_len": 8}, r"seq_lens must be in 0\.\.8, .*max_seq_len.*got 9 at \[1\]"),
    ({"cu_seqlens_q": tensor(1, 2, 5)}, r"cu_seqlens_q must start at 0.*got 1 \.\. 5"),
    ({"cu_seqlens_q": tensor(0, 2, 6)}, r"cu_seqlens_q .*at most at the 5 rows.*got 0 \.\. 6"),
    ({"cu_seqlens_q": tensor(0, 5, 3)}, r"differences of cu_seqlens_q .*got -2 at \[1\]"),
    ({"max_query_len": 2}, r"differences of cu_seqlens_q .*0\.\.2.*max_query_len.*got 3 at \[1\]"),
    ({"draft_mask": torch.ones(2, 2, 2).bool()}, r"differences of cu_seqlens_q .*got 3 at \[1\]"),
    ({"common_prefix_len": 16}, "first query position must be >= common_prefix_len 16, got 3"),
]


@pytest.mark.parametrize("backend", CHECKED)
@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_lengths_and_promises_must_hold(backend, changes, message):
    with pytest.raises(ValueError, match=message):
        make_batch([5, 9], [2, 3]).attend(**changes, backend=backend)


@pytest.mark.parametrize("backend", CHECKED)
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_block_ids_that_are_read_lie_in_the_pool(backend, bad):
    batch = make_batch([5, 20], [2, 3], block_size=16)  # a pool of 1 + 2 + 3 blocks
    batch.block_table[1, 1] = bad if bad != 5 else len(batch.key_cache)
    with pytest.raises(ValueError, match=r"block_table must be in 0\.\.5 .*at \[1, 1\]"):
        batch.attend(backend=backend)
    # Nobody looks the entry up once its sequence ends before it, or has no query.
    batch.attend(seq_lens=tensor(5, 16), backend=backend)
    batch.attend(cu_seqlens_q=tensor(0, 5, 5), backend=backend)


@pytest.mark.parametrize("backend", CHECKED)
def test_block_ids_before_the_window_may_be_anything(backend):
    batch = make_batch([20], [3], block_size=4)  # queries at 17, 18, 19
    batch.block_table[0, :3] = -1
    batch.attend(sliding_window=6, backend=backend)  # the first query sees 12..17
    with pytest.raises(ValueError, match=r"block_table must be in .*got -1 at \[0, 2\]"):
        batch.attend(sliding_window=7, backend=backend)


@pytest.mark.parametrize("backend", CHECKED)
def test_a_common_prefix_must_be_common(backend):
    batch = make_batch([20, 36], block_size=4, shared_blocks=3)
    batch.attend(common_prefix_len=12, backend=backend)
    with pytest.raises(ValueError, match=r"block_table must be the same in all rows .*first 4"):
        batch.attend(common_prefix_len=16, backend=backend)
    # Where no query looks, the entries need not agree.
    batch.block_table[1, 0] = -1
    batch.attend(common_prefix_len=12, sliding_window=5, backend=backend)


@pytest.mark.parametrize("backend", CHECKED)
@pytest.mark.parametrize("bad", [-2, 64, 2**31 - 1])
def test_slots_lie_in_the_pool_and_a_refused_write_changes_nothing(backend, bad):
    cache = torch.zeros(4, 16, 2, 8)
    rows = torch.ones(3, 2, 8)
    slots = torch.tensor([3, bad, -1])
    message = rf"slot_mapping must be in 0\.\.63, or -1 .*got {bad} at \[1\]"
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(rows, rows, cache, cache, slots, backend=backend)
    assert (cache == 0).all()


@pytest.mark.parametrize("backend", CHECKED)
def test_fp8_scales_are_positive_numbers(backend):
    batch = make_batch([5], cache_dtype=torch.float8_e5m2)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        scale = torch.tensor([1.0, bad])
        with pytest.raises(ValueError, match=r"v_scale must be finite and > 0, got .* at \[1\]"):
            batch.attend(v_scale=scale, backend=backend)


def test_a_slot_named_twice_is_reported_when_debugging(monkeypatch):
    cache = torch.zeros(4, 16, 2, 8)
    rows = torch.ones(4, 2, 8)
    slots = torch.tensor([-1, 9, 9, -1])
    reshape_and_cache(rows, rows, cache, cache, slots)
    monkeypatch.setenv("PAGED_DEBUG", "1")
    with pytest.raises(
        ValueError, match="slot_mapping must name each slot once, got slot 9 2 times"
    ):
        reshape_and_cache(rows, rows, cache, cache, slots)


def test_debugging_checks_the_triton_backend_too(monkeypatch):
    monkeypatch.setenv("PAGED_DEBUG", "1")
    with pytest.raises(ValueError, match="seq_lens must be in"):
        make_batch([5]).attend(max_seq_len=4, backend="triton")
    cache, rows = torch.zeros(4, 16, 2, 8), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match="slot_mapping must be in"):
        reshape_and_cache(rows, rows, cache, cache, torch.tensor([64]), backend="triton")


def test_a_refused_call_leaves_out_alone():
    batch = make_batch([5, 9])
    out = torch.full((2, 4, 16), 7.0)
    with pytest.raises(ValueError, match="seq_lens"):
        paged_attention(**batch.arguments(max_seq_len=3, out=out))
    assert (out == 7).all()
