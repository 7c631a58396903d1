"""What other block managers got wrong under load: leaks, stale hits, torn failures, lost order.

Every test runs with the default hash and with one under which all blocks collide.
"""

import random
from collections import Counter

import pytest
from manager_helpers import (
    admit,
    cached_tokens,
    constant_hash,
    grow,
    hand_out_order,
    make_manager,
    refused,
)

from paged import (
    AllocStatus,
    NoFreeBlocksError,
    PagedError,
    Sequence,
    SequenceGroup,
)


@pytest.fixture(params=[None, constant_hash], ids=["xxhash", "constant"])
def hash_fn(request):
    return request.param


@pytest.fixture(params=[1, 2, 4, 16])
def block_size(request):
    return request.param


# --- free order ----------------------------------------------------------------------------------


def test_without_caching_blocks_come_back_in_logical_order():
    manager = make_manager(6, 4, enable_prefix_caching=False)
    first = admit(manager, "a", range(12))
    admit(manager, "b", range(4))
    assert manager.block_table(first) == [0, 1, 2]
    manager.free(first)
    assert hand_out_order(manager) == [4, 5, 0, 1, 2]


def test_with_caching_blocks_come_back_tail_first():
    manager = make_manager(6, 4)
    first = admit(manager, "a", range(12))
    assert manager.block_table(first) == [0, 1, 2]
    manager.free(first)
    assert hand_out_order(manager) == [3, 4, 5, 2, 1, 0]


def test_first_fit_gives_neighbours():
    manager = make_manager(8, 4, free_order="first_fit", enable_prefix_caching=False)
    seqs = [admit(manager, i, range(8)) for i in range(4)]
    for i in (2, 0):
        manager.free(seqs[i])
    assert manager.block_table(admit(manager, "new", range(16))) == [0, 1, 4, 5]


