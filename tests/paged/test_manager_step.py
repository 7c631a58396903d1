"""step: one token for each sequence, all or nothing, rows in any order."""

import random

import pytest
import torch
from manager_helpers import admit, check_rows, grow, make_manager, refused

from paged import NoFreeBlocksError, Sequence, SequenceGroup


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
