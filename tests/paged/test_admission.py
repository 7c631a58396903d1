"""Admission is the truth: can_X says yes exactly when X succeeds, and never is not later."""

import pytest
from manager_helpers import admit, grow, make_manager, refused

from paged import (
    AllocStatus,
    AlreadyAllocatedError,
    NoFreeBlocksError,
    NotAllocatedError,
    Sequence,
    SequenceGroup,
)

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def fresh(num_tokens, seq_id="new", first=1000):
    return Sequence(seq_id, range(first, first + num_tokens))


# --- allocate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.25, 0.9])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_exact_fit_in_an_empty_pool_is_ok_whatever_the_watermark(watermark, prefix_caching):
    manager = make_manager(10, 16, watermark=watermark, enable_prefix_caching=prefix_caching)
    assert manager.can_allocate(fresh(160)) is OK
    assert manager.can_allocate(fresh(161)) is NEVER
    manager.allocate(fresh(160))
    assert manager.stats().gpu.num_free == 0


def test_no_space_now_is_not_no_space_ever():
    manager = make_manager(10, 16)
    holder = admit(manager, "holder", range(16))
    assert manager.can_allocate(fresh(160)) is LATER
    assert manager.can_allocate(fresh(161)) is NEVER
    assert manager.can_allocate(fresh(144)) is OK
    manager.free(holder)
    assert manager.can_allocate(fresh(160)) is OK


def test_the_error_of_an_impossible_request_carries_the_numbers():
    manager = make_manager(10, 16)
    with refused(manager, NoFreeBlocksError, "11") as caught:
        manager.allocate(fresh(161))
    assert caught.value.needed == 11
    assert caught.value.available == 10


def test_the_error_of_a_request_that_must_wait_carries_the_numbers():
    manager = make_manager(10, 16)
    admit(manager, "holder", range(40))
    with refused(manager, NoFreeBlocksError, "8") as caught:
        manager.allocate(fresh(128))
    assert (caught.value.needed, caught.value.available) == (8, 7)


@pytest.mark.parametrize(
    ("watermark", "kept"), [(0.0, 0), (0.01, 0), (0.1, 2), (0.149, 2), (0.15, 3), (0.5, 10)]
)
def test_watermark_keeps_whole_blocks_free_while_something_holds_blocks(watermark, kept):
    manager = make_manager(20, 4, watermark=watermark)
    holder = admit(manager, "holder", range(4))
    largest = 19 - kept
    assert manager.can_allocate(fresh(4 * largest)) is OK
    assert manager.can_allocate(fresh(4 * largest + 1)) is LATER
    manager.free(holder)
    assert manager.can_allocate(fresh(80)) is OK


def test_watermark_does_not_count_an_empty_or_a_swapped_sequence_as_holding():
    manager = make_manager(8, 4, watermark=0.5, num_cpu_blocks=8)
    holder = admit(manager, "holder", range(8))
    assert manager.can_allocate(fresh(32)) is LATER
    manager.swap_out(SequenceGroup("r", [holder]))
    assert manager.can_allocate(fresh(32)) is OK


def test_watermark_error_says_more_is_needed_than_available():
    manager = make_manager(10, 4, watermark=0.3)
    admit(manager, "holder", range(16))
    assert manager.can_allocate(fresh(16)) is LATER
    with refused(manager, NoFreeBlocksError) as caught:
        manager.allocate(fresh(16))
    assert caught.value.needed > caught.value.available >= 0


def test_watermark_is_not_kept_from_running_sequences():
    manager = make_manager(4, 4, watermark=0.5)
    seq = admit(manager, "a", range(8))
    assert manager.can_append_slots(seq, 8)
    grow(manager, seq, range(8))
    assert manager.stats().gpu.num_free == 0


