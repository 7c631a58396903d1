"""A pool changes its size under running sequences, and every token is where its table says."""

import random

import pytest

from paged import BlockSpaceManager, CacheConfig, NoFreeBlocksError, Sequence


def make_manager(num_blocks, **options):
    return BlockSpaceManager(
        CacheConfig(**{"num_gpu_blocks": num_blocks, "block_size": 4, "watermark": 0.0} | options)
    )


def admit(manager, seq_id, tokens):
    seq = Sequence(seq_id, tokens)
    manager.allocate(seq)
    return seq


def test_a_larger_pool_has_new_blocks_behind_the_old_ones():
    manager = make_manager(2)
    a = admit(manager, "a", range(8))
    assert manager.resize(4) == []
    a.append_token(1)
    manager.append_slots(a)
    assert manager.block_table(a) == [0, 1, 2]
    assert (manager.gpu.num_blocks, manager.config.num_gpu_blocks) == (4, 4)
    manager.check_invariants()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_blocks_above_the_new_end_move_down(enable_prefix_caching):
    manager = make_manager(6, enable_prefix_caching=enable_prefix_caching)
    first, second = admit(manager, "first", range(8)), admit(manager, "second", range(20, 32))
    manager.free(first)
    assert manager.block_table(second) == [2, 3, 4]
    moves = manager.resize(3)
    assert moves == [(3, 0), (4, 1)] or moves == [(3, 1), (4, 0)]
    assert manager.block_table(second) == [2, *(target for _, target in moves)]
    assert manager.stats().gpu.num_total == manager.stats().gpu.num_used == 3
    manager.check_invariants()


def test_a_shared_block_moves_once_for_all():
    manager = make_manager(4)
    filler, a = admit(manager, "filler", range(50, 54)), admit(manager, "a", range(6))
    b = a.fork("b")
    manager.fork(a, b)
    manager.free(filler)
    assert manager.resize(2) == [(2, 0)]
    assert manager.block_table(a) == manager.block_table(b) == [1, 0]
    assert manager.gpu.ref_count(0) == 2
    manager.check_invariants()


def test_content_in_use_is_still_found_and_content_above_the_end_is_forgotten():
    manager = make_manager(8)
    gone, kept = admit(manager, "gone", range(12)), admit(manager, "kept", range(20, 29))
    for seq in (gone, kept):
        manager.mark_computed(seq, len(seq))
    manager.free(gone)
    manager.resize(3)
    manager.check_invariants()
    manager.resize(8)
    assert manager.stats().gpu.num_cached == 0
    again, other = admit(manager, "again", range(20, 29)), admit(manager, "other", range(12))
    assert manager.num_cached_tokens(again) == 8
    assert manager.num_cached_tokens(other) == 0
    manager.check_invariants()


def test_a_pool_cannot_become_smaller_than_what_is_in_use():
    manager = make_manager(6)
    admit(manager, "a", range(12))
    before = manager.snapshot()
    with pytest.raises(NoFreeBlocksError) as caught:
        manager.resize(2)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    for wrong, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="num_blocks"):
            manager.resize(wrong)
    assert manager.snapshot() == before


@pytest.mark.parametrize("free_order", ["fifo", "first_fit"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_every_sequence_keeps_its_tokens_through_random_sizes(free_order, enable_prefix_caching):
    rng = random.Random(3)
    manager = make_manager(
        24, free_order=free_order, enable_prefix_caching=enable_prefix_caching, hash_seed=0
    )
    slots = {}  # a fake cache: (block, offset) -> token
    running = []

    def write(seq, first):
        for position in range(first, len(seq)):
            block = manager.block_table(seq)[position // 4]
            slots[block, position % 4] = seq.token_ids[position]
        manager.mark_computed(seq, len(seq))

    def move(pairs):
        copies = {(d, o): slots.get((s, o)) for s, d in pairs for o in range(4)}
        slots.update(copies)

    for step in range(1500):
        kind = rng.random()
        if kind < 0.3:
            seq = Sequence(step, [rng.randrange(2) for _ in range(rng.randint(1, 16))])
            if manager.can_allocate(seq).value == "ok":
                manager.allocate(seq)
                write(seq, manager.num_cached_tokens(seq))
                running.append(seq)
        elif kind < 0.5 and running:
            manager.free(running.pop(rng.randrange(len(running))))
        elif kind < 0.8 and running:
            seq = rng.choice(running)
            if manager.can_append_slots(seq):
                seq.append_token(rng.randrange(2))
                if manager.can_append_slots(seq):
                    move(manager.append_slots(seq))
                    write(seq, len(seq) - 1)
                else:
                    manager.trim(seq, len(seq) - 1)
        else:
            move(manager.resize(rng.randint(max(1, manager.gpu.num_used), 40)))
        manager.check_invariants()
        for seq in running:
            table = manager.block_table(seq)
            assert [slots[table[p // 4], p % 4] for p in range(len(seq))] == seq.token_ids
