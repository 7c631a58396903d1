"""What is special to the torch backend: pieces, groups, workspaces, and bits that stay put."""

import dataclasses
import itertools
import threading

import pytest
import torch
from paged_kernels import (
    _fixed,
    _known,
    _pages,
    _plan,
    _rows,
    _short,
    paged_attention,
    reshape_and_cache,
)
from paged_kernels.testing import assert_matches_reference, make_batch, validated_call

OPTIONS = {
    "plain": {},
    "full": {"causal": False},
    "window": {"sliding_window": 21},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}

BLOCK_BYTES = 16 * 2 * 16 * 4  # of K, as make_batch makes them


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of three blocks, runs of two, groups of a few sequences, tiles of four tokens."""
    monkeypatch.setattr(_pages, "GATHER_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(_pages, "RUN_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(_short, "SHORT_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(_short, "GROUP_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(_rows, "TILE_ROWS", 8)
    monkeypatch.setattr(_known, "_kept", threading.local())


def in_order(batch):
    """The same batch with every sequence's blocks one after the other."""
    lengths = batch.seq_lens.tolist()
    size = batch.key_cache.shape[1]
    blocks = [
        block
        for n, row in zip(lengths, batch.block_table, strict=True)
        for block in row[: -(-n // size)].tolist()
    ]
    place = torch.full((len(batch.key_cache),), -1)
    place[blocks] = torch.arange(len(blocks))
    rest = place < 0
    place[rest] = torch.arange(len(blocks), len(place))
    return relabelled(batch, place)


def relabelled(batch, place):
    """The same batch with block `b` at `place[b]`."""
    old = place.argsort()
    known = (batch.block_table >= 0) & (batch.block_table < len(place))
    table = place.to(batch.block_table)[batch.block_table.clamp(0, len(place) - 1).long()]
    return dataclasses.replace(
        batch,
        key_cache=batch.key_cache[old],
        value_cache=batch.value_cache[old],
        block_table=torch.where(known, table, batch.block_table),
        guarded=[],
    )


def pieces_of(batch, **options):
    """(start, number of keys, whether it is a view of the cache) of sequence 0."""
    call = validated_call(**batch.arguments(**options))
    found = []
    for piece in _pages.Pages(call).pieces(0, 0, int(batch.seq_lens[0])):
        storage = batch.key_cache.untyped_storage()
        is_view = piece.key.untyped_storage().data_ptr() == storage.data_ptr()
        found.append((piece.start, len(piece.key), is_view))
    return found


def test_scattered_blocks_are_gathered_a_workspace_at_a_time(small_pieces):
    batch = relabelled(make_batch([120]), torch.tensor([9, 3, 7, 1, 5, 8, 0, 4, 6, 2, 10]))
    batch = dataclasses.replace(batch, block_table=torch.tensor([[0, 2, 4, 6, 8, 10, 1, 3]]))
    assert pieces_of(batch) == [(0, 48, False), (48, 48, False), (96, 24, False)]


def test_a_sequence_in_order_is_one_view(small_pieces):
    batch = make_batch([120])
    batch = dataclasses.replace(batch, block_table=torch.arange(1, 9)[None])
    assert pieces_of(batch) == [(0, 120, True)]


def test_a_very_long_run_is_cut_for_the_sake_of_its_scores(small_pieces, monkeypatch):
    monkeypatch.setattr(_pages, "VIEW_BYTES", 5 * BLOCK_BYTES)
    batch = make_batch([120])
    batch = dataclasses.replace(batch, block_table=torch.arange(1, 9)[None])
    assert pieces_of(batch) == [(0, 80, True), (80, 40, True)]


def test_long_runs_are_views_between_gathered_blocks(small_pieces):
    batch = make_batch([120])
    batch = dataclasses.replace(batch, block_table=torch.tensor([[9, 0, 1, 2, 8, 6, 4, 5]]))
    expected = [(0, 16, False), (16, 48, True), (64, 32, False), (96, 24, True)]
    assert pieces_of(batch) == expected


@pytest.mark.parametrize("layout", ["hnd", "interleaved"])
def test_blocks_that_do_not_adjoin_in_memory_are_never_joined(small_pieces, layout):
    batch = make_batch([120], layout=layout)
    batch = dataclasses.replace(batch, block_table=torch.arange(1, 9)[None])
    assert pieces_of(batch) == [(0, 48, False), (48, 48, False), (96, 24, False)]


def test_a_fixed_number_of_splits_cuts_by_position_alone(small_pieces):
    batch = make_batch([120])
    batch = dataclasses.replace(batch, block_table=torch.tensor([[9, 0, 1, 2, 8, 6, 4, 5]]))
    assert pieces_of(batch, num_splits=2) == [(0, 48, False), (48, 48, False), (96, 24, False)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("query_lens", [None, [1, 3, 0, 40, 1, 130]], ids=["decode", "mixed"])
@pytest.mark.parametrize("order", ["random", "in order"])
def test_many_small_pieces_match_the_reference(small_pieces, option, query_lens, order):
    batch = make_batch([130, 17, 5, 40, 0, 130], query_lens)
    if order == "in order":
        batch = in_order(batch)
    assert_matches_reference(batch, "torch", **OPTIONS[option])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("order", ["random", "in order"])
def test_quantised_pieces_and_groups_match_the_reference(small_pieces, cache_dtype, order):
    batch = make_batch([130, 17, 5, 40, 1, 130], cache_dtype=cache_dtype)
    if order == "in order" and cache_dtype != torch.int8:
        batch = in_order(batch)
    assert_matches_reference(batch, "torch")


@pytest.mark.parametrize("option", [*OPTIONS, "draft"])
def test_a_fixed_split_size_matches_the_reference(option):
    options = OPTIONS.get(option) or {}
    batch = make_batch([300, 17, 5, 40, 0, 258], [1, 3, 0, 40, 1, 20])
    if option == "draft":
        options = {"draft_mask": torch.rand(6, 40, 40) < 0.5}
    assert_matches_reference(batch, "torch", split_size=32, **options)


def test_short_decodes_are_grouped_by_length(small_pieces):
    batch = make_batch([32, 1, 33, 20, 16, 0, 31, 15, 9])
    call = validated_call(**batch.arguments())
    keys = [range(n) for n in batch.seq_lens.tolist()]
    groups = list(_short.short_groups(call, [1] * 9, keys))
    assert groups == [[0, 6], [3, 4, 7], [8], [1]]  # sequence 2 is too long, 5 has no key


@pytest.mark.parametrize("options", [{"sliding_window": 7}, {"sinks": torch.ones(4)}, {}])
def test_grouped_decodes_match_the_reference(options):
    batch = make_batch([32, 1, 33, 20, 16, 0, 31, 15, 9])
    assert_matches_reference(batch, "torch", **options)


def test_a_common_prefix_is_read_once(monkeypatch, small_pieces):
    batch = make_batch([100, 130, 97], [2, 1, 1], shared_blocks=6)
    plain = batch.attend(backend="torch", return_lse=True)
    read = []
    pieces = _pages.Pages.pieces

    def recording(self, seq, begin, end):
        read.append((seq, begin, end))
        return pieces(self, seq, begin, end)

    monkeypatch.setattr(_pages.Pages, "pieces", recording)
    shared = batch.attend(backend="torch", return_lse=True, common_prefix_len=96)
    assert read == [(0, 0, 96), (0, 96, 100), (1, 96, 130)]  # and sequence 2 in a group
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)


def batches(batch, seq, copies):
    """Sequence `seq` in the midst of `copies` others."""
    others = [i % len(batch.seq_lens) for i in range(copies)]
    return batch.rows([*others, seq, *others]), copies


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 5}, {"split_size": 48}])
@pytest.mark.parametrize("phase", ["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(splits, phase, dtype):
    query_lens = None if phase == "decode" else [1, 7, 100, 17]
    batch = make_batch([600, 257, 100, 17], query_lens, dtype=dtype, head_dim=80)
    starts = [0, *itertools.accumulate(query_lens or [1] * 4)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = batch.attend(backend="torch", return_lse=True, sinks=sinks, **splits)
    for seq in range(4):
        rows = slice(starts[seq], starts[seq + 1])
        for others in ([], [2, 0], [3] * 40):
            crowd = batch.rows([*others, seq, *others])
            crowd_out, crowd_lse = crowd.attend(
                backend="torch", return_lse=True, sinks=sinks, **splits
            )
            first = sum(starts[i + 1] - starts[i] for i in others)
            place = slice(first, first + rows.stop - rows.start)
            assert torch.equal(crowd_out[place], out[rows])
            assert torch.equal(crowd_lse[place], lse[rows])


@pytest.mark.parametrize("splits", [{"num_splits": 3}, {"split_size": 48}])
def test_the_bits_of_a_row_do_not_depend_on_where_its_blocks_lie(small_pieces, splits):
    batch = make_batch([600, 257, 100, 17], [1, 7, 100, 17])
    out = batch.attend(backend="torch", **splits)
    assert torch.equal(batch.relabelled().attend(backend="torch", **splits), out)
    assert torch.equal(in_order(batch).attend(backend="torch", **splits), out)


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5, 33, 64])
def test_under_split_size_a_prefill_in_chunks_has_the_bits_of_one_at_once(chunk, group_size):
    batch = make_batch([300], [300], num_heads=2 * group_size, head_dim=80)
    whole, whole_lse = batch.attend(backend="torch", return_lse=True, split_size=64)
    for first in range(0, 300, chunk):
        last = min(first + chunk, 300)
        part = dataclasses.replace(
            batch,
            query=batch.query[first:last],
            seq_lens=torch.tensor([last], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
        )
        out, lse = part.attend(backend="torch", return_lse=True, split_size=64)
        assert torch.equal(out, whole[first:last])
        assert torch.equal(lse, whole_lse[first:last])


def test_splits_meet_at_the_same_keys_whatever_the_split_size():
    batch = make_batch([600, 257])
    assert _fixed.FIXED_KEYS < 257
    out = batch.attend(backend="torch", split_size=16)
    assert torch.equal(batch.attend(backend="torch", split_size=1000), out)


def test_threads_do_not_share_a_workspace(small_pieces):
    batch_of = [make_batch([200 + 16 * i, 90], seed=i) for i in range(4)]
    want = [batch.attend(backend="torch") for batch in batch_of]
    wrong = []

    def attend_often(batch, expected):
        torch.set_num_threads(1)
        wrong.extend(
            1 for _ in range(30) if not torch.equal(batch.attend(backend="torch"), expected)
        )

    threads = [
        threading.Thread(target=attend_often, args=pair)
        for pair in zip(batch_of, want, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_workspace_is_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(_pages, "_kept", threading.local())
    make_batch([200]).attend(backend="torch")
    kept = _pages._kept.__dict__["key stored"]
    make_batch([150]).attend(backend="torch")
    assert _pages._kept.__dict__["key stored"] is kept
    monkeypatch.setattr(_pages, "KEEP_BYTES", 100)
    make_batch([400]).attend(backend="torch")
    assert _pages._kept.__dict__["key stored"] is kept


def test_a_workspace_of_inference_mode_serves_elsewhere(monkeypatch):
    monkeypatch.setattr(_pages, "_kept", threading.local())
    batch = make_batch([200, 90])
    with torch.inference_mode():
        inside = batch.attend(backend="torch")
    assert torch.equal(batch.attend(backend="torch"), inside)


def test_two_calls_share_nothing_that_the_caller_keeps():
    batch, other = make_batch([200, 90]), make_batch([200, 90], seed=1)
    out = batch.attend(backend="torch")
    before = out.clone()
    other.attend(backend="torch")
    assert torch.equal(out, before)


def test_a_strided_output_is_filled_in_place():
    batch = make_batch([70, 20], [70, 3])
    wide = torch.full((73, 4, 32), 7.0)
    paged_attention(**batch.arguments(), out=wide[..., :16], backend="torch")
    assert torch.equal(wide[..., :16], batch.attend(backend="torch"))
    assert (wide[..., 16:] == 7).all()


def test_a_buffer_that_is_written_again_is_looked_at_again():
    batch = make_batch([40, 17, 33])
    batch.attend(backend="torch")
    before = batch.attend(backend="torch")
    batch.block_table[0] = batch.block_table[2]  # in place, as a manager does for every step
    batch.seq_lens[0] = 33
    assert_matches_reference(batch, "torch")
    assert not torch.equal(batch.attend(backend="torch")[0], before[0])


def test_what_was_refused_is_refused_again_and_what_is_known_is_not_looked_up_again(monkeypatch):
    batch = make_batch([40, 17, 33])
    for _ in range(2):
        with pytest.raises(ValueError, match="seq_lens must be in"):
            batch.attend(backend="torch", max_seq_len=20)
    batch.attend(backend="torch")
    monkeypatch.setattr(_plan, "make_group", None)  # would raise
    batch.attend(backend="torch")
    with pytest.raises(TypeError):
        batch.attend(backend="torch", sliding_window=9)


def test_slots_are_looked_at_again_too():
    batch = make_batch([40])
    key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    slots = torch.tensor([3, -1])
    reshape_and_cache(key, value, batch.key_cache, batch.value_cache, slots, backend="torch")
    slots.copy_(torch.tensor([-1, 5]))
    reshape_and_cache(key, value, batch.key_cache, batch.value_cache, slots, backend="torch")
    flat = batch.key_cache.flatten(0, 1)
    assert torch.equal(flat[[3, 5]], key)