@pytest.mark.parametrize("lookahead", [0, 1, 3, 4, 5, 24, 25])
def test_lookahead_slots_count_in_can_allocate(lookahead):
    manager = make_manager(8, 4)
    seq = fresh(7)
    blocks = -(-(7 + lookahead) // 4)
    assert manager.can_allocate(seq, num_lookahead_slots=lookahead) is (
        OK if blocks <= 8 else NEVER
    )
    admit(manager, "holder", range(8))
    status = OK if blocks <= 6 else LATER if blocks <= 8 else NEVER
    assert manager.can_allocate(seq, num_lookahead_slots=lookahead) is status


def test_prefix_hits_held_by_others_cost_no_block():
    manager = make_manager(5, 4)
    admit(manager, "a", range(16))
    twin = Sequence("b", [*range(16), 99])
    assert manager.can_allocate(twin) is OK
    manager.allocate(twin)
    assert manager.num_cached_tokens(twin) == 16
    assert manager.stats().gpu.num_free == 0


def test_free_hit_blocks_are_not_counted_as_available_too():
    # Needs 4 blocks; two hits lie in the free list. Five free: 2 hits + 2 of the other 3.
    for spare, status in ((3, OK), (2, OK), (1, LATER), (0, LATER)):
        manager = make_manager(2 + 3, 2)
        manager.free(admit(manager, "a", [1, 2, 3, 4]))
        if spare < 3:
            admit(manager, "filler", range(100, 100 + 2 * (3 - spare)), computed=False)
        wanted = Sequence("b", [1, 2, 3, 4, 5, 6, 7, 8])
        assert manager.can_allocate(wanted) is status
        if status is OK:
            manager.allocate(wanted)
            assert manager.num_cached_tokens(wanted) == 4
            assert len(set(manager.block_table(wanted))) == 4
        else:
            with refused(manager, NoFreeBlocksError):
                manager.allocate(wanted)


def test_hits_do_not_make_a_request_larger_than_the_pool_possible():
    manager = make_manager(4, 4)
    admit(manager, "a", range(16))
    assert manager.can_allocate(Sequence("b", range(17))) is NEVER


def test_can_allocate_changes_nothing_and_may_be_asked_any_number_of_times():
    manager = make_manager(6, 4)
    manager.free(admit(manager, "a", range(12)))
    before = manager.snapshot()
    for length in (1, 11, 12, 13, 24, 25):
        for _ in range(3):
            manager.can_allocate(Sequence("b", range(length)))
    assert manager.snapshot() == before


def test_allocating_twice_is_refused():
    manager = make_manager(6, 4)
    seq = admit(manager, "a", range(6))
    with refused(manager, AlreadyAllocatedError, "a"):
        manager.allocate(seq)
    with refused(manager, AlreadyAllocatedError, "a"):
        manager.allocate(Sequence("a", [7]))


def test_an_id_is_free_for_use_again_after_free():
    manager = make_manager(6, 4)
    manager.free(admit(manager, "a", range(6)))
    again = admit(manager, "a", range(10))
    assert len(manager.block_table(again)) == 3


# --- groups -------------------------------------------------------------------------------------


def test_a_group_shares_one_allocation():
    manager = make_manager(4, 4)
    seqs = [Sequence(i, range(10)) for i in range(3)]
    group = SequenceGroup("r", seqs)
    assert manager.can_allocate(group) is OK
    manager.allocate(group)
    tables = [manager.block_table(seq) for seq in seqs]
    assert tables[0] == tables[1] == tables[2]
    assert manager.stats().gpu.num_used == 3
    for seq in seqs:
        manager.free(seq)
    assert manager.stats().gpu.num_used == 0


def test_sequences_of_a_group_must_have_equal_tokens():
    manager = make_manager(8, 4)
    group = SequenceGroup("r", [Sequence(0, [1, 2]), Sequence(1, [1, 3])])
    with refused(manager, ValueError):
        manager.allocate(group)


def test_a_group_with_an_allocated_member_is_refused_whole():
    manager = make_manager(8, 4)
    seq = admit(manager, "a", [1, 2])
    with refused(manager, AlreadyAllocatedError, "a"):
        manager.allocate(SequenceGroup("r", [Sequence("b", [1, 2]), seq]))
    with pytest.raises(NotAllocatedError):
        manager.block_table(Sequence("b", [1, 2]))


@pytest.mark.parametrize("free_blocks", [0, 1, 2, 3])
def test_append_for_a_group_counts_one_copy_less_than_members(free_blocks):
    # Three members share a partial tail: two must copy, the last one then holds it alone.
    manager = make_manager(2 + free_blocks, 4)
    seqs = [Sequence(i, range(6)) for i in range(3)]
    group = SequenceGroup("r", seqs)
    manager.allocate(group)
    for i, seq in enumerate(seqs):
        seq.append_token(100 + i)
    assert manager.can_append_slots(group) is (free_blocks >= 2)
    if free_blocks >= 2:
        copies = [pair for seq in seqs for pair in manager.append_slots(seq)]
        assert len(copies) == 2
        assert manager.stats().gpu.num_free == free_blocks - 2
        assert len({manager.block_table(seq)[1] for seq in seqs}) == 3


# --- append -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_append_needs_a_block_exactly_when_the_token_opens_one(length, spare, block_size):
    blocks = -(-length // block_size)
    manager = make_manager(blocks + spare, block_size)
    seq = admit(manager, "a", range(length))
    seq.append_token(7)
    opens_a_block = length % block_size == 0
    possible = spare == 1 or not opens_a_block
    assert manager.can_append_slots(seq) is possible
    if possible:
        assert manager.append_slots(seq) == []
        assert len(manager.block_table(seq)) == blocks + opens_a_block
    else:
        with refused(manager, NoFreeBlocksError) as caught:
            manager.append_slots(seq)
        assert (caught.value.needed, caught.value.available) == (1, 0)


def test_a_refused_append_leaves_a_sequence_that_can_go_on_later():
    manager = make_manager(3, 4)
    seq = admit(manager, "a", range(8))
    other = admit(manager, "b", range(50, 54))
    before = manager.block_table(seq)
    seq.append_token(8)
    with refused(manager, NoFreeBlocksError):
        manager.append_slots(seq)
    manager.free(other)
    assert manager.can_append_slots(seq)
    assert manager.append_slots(seq) == []
    assert manager.block_table(seq)[:2] == before
    assert len(manager.block_table(seq)) == 3


@pytest.mark.parametrize("lookahead", range(12))
def test_can_append_slots_with_lookahead_is_exact(lookahead):
    manager = make_manager(4, 4)
    seq = admit(manager, "a", range(7))
    possible = -(-(7 + lookahead) // 4) <= 4
    assert manager.can_append_slots(seq, lookahead) is possible
    if possible:
        manager.append_slots(seq, lookahead)
    else:
        with refused(manager, NoFreeBlocksError):
            manager.append_slots(seq, lookahead)


def test_can_append_counts_the_copy_of_a_shared_tail():
    manager = make_manager(2, 4)
    seq = admit(manager, "a", range(6))
    child = seq.fork("b")
    manager.fork(seq, child)
    child.append_token(9)
    assert not manager.can_append_slots(child)
    with refused(manager, NoFreeBlocksError):
        manager.append_slots(child)
    manager.free(seq)
    assert manager.can_append_slots(child)
    assert manager.append_slots(child) == []


def test_can_append_may_evict_cached_blocks():
    manager = make_manager(2, 4)
    manager.free(admit(manager, "old", range(4)))
    seq = admit(manager, "a", range(50, 54))
    seq.append_token(54)
    assert manager.stats().gpu.num_cached == 1
    assert manager.can_append_slots(seq)
    manager.append_slots(seq)
    assert manager.stats().gpu.num_cached == 0


# --- free ---------------------------------------------------------------------------------------


def test_free_is_refused_twice_and_for_strangers():
    manager = make_manager(4, 4)
    seq = admit(manager, "a", range(5))
    manager.free(seq)
    with refused(manager, NotAllocatedError, "a"):
        manager.free(seq)
    with refused(manager, NotAllocatedError, "stranger"):
        manager.free(Sequence("stranger", [1]))


@pytest.mark.parametrize("name", ["block_table", "append_slots", "num_cached_tokens", "free"])
def test_calls_on_an_unknown_sequence_name_it(name):
    manager = make_manager(4, 4)
    with refused(manager, NotAllocatedError, "nobody"):
        getattr(manager, name)(Sequence("nobody", [1]))


def test_mark_trim_fork_and_batches_of_an_unknown_sequence_name_it():
    manager = make_manager(4, 4)
    known, nobody = admit(manager, "known", [1]), Sequence("nobody", [1])
    for call in (
        lambda: manager.mark_computed(nobody, 1),
        lambda: manager.trim(nobody, 0),
        lambda: manager.fork(nobody, nobody.fork("child")),
        lambda: manager.build_batch([known, nobody]),
        lambda: manager.step([known, nobody], [1, 2]),
        lambda: manager.swap_out(SequenceGroup("r", [nobody])),
        lambda: manager.swap_in(SequenceGroup("r", [nobody])),
    ):
        with refused(manager, NotAllocatedError, "nobody"):
            call()
    assert len(known) == len(nobody) == 1


@pytest.mark.parametrize("name", ["salt", "extra_key"])
def test_a_group_whose_members_may_not_share_is_refused_whole(name):
    manager = make_manager(8, 4)
    seqs = [Sequence(k, [1, 2, 3], **{name: k}) for k in (1, 2)]
    with refused(manager, ValueError):
        manager.allocate(SequenceGroup("r", seqs))
    for seq in seqs:
        with pytest.raises(NotAllocatedError):
            manager.block_table(seq)


def test_a_fork_under_another_salt_is_refused():
    manager = make_manager(8, 4)
    parent = Sequence("a", [1, 2, 3], salt="x")
    manager.allocate(parent)
    with refused(manager, ValueError):
        manager.fork(parent, Sequence("b", [1, 2, 3], salt="y"))
    with pytest.raises(NotAllocatedError):
        manager.block_table(Sequence("b", [1, 2, 3], salt="y"))


@pytest.mark.parametrize("bad", [1.5, "2", None])
def test_counts_of_tokens_are_ints(bad):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(6), computed=False)
    for call in (
        lambda: manager.mark_computed(seq, bad),
        lambda: manager.trim(seq, bad),
        lambda: manager.build_batch([seq], [bad]),
        lambda: manager.build_batch([seq], [1], context_lens=[bad]),
    ):
        with refused(manager, (TypeError, ValueError)):
            call()
    assert len(seq) == 6
