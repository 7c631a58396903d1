"""Batches: every array from the tables, rows in any order, buffers that are still there."""

import pytest
import torch
from manager_helpers import admit, make_manager, refused

ARRAYS = ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping")


def slots_of(manager, seq, start, stop):
    bs, table = manager.config.block_size, manager.block_table(seq)
    return [table[i // bs] * bs + i % bs for i in range(start, stop)]


def assert_batch(manager, batch, seqs, query_lens, context_lens):
    """The batch says what the tables say."""
    bs = manager.config.block_size
    seq_lens = [c + q for c, q in zip(context_lens, query_lens, strict=True)]
    sums, slots = [0], []
    for seq, q, c in zip(seqs, query_lens, context_lens, strict=True):
        sums.append(sums[-1] + q)
        slots += slots_of(manager, seq, c, c + q)
    assert batch.seq_lens.tolist() == seq_lens
    assert batch.cu_seqlens_q.tolist() == sums
    assert batch.slot_mapping.tolist() == slots
    assert batch.block_table.shape[0] == len(seqs)
    for row, seq, seq_len in zip(batch.block_table.tolist(), seqs, seq_lens, strict=True):
        width = -(-seq_len // bs)
        assert row[:width] == manager.block_table(seq)[:width]
    assert batch.max_query_len == max(query_lens)
    assert batch.max_seq_len == max(seq_lens)


def test_dtypes_shapes_and_device():
    manager = make_manager(16, 4)
    batch = manager.build_batch([admit(manager, i, range(i, i + 5)) for i in range(3)])
    assert (
        batch.block_table.dtype == batch.seq_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
    )
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.block_table.shape[0] == 3 and batch.block_table.shape[1] >= 2
    assert [tuple(getattr(batch, name).shape) for name in ARRAYS[1:]] == [(3,), (4,), (3,)]
    for name in ARRAYS:
        assert getattr(batch, name).device.type == "cpu"
    for name in ("max_query_len", "max_seq_len", "common_prefix_len"):
        assert type(getattr(batch, name)) is int


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_default_is_one_query_token_at_the_end(block_size):
    manager = make_manager(64, block_size)
    seqs = [admit(manager, n, range(100 * n, 101 * n)) for n in (1, 3, 4, 5, 8)]
    batch = manager.build_batch(seqs)
    assert_batch(manager, batch, seqs, [1] * 5, [len(seq) - 1 for seq in seqs])


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_prefill_chunks_by_context_lens(block_size):
    manager = make_manager(64, block_size)
    seq = admit(manager, "a", range(13), computed=False)
    for start, q in ((0, 5), (5, 1), (6, 7)):
        batch = manager.build_batch([seq], [q], context_lens=[start])
        assert_batch(manager, batch, [seq], [q], [start])


def test_mixed_prefill_and_decode_and_rows_without_queries():
    manager = make_manager(64, 4)
    seqs = [admit(manager, n, range(100 * n, 101 * n), computed=False) for n in (9, 6, 3)]
    batch = manager.build_batch(seqs, [4, 1, 3], context_lens=[2, 5, 0])
    assert_batch(manager, batch, seqs, [4, 1, 3], [2, 5, 0])
    batch = manager.build_batch(seqs, [0, 1, 0], context_lens=[9, 5, 0])
    assert batch.cu_seqlens_q.tolist() == [0, 0, 1, 1]
    assert batch.seq_lens.tolist() == [9, 6, 0]
    assert batch.slot_mapping.tolist() == slots_of(manager, seqs[1], 5, 6)


def test_an_empty_batch_has_no_rows():
    batch = make_manager(8, 4).build_batch([])
    assert batch.cu_seqlens_q.tolist() == [0]
    assert batch.block_table.shape[0] == len(batch.seq_lens) == len(batch.slot_mapping) == 0
    assert batch.max_query_len == batch.max_seq_len == batch.common_prefix_len == 0


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([2], [9]),
        ([11], [0]),
        ([1], [10]),
        ([-1], [5]),
        ([1], [-1]),
        ([11], None),
        ([1, 1], None),
        ([], None),
    ],
)
def test_tokens_outside_the_sequence_are_refused(query_lens, context_lens):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(10))
    with refused(manager, ValueError):
        manager.build_batch([seq], query_lens, context_lens=context_lens)
    assert_batch(manager, manager.build_batch([seq]), [seq], [1], [9])


def test_wrong_number_of_context_lens_is_refused():
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(10))
    with refused(manager, ValueError, "context_lens"):
        manager.build_batch([seq], [1], context_lens=[0, 1])


def test_a_token_without_a_slot_is_refused():
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(8))
    seq.append_token(8)
    with refused(manager, ValueError, "slot"):
        manager.build_batch([seq])
    inside = admit(manager, "b", range(50, 55))
    inside.append_token(8)  # its block is there, but nobody asked for the slot
    child = inside.fork("c")
    manager.fork(inside, child)
    with refused(manager, ValueError, "slot"):
        manager.build_batch([inside])


def test_tokens_before_the_window_are_refused():
    manager = make_manager(8, 4, sliding_window=4)
    seq = admit(manager, "a", range(13))
    assert -1 in manager.block_table(seq)
    with refused(manager, ValueError):
        manager.build_batch([seq], [13], context_lens=[0])
    batch = manager.build_batch([seq])
    assert min(batch.slot_mapping.tolist()) >= 0


