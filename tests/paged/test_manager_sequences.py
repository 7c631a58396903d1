"""One sequence's life between allocate and free: append, fork, trim, window."""

import pytest
from manager_helpers import admit, cached_tokens, constant_hash, grow, make_manager, refused

from paged import (
    AlreadyAllocatedError,
    NoFreeBlocksError,
    NotAllocatedError,
    Sequence,
    SequenceGroup,
)


@pytest.fixture(params=[None, constant_hash], ids=["xxhash", "constant"])
def hash_fn(request):
    return request.param


@pytest.fixture(params=[1, 2, 4, 16])
def block_size(request):
    return request.param


# --- append -------------------------------------------------------------------------------------


def test_many_tokens_may_be_appended_before_one_append_slots(block_size):
    manager = make_manager(40, block_size)
    seq = admit(manager, "a", range(3))
    for token in range(2 * block_size + 1):
        seq.append_token(token)
    before = manager.block_table(seq)
    assert manager.append_slots(seq) == []
    table = manager.block_table(seq)
    assert len(table) == -(-len(seq) // block_size)
    assert table[: len(before)] == before
    assert len(set(table)) == len(table)


def test_appending_again_is_a_no_op(block_size):
    manager = make_manager(40, block_size)
    seq = admit(manager, "a", range(3))
    child = seq.fork("b")
    manager.fork(seq, child)
    child.append_token(9)
    manager.append_slots(child, 2)
    before = manager.snapshot()
    for lookahead in (0, 1, 2):
        assert manager.append_slots(child, lookahead) == []
        assert manager.snapshot() == before
    for _ in range(2):
        assert manager.append_slots(seq) == []
        assert manager.snapshot() == before


@pytest.mark.parametrize("bad", [-1, 1.5, "2"])
def test_a_senseless_lookahead_is_refused(bad):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(3))
    for call in (
        lambda: manager.append_slots(seq, bad),
        lambda: manager.can_append_slots(seq, bad),
        lambda: manager.can_allocate(Sequence("b", [1]), bad),
    ):
        with refused(manager, (ValueError, TypeError), "num_lookahead_slots"):
            call()


def test_only_trim_may_shorten_a_sequence():
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(6))
    token = seq.token_ids.pop()
    assert not manager.can_append_slots(seq)
    with pytest.raises(ValueError, match="trim"):
        manager.append_slots(seq)
    with pytest.raises(ValueError, match="'a'"):
        manager.step([seq], [1])
    seq.token_ids.append(token)
    assert manager.append_slots(seq) == []
    manager.check_invariants()


def test_block_table_is_a_copy():
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(6))
    manager.block_table(seq).clear()
    assert len(manager.block_table(seq)) == 2


def test_the_worked_example_of_a_refused_fourth_block():
    # Six blocks of 16; A holds 64 tokens, B shares A's first 16 and needs one more block.
    manager = make_manager(6, 16)
    a = admit(manager, "A", range(64))
    b = admit(manager, "B", [*range(16), *range(100, 116)])
    assert manager.num_cached_tokens(b) == 16
    assert manager.stats().gpu.num_used == 5
    grow(manager, b, range(16))
    b.append_token(1)
    assert not manager.can_append_slots(b)
    with refused(manager, NoFreeBlocksError):
        manager.append_slots(b)
    table = manager.block_table(a)
    manager.free(a)
    assert manager.stats().gpu.num_free == 3
    assert manager.append_slots(b) == []
    assert manager.block_table(b)[0] == table[0]
    assert manager.block_table(b)[3] in table[1:]


# --- fork ---------------------------------------------------------------------------------------


def test_a_fork_shares_every_block_and_costs_none(block_size):
    manager = make_manager(40, block_size)
    parent = admit(manager, "a", range(7))
    used = manager.stats().gpu.num_used
    family = [parent]
    for i in range(5):
        child = family[-1].fork(i)
        manager.fork(family[-1], child)
        family.append(child)
    assert {tuple(manager.block_table(seq)) for seq in family} == {
        tuple(manager.block_table(parent))
    }
    assert manager.stats().gpu.num_used == used
    for seq in family:
        manager.free(seq)
    assert manager.stats().gpu.num_used == 0


