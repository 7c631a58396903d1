"""Batches: every array from the tables, rows in any order, buffers that are still there."""

import random

import pytest
import torch
from manager_helpers import admit, grow, make_manager, refused

from paged import NoFreeBlocksError, Sequence

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


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("sliding_window", [None, 1, 6])
def test_rows_join_leave_and_change_order(block_size, caching, sliding_window):
    rng = random.Random(3)
    manager = make_manager(
        400, block_size, enable_prefix_caching=caching, sliding_window=sliding_window
    )
    live, key = [], 0
    for _ in range(150):
        while len(live) < rng.randrange(1, 9):
            length = rng.randrange(1, 20)
            live.append(admit(manager, key, [rng.randrange(50) for _ in range(length)]))
            key += 1
        for _ in range(rng.randrange(2)):
            if len(live) > 1:
                manager.free(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.2:
            parent = rng.choice(live)
            live.append(parent.fork(key))
            manager.fork(parent, live[-1])
            key += 1
        if rng.random() < 0.2 and sliding_window is None:
            seq = rng.choice(live)
            manager.trim(seq, rng.randrange(1, len(seq) + 1))
        if rng.random() < 0.1:  # blocks in use move below the new end
            manager.resize(rng.randrange(manager.stats().gpu.num_used + 40, 400))
        rng.shuffle(live)
        rows = live[: rng.randrange(1, len(live) + 1)]
        lengths = [len(seq) for seq in rows]
        tokens = [rng.randrange(50) for _ in rows]
        _, batch = manager.step(rows, tokens)
        assert [seq.token_ids[-1] for seq in rows] == tokens
        check_rows(manager, batch, rows, lengths)
        if rng.random() < 0.2:
            row = rng.choice(rows)
            batch = manager.build_batch([row])
            check_rows(manager, batch, [row], [len(row) - 1])
    manager.check_invariants()


def check_rows(manager, batch, rows, context_lens):
    bs = manager.config.block_size
    assert batch.seq_lens.tolist() == [c + 1 for c in context_lens]
    assert batch.cu_seqlens_q.tolist() == list(range(len(rows) + 1))
    assert batch.slot_mapping.tolist() == [
        manager.block_table(seq)[c // bs] * bs + c % bs
        for seq, c in zip(rows, context_lens, strict=True)
    ]
    for row, seq in zip(batch.block_table.tolist(), rows, strict=True):
        table = manager.block_table(seq)
        seen = [k for k, block in enumerate(table) if block >= 0]
        assert [row[k] for k in seen] == [table[k] for k in seen]


def test_step_is_all_or_nothing():
    manager = make_manager(7, 4)
    seqs = [admit(manager, i, range(10 * i, 10 * i + 8)) for i in range(3)]
    tables = [manager.block_table(seq) for seq in seqs]
    with refused(manager, NoFreeBlocksError) as caught:
        manager.step(seqs, [1, 2, 3])
    assert (caught.value.needed, caught.value.available) == (3, 1)
    assert [len(seq) for seq in seqs] == [8, 8, 8]
    assert [manager.block_table(seq) for seq in seqs] == tables
    copies, batch = manager.step(seqs[1:2], [5])
    assert copies == [] and batch.seq_lens.tolist() == [9]


def test_a_refused_step_publishes_and_drops_nothing():
    manager = make_manager(4, 2, sliding_window=2)
    seqs = [admit(manager, i, [i, 1], computed=False) for i in range(4)]
    with refused(manager, NoFreeBlocksError):
        manager.step(seqs, [1] * 4)
    assert all(-1 not in manager.block_table(seq) for seq in seqs)
    assert manager.stats().gpu.num_used == 4


def test_a_refused_step_makes_no_copies():
    manager = make_manager(4, 4)
    parent = admit(manager, 0, range(6))
    family = [parent, *(parent.fork(i) for i in (1, 2, 3))]
    for child in family[1:]:
        manager.fork(parent, child)
    with refused(manager, NoFreeBlocksError) as caught:
        manager.step(family, [1, 2, 3, 4])
    assert (caught.value.needed, caught.value.available) == (3, 2)
    copies, batch = manager.step(family[:2], [1, 2])
    assert len(copies) == 2
    assert (
        {source for source, _ in copies} == {manager.block_table(parent.fork("x"))[1]} if 0 else 1
    )
    assert len(set(batch.slot_mapping.tolist())) == 2


def test_step_copies_a_shared_tail_for_all_but_the_last():
    manager = make_manager(8, 4)
    parent = admit(manager, 0, range(6))
    child = parent.fork(1)
    manager.fork(parent, child)
    tail = manager.block_table(parent)[1]
    copies, batch = manager.step([parent, child], [100, 200])
    ((source, destination),) = copies
    assert source == tail
    tables = manager.block_table(parent), manager.block_table(child)
    assert {tables[0][1], tables[1][1]} == {tail, destination}
    assert batch.slot_mapping.tolist() == [tables[0][1] * 4 + 2, tables[1][1] * 4 + 2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("spare", [1, 6])
def test_a_step_that_drops_a_shared_tail_takes_no_block_too_many(caching, spare):
    # "b" drops the block behind its window in the same step in which "a" writes to it: no copy.
    manager = make_manager(2 + spare, 2, sliding_window=1, enable_prefix_caching=caching)
    a = admit(manager, "a", [1, 2, 3, 4], computed=False)
    b = a.fork("b")
    manager.fork(a, b)
    manager.trim(a, 3)
    tail = manager.block_table(a)[1]
    copies, _ = manager.step([a, b], [5, 6])
    manager.check_invariants()
    assert copies == [] and manager.block_table(a) == [-1, tail]
    assert manager.block_table(b)[:2] == [-1, -1]
    assert manager.stats().gpu.num_used == 2
    manager.free(a)
    manager.free(b)
    assert manager.stats().gpu.num_used == 0


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], []])
def test_step_wants_one_token_per_sequence(tokens):
    manager = make_manager(8, 4)
    seqs = [admit(manager, i, [i]) for i in range(2)]
    with refused(manager, ValueError, "tokens"):
        manager.step(seqs, tokens)
    assert [len(seq) for seq in seqs] == [1, 1]