@pytest.mark.parametrize("free_order", ["fifo", "first_fit"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_refused_call_and_a_rollback_leave_the_free_order_alone(free_order, caching):
    def pool():
        manager = make_manager(8, 4, free_order=free_order, enable_prefix_caching=caching)
        first, _ = (admit(manager, name, range(ord(name), ord(name) + 9)) for name in "ab")
        manager.free(first)
        return manager

    untouched, tried = pool(), pool()
    with refused(tried, NoFreeBlocksError):
        tried.allocate(Sequence("c", range(500, 532)))
    with refused(tried, NoFreeBlocksError):
        tried.allocate(Sequence("c", [*range(97, 106), *range(20)]))
    assert hand_out_order(tried) == hand_out_order(untouched)


# --- last block and slots -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_a_full_last_block_is_not_an_empty_one(length):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(length))
    assert len(manager.block_table(seq)) == -(-length // 4)
    table = manager.block_table(seq)
    if length:
        batch = manager.build_batch([seq], [length])
        slots = [table[i // 4] * 4 + i % 4 for i in range(length)]
        assert batch.slot_mapping.tolist() == slots
    grow(manager, seq, [70])
    assert len(manager.block_table(seq)) == length // 4 + 1


def test_fragmentation_of_full_and_partial_blocks():
    for length, empty in ((1, 3), (3, 1), (4, 0), (5, 3), (8, 0)):
        manager = make_manager(8, 4)
        admit(manager, "a", range(length))
        slots = -(-length // 4) * 4
        assert manager.stats().internal_fragmentation == pytest.approx(empty / slots)


# --- stale content ------------------------------------------------------------------------------


def test_overwritten_content_is_never_hit(hash_fn):
    manager = make_manager(2, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "x", [1, 2]))
    manager.free(admit(manager, "y", [3, 4, 5, 6]))
    assert cached_tokens(manager, [1, 2, 9]) == 0
    manager.check_invariants()


def test_content_is_hit_only_under_its_own_prefix(hash_fn):
    # The second block of both prompts holds the same tokens, but other K/V.
    manager = make_manager(8, 2, hash_fn=hash_fn)
    admit(manager, "a", [1, 2, 7, 8])
    assert cached_tokens(manager, [3, 4, 7, 8, 9]) == 0
    assert cached_tokens(manager, [7, 8, 9]) == 0
    assert cached_tokens(manager, [1, 2, 7, 8, 9]) == 4


def test_a_recycled_parent_adopts_no_children(hash_fn):
    # Child content stays cached while its parent's block is given to another first block.
    manager = make_manager(4, 2, hash_fn=hash_fn)
    first = admit(manager, "a", [1, 2])
    second = admit(manager, "b", [1, 2], computed=False)  # its own copy: the hit leaves a token
    grow(manager, second, [7, 8])
    manager.free(first)
    for k in range(4):
        recycled = Sequence(f"r{k}", [30 + k, 40 + k])
        if manager.can_allocate(recycled) is not AllocStatus.OK:
            break
        manager.allocate(recycled)
        manager.mark_computed(recycled, 2)
        probe = Sequence(f"p{k}", [30 + k, 40 + k, 7, 8, 9])
        if manager.can_allocate(probe) is AllocStatus.OK:
            manager.allocate(probe)
            assert manager.num_cached_tokens(probe) <= 2
            manager.free(probe)
        manager.check_invariants()


def test_an_evicted_and_recomputed_parent_is_safe_for_old_children(hash_fn):
    manager = make_manager(3, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "a", [1, 2, 3, 4]))
    manager.free(admit(manager, "b", [5, 6, 7, 8, 9, 10]))
    manager.free(admit(manager, "c", [1, 2]))
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 2
    manager.check_invariants()


def test_nothing_is_hit_before_it_was_computed(hash_fn):
    manager = make_manager(8, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(8), computed=False)
    assert cached_tokens(manager, range(9)) == 0
    manager.free(seq)
    assert cached_tokens(manager, range(9)) == 0
    partly = admit(manager, "b", range(8), computed=False)
    manager.mark_computed(partly, 4)
    assert cached_tokens(manager, range(9)) == 4
    manager.mark_computed(partly, 7)
    assert cached_tokens(manager, range(9)) == 4
    manager.mark_computed(partly, 8)
    assert cached_tokens(manager, range(9)) == 8


def test_an_append_publishes_nothing(hash_fn):
    manager = make_manager(8, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", range(3))
    seq.append_token(3)
    manager.append_slots(seq)
    assert cached_tokens(manager, [*range(4), 9]) == 0
    manager.mark_computed(seq, 4)
    assert cached_tokens(manager, [*range(4), 9]) == 4


@pytest.mark.parametrize("asked", [range(8), range(9), range(4), range(1), range(5), range(7)])
def test_a_hit_leaves_at_least_one_query_token(hash_fn, asked):
    manager = make_manager(8, 4, hash_fn=hash_fn)
    manager.free(admit(manager, "a", range(8)))
    seq = admit(manager, "b", asked, computed=False)
    hit = manager.num_cached_tokens(seq)
    assert hit == (len(asked) - 1) // 4 * 4
    assert len(seq) - hit >= 1


def test_prompts_shorter_than_a_block_hit_nothing_and_cost_nothing(hash_fn, block_size):
    manager = make_manager(8, block_size, hash_fn=hash_fn)
    manager.free(admit(manager, "a", range(block_size * 2)))
    before = manager.snapshot()
    for length in range(1, block_size + 1):
        probe = Sequence("probe", range(length))
        assert manager.can_allocate(probe) is AllocStatus.OK
        assert manager.snapshot() == before
        assert cached_tokens(manager, range(length)) == 0
        assert manager.stats().gpu.num_used == 0
        before = manager.snapshot()


# --- hits under pressure ------------------------------------------------------------------------


def test_a_failed_allocation_leaves_no_reference_on_its_hits(hash_fn):
    manager = make_manager(5, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "a", [1, 2, 3, 4]))
    admit(manager, "filler", [50, 51, 52, 53], computed=False)
    assert manager.stats().gpu.num_free == 3
    with refused(manager, NoFreeBlocksError) as caught:
        manager.allocate(Sequence("b", range(1, 9)))
    assert caught.value.needed > caught.value.available
    assert manager.stats().gpu.num_used == 2
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 4


def test_a_hit_block_is_not_evicted_by_the_call_that_hit_it(hash_fn):
    manager = make_manager(3, 2, hash_fn=hash_fn)
    cached = admit(manager, "a", [1, 2, 3, 4])
    hits = manager.block_table(cached)
    manager.free(cached)
    seq = admit(manager, "b", [1, 2, 3, 4, 5], computed=False)
    table = manager.block_table(seq)
    assert table[:2] == hits and len(set(table)) == 3
    manager.free(seq)
    assert cached_tokens(manager, [1, 2, 3, 4, 5]) == 4
    with refused(manager, NoFreeBlocksError):
        manager.allocate(Sequence("c", [1, 2, 3, 4, 5, 6, 7]))


def test_a_hit_larger_than_what_else_is_free_takes_exactly_the_rest(hash_fn, block_size):
    prompt = range(1, 6 * block_size + 1)
    manager = make_manager(6, block_size, hash_fn=hash_fn)
    manager.free(admit(manager, "a", prompt))
    assert manager.stats().gpu.num_cached == 6
    again = admit(manager, "b", prompt, computed=False)
    assert manager.num_cached_tokens(again) == 5 * block_size
    assert sorted(manager.block_table(again)) == list(range(6))


# --- eviction -----------------------------------------------------------------------------------


def test_a_chain_loses_its_tail_before_its_head(hash_fn):
    manager = make_manager(4, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "a", range(1, 9)))
    for lost in range(1, 4):
        admit(manager, f"taker-{lost}", [-lost, -lost], computed=False)
        probe = Sequence("probe", [*range(1, 9), 9])
        # The probe itself needs blocks that are not there: read the hit off the error.
        hits = 4 - lost
        assert manager.stats().gpu.num_cached == hits
        assert manager.can_allocate(probe) is AllocStatus.NEVER
        short = Sequence("short", range(1, 2 * hits + 1))
        manager.allocate(short)
        assert manager.num_cached_tokens(short) == 2 * (hits - 1)
        manager.free(short)


def test_unhashed_blocks_are_taken_before_cached_ones(hash_fn):
    manager = make_manager(6, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "cached", [1, 2, 3, 4]))
    manager.free(admit(manager, "unpublished", [5, 6, 7, 8], computed=False))
    admit(manager, "taker", range(30, 38), computed=False)
    assert manager.stats().gpu.num_cached == 2
    assert manager.stats().gpu.num_free == 2


def test_a_hit_refreshes_what_it_hits(hash_fn):
    manager = make_manager(4, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "p", [1, 2]))
    manager.free(admit(manager, "q", [3, 4]))
    assert cached_tokens(manager, [1, 2, 9]) == 2  # takes and gives back an unhashed block
    taker = admit(manager, "taker", range(50, 56), computed=False)
    assert manager.stats().gpu.num_cached == 1
    manager.free(taker)
    assert cached_tokens(manager, [3, 4, 9]) == 0
    assert cached_tokens(manager, [1, 2, 9]) == 2


def test_asking_does_not_refresh(hash_fn):
    manager = make_manager(3, 2, hash_fn=hash_fn)
    manager.free(admit(manager, "p", [1, 2]))
    manager.free(admit(manager, "q", [3, 4]))
    manager.can_allocate(Sequence("probe", [1, 2, 9]))
    taker = admit(manager, "taker", range(50, 54), computed=False)
    manager.free(taker)
    assert cached_tokens(manager, [3, 4, 9]) == 2
    assert cached_tokens(manager, [1, 2, 9]) == 0


def test_eviction_is_the_same_in_twenty_runs(hash_fn):
    def run():
        rng = random.Random(7)
        manager = make_manager(12, 2, hash_fn=hash_fn)
        live, seen = [], []
        for k in range(120):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
            seq = Sequence(k, prompt)
            if manager.can_allocate(seq) is AllocStatus.OK:
                manager.allocate(seq)
                manager.mark_computed(seq, len(seq))
                live.append(seq)
                seen.append((manager.num_cached_tokens(seq), manager.block_table(seq)))
            else:
                manager.free(live.pop(rng.randrange(len(live))))
        return seen

    assert len({str(run()) for _ in range(20)}) == 1


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_max_cached_blocks_bounds_what_is_kept(hash_fn, limit):
    manager = make_manager(8, 2, hash_fn=hash_fn, max_cached_blocks=limit)
    manager.free(admit(manager, "a", range(1, 9)))
    assert manager.stats().gpu.num_cached == min(limit, 4)
    assert manager.stats().gpu.num_free == 8
    assert cached_tokens(manager, range(1, 12)) == 2 * min(limit, 4)
    manager.free(admit(manager, "b", range(20, 28)))
    assert manager.stats().gpu.num_cached <= limit
    manager.check_invariants()


# --- counters -----------------------------------------------------------------------------------


def test_counters_add_up_over_ten_thousand_calls_on_two_tiers():
    rng = random.Random(11)
    manager = make_manager(8, 2, num_cpu_blocks=4)
    running, swapped = {}, {}
    for k in range(10_000):
        action = rng.choice(["allocate", "free", "out", "in"])
        if action == "allocate":
            seq = Sequence(k, [rng.randrange(2) for _ in range(rng.randrange(1, 8))])
            if manager.can_allocate(seq) is AllocStatus.OK:
                manager.allocate(seq)
                manager.mark_computed(seq, len(seq))
                running[k] = SequenceGroup(k, [seq])
        elif action == "free" and running | swapped:
            side = rng.choice([side for side in (running, swapped) if side])
            manager.free(side.pop(rng.choice(sorted(side))).seqs[0])
        elif action == "out" and running:
            key = rng.choice(sorted(running))
            if manager.can_swap_out(running[key]):
                pairs = manager.swap_out(running[key])
                assert all(0 <= gpu < 8 and 0 <= cpu < 4 for gpu, cpu in pairs)
                swapped[key] = running.pop(key)
        elif action == "in" and swapped:
            key = rng.choice(sorted(swapped))
            if manager.can_swap_in(swapped[key]) is AllocStatus.OK:
                pairs = manager.swap_in(swapped[key])
                assert all(0 <= gpu < 8 and 0 <= cpu < 4 for cpu, gpu in pairs)
                running[key] = swapped.pop(key)
        stats = manager.stats()
        held = {b for group in running.values() for b in manager.block_table(group.seqs[0])}
        held_on_cpu = sum(-(-len(group.seqs[0]) // 2) for group in swapped.values())
        assert stats.gpu.num_used == len(held) and stats.cpu.num_used == held_on_cpu
        for tier, total in ((stats.gpu, 8), (stats.cpu, 4)):
            assert tier.num_total == total == tier.num_used + tier.num_free
            assert 0 <= tier.num_cached <= tier.num_free
            assert tier.usage == tier.num_used / total
    for group in [*running.values(), *swapped.values()]:
        manager.free(group.seqs[0])
    assert manager.stats().gpu.num_used == manager.stats().cpu.num_used == 0
    manager.check_invariants()


def test_usage_of_an_absent_tier_is_zero():
    stats = make_manager(4).stats()
    assert (stats.cpu.num_total, stats.cpu.num_free, stats.cpu.usage) == (0, 0, 0.0)
    assert stats.internal_fragmentation == 0.0


# --- two writers --------------------------------------------------------------------------------


def test_a_partial_block_is_never_a_hit(hash_fn):
    manager = make_manager(8, 4, hash_fn=hash_fn)
    first = admit(manager, "a", range(6))
    second = admit(manager, "b", range(6), computed=False)
    assert manager.num_cached_tokens(second) == 4
    tables = manager.block_table(first), manager.block_table(second)
    assert tables[0][0] == tables[1][0] and tables[0][1] != tables[1][1]


def test_both_forks_write_to_blocks_of_their_own(hash_fn):
    for first, second in (("parent", "child"), ("child", "parent")):
        manager = make_manager(8, 4, hash_fn=hash_fn)
        seqs = {"parent": admit(manager, "parent", range(6))}
        seqs["child"] = seqs["parent"].fork("child")
        manager.fork(seqs["parent"], seqs["child"])
        table = manager.block_table(seqs["parent"])
        assert manager.block_table(seqs["child"]) == table
        ((source, destination),) = grow(manager, seqs[first], [100])
        assert source == table[1] and destination not in table
        assert grow(manager, seqs[second], [200]) == []
        assert manager.block_table(seqs[second]) == table
        assert manager.block_table(seqs[first]) == [table[0], destination]


def test_a_full_tail_is_shared_without_a_copy(hash_fn, block_size):
    manager = make_manager(8, block_size, hash_fn=hash_fn)
    parent = admit(manager, "parent", range(2 * block_size))
    child = parent.fork("child")
    manager.fork(parent, child)
    assert grow(manager, parent, [1]) == grow(manager, child, [2]) == []
    tables = manager.block_table(parent), manager.block_table(child)
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]


def test_many_forks_copy_all_but_once(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    parent = admit(manager, 0, range(5))
    family = [parent]
    for i in range(1, 6):
        family.append(parent.fork(i))
        manager.fork(parent, family[-1])
    copies = [pair for i, seq in enumerate(family) for pair in grow(manager, seq, [i])]
    assert len(copies) == 5
    assert len({destination for _, destination in copies}) == 5
    assert Counter(manager.block_table(seq)[0] for seq in family) == {0: 6}


def test_content_cached_elsewhere_leaves_a_running_table_alone(hash_fn):
    manager = make_manager(8, 2, hash_fn=hash_fn)
    first = admit(manager, "a", [1, 2, 3, 4], computed=False)
    second = admit(manager, "b", [1, 2, 3, 4], computed=False)
    tables = [manager.block_table(seq) for seq in (first, second)]
    assert not set(tables[0]) & set(tables[1])
    manager.mark_computed(first, 4)
    manager.mark_computed(second, 4)
    assert [manager.block_table(seq) for seq in (first, second)] == tables
    manager.free(first)
    manager.check_invariants()
    assert manager.block_table(second) == tables[1]
    assert manager.stats().gpu.num_used == 2


# --- lookahead ----------------------------------------------------------------------------------


def test_lookahead_slots_are_reserved_and_drafts_are_not_published(hash_fn):
    manager = make_manager(8, 16, hash_fn=hash_fn)
    seq = admit(manager, "a", range(14))
    assert manager.append_slots(seq, 4) == []
    assert manager.stats().gpu.num_used == 2
    for token in range(14, 18):
        seq.append_token(token)
    assert manager.append_slots(seq) == []
    assert manager.stats().gpu.num_used == 2
    table = manager.block_table(seq)
    batch = manager.build_batch([seq], [4])
    last = table[1] * 16
    assert batch.slot_mapping.tolist() == [table[0] * 16 + 14, table[0] * 16 + 15, last, last + 1]
    manager.trim(seq, 15)
    manager.mark_computed(seq, 15)
    assert manager.block_table(seq) == table[:1]
    assert cached_tokens(manager, [*range(16), 99]) == 0
    grow(manager, seq, [70, 71])
    assert manager.block_table(seq)[0] == table[0]
    batch = manager.build_batch([seq], [2])
    assert batch.slot_mapping.tolist() == [table[0] * 16 + 15, manager.block_table(seq)[1] * 16]
    manager.free(seq)
    assert manager.stats().gpu.num_used == 0


def test_a_short_pool_refuses_lookahead_instead_of_junk_ids():
    manager = make_manager(1, 16)
    seq = admit(manager, "a", range(14))
    assert manager.can_append_slots(seq, 2)
    assert not manager.can_append_slots(seq, 3)
    with refused(manager, NoFreeBlocksError):
        manager.append_slots(seq, 3)


# --- messages -----------------------------------------------------------------------------------


def test_errors_name_the_sequence():
    manager = make_manager(2, 4)
    seq = admit(manager, "request-17", range(4))
    with pytest.raises(NoFreeBlocksError, match="request-18"):
        manager.allocate(Sequence("request-18", range(100, 108)))
    for token in range(8):
        seq.append_token(token)
    with pytest.raises(NoFreeBlocksError, match="request-17"):
        manager.append_slots(seq)
    blocks = manager.block_table(seq)
    manager.free(seq)
    for use_after_free in (manager.free, manager.block_table, manager.append_slots):
        with pytest.raises(PagedError, match=rf"request-17.*free.*{blocks[0]}"):
            use_after_free(seq)