def test_a_fork_of_another_length_is_refused():
    manager = make_manager(8, 4)
    parent = admit(manager, "a", range(6))
    for tokens in (range(5), range(7), []):
        child = Sequence("b", tokens)
        with refused(manager, ValueError, "b"):
            manager.fork(parent, child)
        with pytest.raises(NotAllocatedError):
            manager.block_table(child)


def test_a_fork_onto_a_live_id_is_refused():
    manager = make_manager(8, 4)
    parent, other = admit(manager, "a", range(6)), admit(manager, "b", range(6))
    with refused(manager, AlreadyAllocatedError, "b"):
        manager.fork(parent, other)
    with refused(manager, AlreadyAllocatedError, "a"):
        manager.fork(parent, parent)


def test_a_long_chain_of_forks_needs_no_recursion():
    manager = make_manager(2048, 1)
    parent = admit(manager, 0, range(2000))
    for i in range(1, 200):
        child = parent.fork(i)
        manager.fork(parent, child)
        manager.free(parent)
        parent = child
    assert manager.stats().gpu.num_used == 2000


def test_a_fork_knows_what_its_parent_computed(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    parent = admit(manager, "a", range(8), computed=False)
    manager.mark_computed(parent, 4)
    child = parent.fork("b")
    manager.fork(parent, child)
    manager.free(parent)
    assert cached_tokens(manager, [*range(8), 9]) == 4
    manager.mark_computed(child, 8)
    assert cached_tokens(manager, [*range(8), 9]) == 8


def test_forks_of_a_sequence_with_reserved_slots_do_not_share_what_they_write(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    parent = admit(manager, "a", range(6))
    manager.append_slots(parent, 5)
    child = parent.fork("b")
    manager.fork(parent, child)
    for seq, first in ((parent, 100), (child, 200)):
        grow(manager, seq, range(first, first + 6))
    tables = manager.block_table(parent), manager.block_table(child)
    assert tables[0][0] == tables[1][0]
    assert not set(tables[0][1:]) & set(tables[1][1:])
    manager.free(parent)
    manager.free(child)
    assert manager.stats().gpu.num_used == 0


# --- trim ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_may_share_a_part_and_differ_behind_it(caching, hash_fn):
    manager = make_manager(8, 4, enable_prefix_caching=caching, hash_fn=hash_fn)
    parent = admit(manager, "p", range(11), computed=False)
    manager.mark_computed(parent, 6)
    child = Sequence("c", [*range(8), 90, 91, 92, 93, 94])
    manager.fork(parent, child, 8)
    ours, theirs = manager.block_table(child), manager.block_table(parent)
    assert ours[:2] == theirs[:2] and not set(ours[2:]) & set(theirs) and len(ours) == 4
    manager.build_batch([child], [7], context_lens=[6])  # each of its tokens has a slot
    manager.mark_computed(child, 13)
    child.append_token(95)
    assert manager.append_slots(child) == []
    manager.check_invariants()
    manager.free(parent)
    manager.free(child)
    assert manager.stats().gpu.num_used == 0
    assert cached_tokens(manager, [*range(8), 90, 91, 92, 93, 94]) == 12 * caching


def test_a_part_may_be_nothing_and_the_child_shorter_than_its_parent():
    manager = make_manager(8, 4)
    parent = admit(manager, "p", range(11))
    manager.fork(parent, Sequence("nothing", [7, 8]), 0)
    manager.fork(parent, Sequence("short", range(8)), 8)
    assert manager.stats().gpu.num_used == 3 + 1


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "message"),
    [
        (range(9), 6, "num_tokens is 6; it must be a multiple of the block size 4"),
        (range(9), -4, "num_tokens is -4; it must be an int >= 0"),
        (range(6), 8, "num_tokens is 8; parent 'p' has slots for 11 tokens, child 'c' has 6"),
        (range(16), 12, "num_tokens is 12; parent 'p' has slots for 11 tokens"),
        ([0, 1, 2, 9, 4], 4, "num_tokens is 4; parent 'p' and child 'c' differ before that"),
    ],
)
def test_a_senseless_part_is_refused(tokens, num_tokens, message):
    manager = make_manager(8, 4)
    parent = admit(manager, "p", range(11))
    with refused(manager, ValueError, message):
        manager.fork(parent, Sequence("c", tokens), num_tokens)