def test_step_refuses_the_same_sequence_twice():
    manager = make_manager(8, 4)
    seq, other = admit(manager, "a", [1, 2]), admit(manager, "b", [3])
    with refused(manager, ValueError, "a"):
        manager.step([seq, other, seq], [1, 2, 3])
    assert (len(seq), len(other)) == (2, 1)


@pytest.mark.parametrize("device", ["nonsense", "meta:x", 7.5, torch.float16])
def test_a_device_that_is_not_there_changes_nothing(device):
    manager = make_manager(8, 4)
    parent = admit(manager, "a", [1, 2, 3])
    child = parent.fork("b")
    manager.fork(parent, child)
    for call in (
        lambda: manager.step([parent, child], [4, 5], device=device),
        lambda: manager.build_batch([parent, child], device=device),
    ):
        with refused(manager, (RuntimeError, ValueError, TypeError)):
            call()
    assert (len(parent), len(child)) == (3, 3)
    _, batch = manager.step([parent, child], [4, 5], device=torch.device("cpu"))
    assert batch.seq_lens.tolist() == [4, 4]


def test_a_sequence_named_twice_is_refused_or_served_twice():
    manager = make_manager(16, 2)
    seq, other = admit(manager, "a", [1, 2, 3]), admit(manager, "b", [7])
    for _ in range(4):
        try:
            batch = manager.build_batch([seq, other, seq])
        except ValueError:
            pass
        else:
            check_rows(manager, batch, [seq, other, seq], [len(seq) - 1, len(other) - 1] * 2)
        grow(manager, seq, [4, 5, 6])


def test_a_step_whose_append_token_raises_is_undone():
    class Fussy(Sequence):
        __slots__ = ()

        def append_token(self, token):
            if token == 13:
                raise ValueError("token 13")
            super().append_token(token)

    manager = make_manager(8, 1)
    seqs = []
    for k in range(3):
        seqs.append(Fussy(k, [k]))
        manager.allocate(seqs[-1])
    with refused(manager, ValueError, "13"):
        manager.step(seqs, [1, 2, 13])
    assert [list(seq.token_ids) for seq in seqs] == [[0], [1], [2]]


