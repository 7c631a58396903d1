"""Two tiers: what moves, what stays cached, what is refused while a sequence is away."""

import pytest
from manager_helpers import admit, grow, make_manager, refused

from paged import (
    AllocStatus,
    AlreadyAllocatedError,
    NoFreeBlocksError,
    NotAllocatedError,
    NotOnGpuError,
    Sequence,
    SequenceGroup,
)

OK, LATER = AllocStatus.OK, AllocStatus.LATER


@pytest.mark.parametrize("cpu_blocks", [0, 1, 2, 3, 4])
def test_a_full_cpu_tier_is_an_answer_not_a_crash(cpu_blocks):
    manager = make_manager(8, 4, num_cpu_blocks=cpu_blocks)
    group = SequenceGroup("r", [admit(manager, "a", range(10))])
    assert manager.can_swap_out(group) is (cpu_blocks >= 3)
    if cpu_blocks >= 3:
        assert len(manager.swap_out(group)) == 3
    else:
        with refused(manager, NoFreeBlocksError) as caught:
            manager.swap_out(group)
        assert (caught.value.needed, caught.value.available) == (3, cpu_blocks)


@pytest.mark.parametrize("taken", range(9))
def test_swap_in_succeeds_exactly_when_promised(taken):
    manager = make_manager(8, 4, num_cpu_blocks=8)
    group = SequenceGroup("r", [admit(manager, "a", range(10))])
    manager.swap_out(group)
    if taken:
        admit(manager, "other", range(100, 100 + 4 * taken))
    status = manager.can_swap_in(group)
    assert status is (OK if taken <= 5 else LATER)
    if status is OK:
        assert len(manager.swap_in(group)) == 3
    else:
        with refused(manager, NoFreeBlocksError):
            manager.swap_in(group)


def test_swap_moves_a_shared_block_once():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    seq = admit(manager, "a", range(6))
    child = seq.fork("b")
    manager.fork(seq, child)
    grow(manager, child, [70])
    group = SequenceGroup("r", [seq, child])
    table, child_table = manager.block_table(seq), manager.block_table(child)
    out = dict(manager.swap_out(group))
    assert set(out) == {*table, *child_table} and len(out) == 3
    assert manager.stats().cpu.num_used == 3 and manager.stats().gpu.num_used == 0
    back = dict(manager.swap_in(group))
    assert sorted(back) == sorted(out.values())
    assert manager.block_table(seq) == [back[out[b]] for b in table]
    assert manager.block_table(child) == [back[out[b]] for b in child_table]
    assert manager.stats().cpu.num_used == 0


def test_swap_out_leaves_what_another_sequence_shares():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    first = admit(manager, "a", range(8))
    second = admit(manager, "b", [*range(8), 50])
    table = manager.block_table(first)
    assert manager.block_table(second)[:2] == table
    assert len(manager.swap_out(SequenceGroup("r", [second]))) == 3
    assert manager.block_table(first) == table
    assert manager.stats().gpu.num_used == 2


def test_what_was_published_stays_cached_after_swap_out():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    seq = admit(manager, "a", range(9))
    manager.swap_out(SequenceGroup("r", [seq]))
    assert manager.stats().gpu.num_cached == 2
    twin = Sequence("b", range(9))
    manager.allocate(twin)
    assert manager.num_cached_tokens(twin) == 8


def test_a_swapped_sequence_can_be_freed():
    manager = make_manager(4, 4, num_cpu_blocks=4)
    seq = admit(manager, "a", range(9))
    manager.swap_out(SequenceGroup("r", [seq]))
    manager.free(seq)
    assert manager.stats().cpu.num_used == 0
    with refused(manager, NotAllocatedError, "a"):
        manager.free(seq)


def test_what_needs_the_gpu_says_so_while_swapped():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    seq, other = admit(manager, "a", range(9)), admit(manager, "b", range(50, 59))
    group = SequenceGroup("r", [seq])
    manager.swap_out(group)
    for call in (
        lambda: manager.block_table(seq),
        lambda: manager.append_slots(seq),
        lambda: manager.fork(seq, seq.fork("c")),
        lambda: manager.trim(seq, 5),
        lambda: manager.build_batch([other, seq]),
        lambda: manager.step([other, seq], [1, 2]),
        lambda: manager.swap_out(group),
    ):
        with refused(manager, NotOnGpuError, "a"):
            call()
    assert len(seq) == len(other) == 9
    with refused(manager, AlreadyAllocatedError, "a"):
        manager.allocate(seq)


def test_swap_keeps_sharing_and_copy_on_write():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    seq = admit(manager, "a", range(6))
    child = seq.fork("b")
    manager.fork(seq, child)
    group = SequenceGroup("r", [seq, child])
    manager.swap_out(group)
    manager.swap_in(group)
    tail = manager.block_table(seq)[1]
    assert manager.block_table(child)[1] == tail
    child.append_token(9)
    ((source, destination),) = manager.append_slots(child)
    assert source == tail and destination == manager.block_table(child)[1] != tail


def test_a_waiting_token_survives_a_swap():
    # The append was refused, the sequence is swapped out instead and goes on when it is back.
    manager = make_manager(2, 4, num_cpu_blocks=4)
    seq = admit(manager, "a", range(4))
    other = admit(manager, "b", range(50, 54))
    seq.append_token(4)
    assert not manager.can_append_slots(seq)
    group = SequenceGroup("r", [seq])
    assert len(manager.swap_out(group)) == 1
    manager.free(other)
    manager.swap_in(group)
    assert manager.append_slots(seq) == []
    assert len(manager.block_table(seq)) == 2


def test_swap_in_of_what_is_not_swapped_is_refused():
    manager = make_manager(8, 4, num_cpu_blocks=8)
    here, away = admit(manager, "here", range(6)), admit(manager, "away", range(50, 56))
    manager.swap_out(SequenceGroup("r", [away]))
    with refused(manager, AlreadyAllocatedError, "here"):
        manager.swap_in(SequenceGroup("r", [away, here]))
    assert not manager.can_swap_out(SequenceGroup("r", [away, here]))
    with refused(manager, NotOnGpuError, "away"):
        manager.swap_out(SequenceGroup("r", [here, away]))