def test_a_part_behind_the_window_is_refused():
    manager = make_manager(8, 4, sliding_window=3)
    parent = admit(manager, "p", range(12))
    with refused(manager, ValueError, "child 'c' would need a block that parent 'p' dropped"):
        manager.fork(parent, Sequence("c", [0, 1, 2, 3, 9]), 4)
    manager.fork(parent, Sequence("c", [*range(12), 9]), 12)


def test_a_fork_that_shares_a_part_needs_blocks_for_the_rest():
    manager = make_manager(5, 4)
    parent = admit(manager, "p", range(11))
    child = Sequence("c", [*range(8), *range(90, 99)])
    with refused(manager, NoFreeBlocksError, "3 blocks needed, 2 available"):
        manager.fork(parent, child, 8)
    manager.fork(parent, Sequence("c", child.token_ids[:16]), 8)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9, 12])
def test_trim_cuts_tokens_table_and_computed_count(length, hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(12))
    table = manager.block_table(seq)
    manager.trim(seq, length)
    assert list(seq.token_ids) == list(range(length))
    assert manager.block_table(seq) == table[: -(-length // 4)]
    manager.check_invariants()
    if length < 12:
        seq.append_token(99)
        manager.append_slots(seq)
        # The new token is not written yet: no block that holds it may be found.
        assert cached_tokens(manager, [*range(length), 99, 7, 7, 7, 7]) <= length // 4 * 4
        manager.mark_computed(seq, length + 1)
    manager.free(seq)
    assert manager.stats().gpu.num_used == 0


@pytest.mark.parametrize("bad", [13, 100, -1])
def test_trim_to_a_senseless_length_is_refused(bad):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(12))
    with refused(manager, ValueError, str(bad)):
        manager.trim(seq, bad)
    assert len(seq) == 12


def test_a_published_tail_held_alone_is_withdrawn(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(8))
    table = manager.block_table(seq)
    manager.trim(seq, 6)
    assert cached_tokens(manager, [*range(8), 9]) == 4
    assert grow(manager, seq, [60, 70]) == []
    assert manager.block_table(seq) == table
    assert cached_tokens(manager, [*range(6), 60, 70, 9]) == 8
    assert cached_tokens(manager, [*range(8), 9]) == 4


def test_a_published_tail_held_by_another_is_copied_on_the_next_append(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(8))
    other = admit(manager, "b", [*range(8), 50])
    table = manager.block_table(seq)
    manager.trim(seq, 6)
    assert manager.block_table(seq) == table
    assert cached_tokens(manager, [*range(8), 9]) == 8
    ((source, destination),) = grow(manager, seq, [60])
    assert source == table[1] and destination == manager.block_table(seq)[1] != source
    assert manager.block_table(other)[:2] == table
    assert cached_tokens(manager, [*range(8), 9]) == 8


def test_blocks_cut_off_stay_cached_while_their_prefix_is(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(12))
    manager.trim(seq, 8)
    assert manager.stats().gpu.num_cached == 1
    assert cached_tokens(manager, [*range(12), 9]) == 12


def test_what_lies_behind_a_withdrawn_block_is_not_reusable(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(12))
    manager.trim(seq, 6)
    assert cached_tokens(manager, [*range(12), 9]) == 4
    grow(manager, seq, [66, 77, 8, 9, 10, 11])
    assert cached_tokens(manager, [*range(6), 66, 77, 8, 9, 10, 11, 5]) == 12
    assert cached_tokens(manager, [*range(12), 9]) == 4


def test_trim_takes_back_tokens_whose_append_was_refused():
    manager = make_manager(2, 4)
    seq = admit(manager, "a", range(8))
    table = manager.block_table(seq)
    seq.append_token(8)
    with refused(manager, NoFreeBlocksError):
        manager.append_slots(seq)
    manager.trim(seq, 8)
    assert list(seq.token_ids) == list(range(8)) and manager.block_table(seq) == table


def test_trim_to_nothing_and_grow_again(block_size):
    manager = make_manager(40, block_size)
    seq = admit(manager, "a", range(9))
    manager.trim(seq, 0)
    assert manager.block_table(seq) == [] and manager.stats().gpu.num_used == 0
    grow(manager, seq, range(5))
    assert len(manager.block_table(seq)) == -(-5 // block_size)


# --- window -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_are_given_back_exactly_when_no_later_query_sees_them(block_size, window, caching):
    manager = make_manager(64, block_size, sliding_window=window, enable_prefix_caching=caching)
    seq = admit(manager, "a", range(20), computed=False)
    full = manager.block_table(seq)
    for n in range(21):
        manager.mark_computed(seq, n)
        gone = [(k + 1) * block_size <= n - window + 1 for k in range(len(full))]
        table = manager.block_table(seq)
        assert table == [-1 if drop else block for drop, block in zip(gone, full, strict=True)]
        assert manager.stats().gpu.num_used == len(full) - sum(gone)
    manager.check_invariants()


def test_a_table_behind_a_window_keeps_its_length():
    manager = make_manager(8, 4, sliding_window=8)
    seq = admit(manager, "a", range(20))
    table = manager.block_table(seq)
    assert len(table) == 5 and table[:3] == [-1, -1, -1] and min(table[3:]) >= 0


def test_append_slots_never_gives_blocks_back():
    manager = make_manager(16, 4, sliding_window=4)
    seq = admit(manager, "a", range(4))
    for token in range(12):
        seq.append_token(token)
    manager.append_slots(seq)
    assert min(manager.block_table(seq)) >= 0
    manager.mark_computed(seq, 16)
    assert manager.block_table(seq)[:3] == [-1, -1, -1]


def test_a_window_lets_a_sequence_outgrow_the_pool():
    manager = make_manager(3, 4, sliding_window=5)
    seq = admit(manager, "a", range(4))
    for token in range(100):
        manager.step([seq], [token])
    assert len(seq) == 104
    assert manager.stats().gpu.num_used <= 3
    assert manager.block_table(seq)[:20] == [-1] * 20


@pytest.mark.parametrize("length", range(21))
def test_trim_into_a_dropped_window_is_refused(length):
    window, bs = 6, 4
    manager = make_manager(16, bs, sliding_window=window)
    seq = admit(manager, "a", range(20))
    table = manager.block_table(seq)
    needed = [
        k for k in range(-(-length // bs)) if not (k + 1) * bs <= length - window + 1
    ]  # blocks that the next query, at position `length`, can still see
    if any(table[k] < 0 for k in needed):
        with refused(manager, ValueError, "window"):
            manager.trim(seq, length)
        assert len(seq) == 20
    else:
        manager.trim(seq, length)
        assert manager.block_table(seq) == table[: -(-length // bs)]


def test_forks_drop_their_windows_one_by_one():
    manager = make_manager(16, 2, sliding_window=2)
    parent = admit(manager, "a", range(6), computed=False)
    child = parent.fork("b")
    manager.fork(parent, child)
    manager.mark_computed(parent, 6)
    assert manager.block_table(parent)[:2] == [-1, -1]
    assert min(manager.block_table(child)) >= 0
    assert manager.stats().gpu.num_used == 3
    manager.mark_computed(child, 6)
    assert manager.stats().gpu.num_used == 1
    late = child.fork("c")
    manager.fork(child, late)
    assert manager.block_table(late) == manager.block_table(child)
    manager.check_invariants()


def test_dropped_blocks_stay_cached(hash_fn):
    manager = make_manager(16, 2, sliding_window=2, hash_fn=hash_fn)
    seq = admit(manager, "a", range(8))
    assert manager.block_table(seq)[:3] == [-1, -1, -1]
    assert manager.stats().gpu.num_cached == 3
    assert cached_tokens(manager, [*range(8), 9]) == 8


def test_recycled_blocks_behind_a_window_are_not_named_any_more():
    manager = make_manager(5, 4, sliding_window=4, enable_prefix_caching=False)
    seq = admit(manager, "a", range(12))
    kept = [block for block in manager.block_table(seq) if block >= 0]
    thief = admit(manager, "thief", range(100, 112))
    assert not set(manager.block_table(thief)) & set(kept)
    manager.free(seq)
    manager.free(thief)
    assert manager.stats().gpu.num_used == 0


def test_swap_keeps_what_was_dropped_dropped():
    manager = make_manager(8, 4, sliding_window=4, num_cpu_blocks=8)
    seq = admit(manager, "a", range(14))
    table = manager.block_table(seq)
    group = SequenceGroup("r", [seq])
    assert len(manager.swap_out(group)) == sum(block >= 0 for block in table)
    manager.swap_in(group)
    back = manager.block_table(seq)
    assert [block < 0 for block in back] == [block < 0 for block in table]