def test_step_of_nothing_is_an_empty_batch():
    copies, batch = make_manager(8, 4).step([], [])
    assert copies == [] and len(batch.seq_lens) == 0


def test_step_after_single_calls_continues_them():
    manager = make_manager(16, 2)
    seq, twin = admit(manager, "a", [1, 2, 3]), admit(manager, "b", [4, 5, 6])
    manager.step([seq, twin], [4, 7])
    grow(manager, seq, [5, 6])
    manager.trim(twin, 3)
    _, batch = manager.step([seq, twin], [7, 8])
    assert list(seq.token_ids) == [1, 2, 3, 4, 5, 6, 7]
    assert list(twin.token_ids) == [4, 5, 6, 8]
    check_rows(manager, batch, [seq, twin], [6, 3])


def test_step_sees_a_table_that_was_swapped_away_and_back():
    from paged import SequenceGroup

    manager = make_manager(16, 2, num_cpu_blocks=8)
    seq, other = admit(manager, "a", [1, 2, 3]), admit(manager, "b", [4, 5, 6])
    manager.step([seq, other], [4, 7])
    group = SequenceGroup("r", [seq])
    manager.swap_out(group)
    admit(manager, "thief", range(20, 29))
    manager.swap_in(group)
    _, batch = manager.step([seq, other], [5, 8])
    check_rows(manager, batch, [seq, other], [4, 4])


def test_a_new_sequence_under_an_old_id_is_not_the_old_row():
    manager = make_manager(16, 2)
    seq = admit(manager, "a", [1, 2, 3])
    manager.step([seq], [4])
    manager.free(seq)
    admit(manager, "thief", range(20, 26))
    again = admit(manager, "a", [9, 8, 7, 6, 5])
    _, batch = manager.step([again], [4])
    check_rows(manager, batch, [again], [5])


def test_an_object_of_your_own_serves_as_a_sequence():
    class Request:
        def __init__(self, seq_id, tokens):
            self.seq_id, self.token_ids = seq_id, list(tokens)

        def append_token(self, token):
            self.token_ids.append(token)

        def fork(self, seq_id):
            return Request(seq_id, self.token_ids)

        def __len__(self):
            return len(self.token_ids)

    manager = make_manager(16, 2, num_cpu_blocks=8)
    request = Request("mine", [1, 2, 3])
    manager.allocate(request)
    manager.mark_computed(request, 3)
    child = request.fork("child")
    manager.fork(request, child)
    copies, batch = manager.step([request, child], [4, 5])
    assert len(copies) == 1 and request.token_ids == [1, 2, 3, 4]
    check_rows(manager, batch, [request, child], [3, 3])
    manager.trim(child, 2)
    assert child.token_ids == [1, 2]
    twin = Sequence("twin", [1, 2, 3])
    manager.allocate(twin)
    assert manager.num_cached_tokens(twin) == 2


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


@pytest.mark.parametrize("name", ["step", "append_slots", "mark_computed", "trim", "fork"])
def test_another_object_under_a_live_id_is_refused_or_served(name):
    manager = make_manager(16, 2)
    first = admit(manager, "a", [1, 2, 3])
    other = Sequence("a", [1, 2, 3])
    for k in range(4):
        before, tokens = manager.snapshot(), list(other.token_ids)
        if name == "append_slots":
            other.append_token(k)
        call = {
            "step": lambda: manager.step([other], [7]),
            "append_slots": lambda: manager.append_slots(other),
            "mark_computed": lambda: manager.mark_computed(other, len(other)),
            "trim": lambda k=k: manager.trim(other, 2 - min(k, 2)),
            "fork": lambda k=k: manager.fork(other, other.fork(k)),
        }[name]
        try:
            call()
        except ValueError as error:
            assert "'a'" in str(error)
            assert manager.snapshot() == before
            assert name == "append_slots" or list(other.token_ids) == tokens
        manager.check_invariants()
    manager.free(first)