# --- buffers ------------------------------------------------------------------------------------


def values(batch):
    return [getattr(batch, name).tolist() for name in ARRAYS]


def test_a_batch_is_valid_until_the_second_next_one():
    manager = make_manager(64, 2)
    seqs = [admit(manager, i, [i]) for i in range(4)]
    previous = None
    for k in range(12):
        _, batch = manager.step(seqs[: 1 + k % 4], [k] * (1 + k % 4))
        if previous is not None:
            assert values(previous[0]) == previous[1]
            for name in ("block_table", "seq_lens", "slot_mapping"):
                assert getattr(batch, name).data_ptr() != getattr(previous[0], name).data_ptr()
        previous = batch, values(batch)


def test_build_batch_and_step_share_the_two_buffers():
    manager = make_manager(64, 2)
    seqs = [admit(manager, i, [i, 1, 2]) for i in range(3)]
    first = manager.build_batch(seqs)
    kept = values(first)
    _, second = manager.step(seqs, [7, 8, 9])
    assert values(first) == kept
    kept = values(second)
    manager.build_batch(seqs[:1])
    assert values(second) == kept


def test_a_clone_is_kept_for_good():
    manager = make_manager(64, 2)
    seqs = [admit(manager, i, [i, 1, 2]) for i in range(3)]
    batch = manager.build_batch(seqs).clone()
    kept = values(batch), batch.max_query_len, batch.max_seq_len, batch.common_prefix_len
    for k in range(5):
        manager.step(seqs, [k] * 3)
    assert (values(batch), batch.max_query_len, batch.max_seq_len, batch.common_prefix_len) == kept


# --- forms for other kernels --------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_csr_and_token_slots_say_what_the_tables_say(block_size):
    manager = make_manager(80, block_size)
    seqs = [admit(manager, n, range(100 * n, 101 * n)) for n in (1, 3, 4, 5, 8, 16, 17)]
    batch = manager.build_batch(seqs, [0] * 7, context_lens=[1, 3, 4, 5, 8, 0, 17])
    kv_indptr, kv_indices, kv_last_page_len = batch.csr()
    assert kv_indptr.dtype == kv_indices.dtype == kv_last_page_len.dtype == torch.int32
    indptr, slots = batch.token_slots()
    for i, (seq, n) in enumerate(zip(seqs, batch.seq_lens.tolist(), strict=True)):
        blocks = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].tolist()
        assert blocks == manager.block_table(seq)[: -(-n // block_size)]
        assert kv_last_page_len[i] == ((n - 1) % block_size + 1 if n else 0)
        assert slots[indptr[i] : indptr[i + 1]].tolist() == slots_of(manager, seq, 0, n)
    assert len(kv_indices) == kv_indptr[-1] and len(slots) == indptr[-1]


# --- common prefix ------------------------------------------------------------------------------


def test_common_prefix_is_the_leading_blocks_all_rows_share():
    manager = make_manager(32, 4)
    first = admit(manager, "a", range(10))
    assert manager.build_batch([first]).common_prefix_len % 4 == 0
    second = admit(manager, "b", [*range(8), 50, 51])
    third = admit(manager, "c", [*range(4), 60, 61, 62, 63, 64])
    assert manager.build_batch([first, second]).common_prefix_len == 8
    assert manager.build_batch([first, second, third]).common_prefix_len == 4
    assert manager.build_batch([third, first]).common_prefix_len == 4
    stranger = admit(manager, "d", range(70, 80))
    assert manager.build_batch([first, second, stranger]).common_prefix_len == 0


def test_no_query_row_lies_before_the_common_prefix():
    # The kernel's promise: rows of a prefill may start inside blocks that all sequences share.
    manager = make_manager(32, 4)
    parent = admit(manager, "a", range(12))
    child = parent.fork("b")
    manager.fork(parent, child)
    for q in range(1, 13):
        batch = manager.build_batch([parent, child], [q, 1], context_lens=[12 - q, 11])
        assert batch.common_prefix_len % 4 == 0
        assert batch.common_prefix_len <= 12 - q


def test_the_common_prefix_follows_forks_steps_and_trims():
    manager = make_manager(64, 2)
    parent = admit(manager, "a", range(6))
    child = parent.fork("b")
    manager.fork(parent, child)
    for k in range(5):
        _, batch = manager.step([parent, child], [10 + k, 20 + k])
        assert batch.common_prefix_len == 6
    manager.trim(parent, 3)
    manager.trim(child, 6)
    _, batch = manager.step([parent, child], [1, 2])
    assert batch.common_prefix_len == 2


def test_a_window_ends_the_common_prefix_where_blocks_are_gone():
    manager = make_manager(64, 2, sliding_window=4)
    parent = admit(manager, "a", range(10))
    child = parent.fork("b")
    manager.fork(parent, child)
    _, batch = manager.step([parent, child], [1, 2])
    leading = batch.common_prefix_len // 2
    rows = batch.block_table.tolist()
    assert rows[0][:leading] == rows[1][:leading]
    assert leading == 0 or min(rows[0][:leading]) >= 0
