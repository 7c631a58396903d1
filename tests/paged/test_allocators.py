"""Every allocator: all or nothing, in a documented order, and never a block to two owners."""

import random

import pytest

from paged import (
    BuddyAllocator,
    NaiveBlockAllocator,
    NoFreeBlocksError,
    NotAllocatedError,
    PrefixCachingBlockAllocator,
)

ALLOCATORS = {
    "naive": NaiveBlockAllocator,
    "prefix_caching": lambda n, free_order="fifo": PrefixCachingBlockAllocator(
        n, 2, free_order=free_order
    ),
}
HASHES = {"xxhash": None, "constant": lambda data: b"same"}


@pytest.fixture(params=ALLOCATORS)
def make(request):
    return ALLOCATORS[request.param]


@pytest.fixture(params=HASHES)
def caching(request):
    """A caching allocator of so many blocks of two tokens."""
    return lambda n, **options: PrefixCachingBlockAllocator(
        n, 2, hash_fn=HASHES[request.param], **options
    )


def state(pool):
    return pool.num_free, pool.free_blocks(), list(pool.ref_counts)


# --- one interface ------------------------------------------------------------------------------


def test_every_block_is_usable_and_none_is_given_twice(make):
    pool = make(5)
    blocks = pool.allocate(2) + pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (5, 0, 5)


def test_a_request_for_too_many_changes_nothing(make):
    pool = make(3)
    pool.allocate(1)
    before = state(pool)
    with pytest.raises(NoFreeBlocksError) as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert state(pool) == before


def test_no_block_at_all_is_a_request_like_any_other(make):
    pool = make(2)
    assert pool.allocate(0) == []
    pool.free([])
    pool.share([])
    assert pool.num_free == 2


def test_a_negative_request_is_refused(make):
    with pytest.raises(ValueError, match="n is -1"):
        make(2).allocate(-1)


def test_a_shared_block_returns_with_its_last_reference(make):
    pool = make(2)
    (block,) = pool.allocate(1)
    pool.share([block, block])
    assert pool.ref_count(block) == 3
    pool.free([block, block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_a_block_freed_twice_in_one_call_counts_each_time(make):
    pool = make(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block, block])
    assert sorted(pool.free_blocks()) == [0, 1, 2]


@pytest.mark.parametrize("wrong", [[0, 0], [0, 2], [0, 7], [0, -1], [0, "x"], [0, None], [0, 1.5]])
def test_a_wrong_free_is_refused_as_a_whole(make, wrong):
    pool = make(3)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(NotAllocatedError, match="block"):
        pool.free(wrong)
    assert state(pool) == before


def test_a_free_block_cannot_be_shared(make):
    pool = make(3)
    pool.allocate(1)
    before = state(pool)
    with pytest.raises(NotAllocatedError, match="block 2"):
        pool.share([0, 2])
    assert state(pool) == before


def test_the_reference_count_of_a_foreign_block_is_an_error(make):
    with pytest.raises(ValueError, match=r"block is 3.*0 \.\. 2"):
        make(3).ref_count(3)


# --- order --------------------------------------------------------------------------------------


def test_fifo_reuses_the_block_that_is_free_longest(make):
    pool = make(4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([2, 0])
    pool.free([3])
    assert pool.allocate(2) == [2, 0]
    pool.free([2])
    assert pool.allocate(2) == [3, 2]


def test_first_fit_reuses_the_lowest_block(make):
    pool = make(6, free_order="first_fit")
    pool.allocate(6)
    pool.free([5, 1, 4, 2])
    assert pool.allocate(3) == [1, 2, 4]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="free_order is 'lifo'"):
        NaiveBlockAllocator(3, "lifo")


@pytest.mark.parametrize("free_order", ["fifo", "first_fit"])
def test_random_calls_agree_with_a_list(make, free_order):
    rng = random.Random(0)
    pool, free, held = make(23, free_order=free_order), list(range(23)), []
    for _ in range(3000):
        n = rng.randrange(6)
        if rng.random() < 0.5 and n <= len(free):
            if free_order == "first_fit":
                free.sort()
            assert pool.allocate(n) == free[:n]
            held.append(free[:n])
            del free[:n]
        elif held:
            blocks = held.pop(rng.randrange(len(held)))
            rng.shuffle(blocks)
            pool.free(blocks)
            free += blocks
        assert pool.num_free == len(free)


# --- content ------------------------------------------------------------------------------------


def test_equal_content_under_the_same_parent_is_one_block(caching):
    pool = caching(4)
    first = pool.allocate_immutable(None, [1, 2])
    assert pool.allocate_immutable(None, [1, 2]) == first
    assert pool.ref_count(first) == 2
    second = pool.allocate_immutable(first, [3, 4])
    assert pool.allocate_immutable(first, [3, 4]) == second != first


def test_equal_tokens_under_another_parent_are_another_block(caching):
    pool = caching(6)
    a, b = pool.allocate_immutable(None, [1, 2]), pool.allocate_immutable(None, [3, 4])
    assert pool.allocate_immutable(a, [5, 6]) != pool.allocate_immutable(b, [5, 6])
    assert pool.allocate_immutable(a, [1, 2]) != a


def test_content_outlives_its_references(caching):
    pool = caching(3)
    block = pool.allocate_immutable(None, [1, 2])
    pool.free([block])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert pool.allocate_immutable(None, [1, 2]) == block
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_blocks_without_content_are_taken_first_then_the_oldest_content(caching):
    pool = caching(4)
    old, new = pool.allocate_immutable(None, [1, 1]), pool.allocate_immutable(None, [2, 2])
    pool.free([old])
    pool.free([new])
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(1) == [old]
    assert pool.cached_blocks() == [new]
    pool.free([2])
    assert pool.allocate_immutable(None, [1, 1]) == 2  # the old content is forgotten


def test_overwritten_content_is_never_found_again(caching):
    pool = caching(2)
    chain = [pool.allocate_immutable(None, [1, 2])]
    chain.append(pool.allocate_immutable(chain[0], [3, 4]))
    pool.free(chain[::-1])
    assert pool.num_cached == 2
    pool.free(pool.allocate(2))
    assert (pool.num_cached, pool.index.entries()) == (0, [])


def test_forgetting_a_head_forgets_what_is_behind_it(caching):
    """Nobody could find it, so it must not keep real content from staying."""
    pool = caching(4)
    head = pool.allocate_immutable(None, [1, 1])
    tail = pool.allocate_immutable(head, [2, 2])
    other = pool.allocate_immutable(None, [3, 3])
    pool.free([head])  # the wrong way round, as a sliding window does it
    pool.free([tail])
    pool.free([other])
    assert pool.allocate(2) == [3, tail]
    assert pool.cached_blocks() == [other]


def test_a_withdrawn_block_loses_its_content_and_keeps_its_reference(caching):
    pool = caching(3)
    head = pool.allocate_immutable(None, [1, 1])
    tail = pool.allocate_immutable(head, [2, 2])
    pool.withdraw(head)
    assert [pool.ref_count(block) for block in (head, tail)] == [1, 1]
    assert pool.entry_of(head) is pool.entry_of(tail) is None


def test_at_most_max_cached_blocks_stay(caching):
    pool = caching(4, max_cached_blocks=1)
    blocks = [pool.allocate_immutable(None, [i, i]) for i in range(3)]
    pool.free(blocks)
    assert pool.cached_blocks() == [blocks[-1]]
    assert (pool.num_free, pool.free_blocks()) == (4, [3, *blocks])


def test_the_parent_is_not_evicted_for_its_child(caching):
    pool = caching(2)
    parent = pool.allocate_immutable(None, [1, 1])
    pool.free([parent])
    (other,) = pool.allocate(1)
    before = state(pool)
    with pytest.raises(NoFreeBlocksError):
        pool.allocate_immutable(parent, [2, 2])
    assert state(pool) == before
    pool.free([other])
    assert pool.allocate_immutable(parent, [2, 2]) == other
    assert pool.cached_blocks() == [parent]


def test_wrong_immutable_blocks_are_refused(caching):
    pool = caching(2)
    (mutable,) = pool.allocate(1)
    with pytest.raises(ValueError, match="3 tokens"):
        pool.allocate_immutable(None, [1, 2, 3])
    with pytest.raises(ValueError, match="not immutable"):
        pool.allocate_immutable(mutable, [1, 2])
    with pytest.raises(ValueError, match="block is -1"):
        pool.allocate_immutable(-1, [1, 2])
    with pytest.raises(TypeError, match="token True"):
        pool.allocate_immutable(None, [1, True])


def test_a_hash_function_must_return_bytes():
    pool = PrefixCachingBlockAllocator(2, 2, hash_fn=lambda data: b"root")
    pool.hasher._hash_fn = hash
    with pytest.raises(TypeError, match="hash_fn returned"):
        pool.allocate_immutable(None, [1, 2])


# --- buddies ------------------------------------------------------------------------------------


def test_a_run_is_contiguous_and_a_power_of_two():
    pool = BuddyAllocator(16)
    runs = [pool.allocate(n) for n in (1, 3, 5)]
    assert [len(run) for run in runs] == [1, 4, 8]
    assert all(run.start % len(run) == 0 for run in runs)
    assert len({block for run in runs for block in run}) == 13
    assert pool.num_free == 3


def test_freed_buddies_merge_to_the_whole_pool():
    pool = BuddyAllocator(16)
    runs = [pool.allocate(1) for _ in range(16)]
    random.Random(0).shuffle(runs)
    for run in runs:
        pool.free(run)
    assert pool.largest_free_run == pool.num_free == 16
    assert pool.allocate(16) == range(16)


def test_free_blocks_that_are_no_buddies_do_not_serve_a_long_run():
    """External fragmentation: half the pool is free, and two neighbours cannot be had."""
    pool = BuddyAllocator(8)
    runs = [pool.allocate(1) for _ in range(8)]
    for run in runs[::2]:
        pool.free(run)
    assert (pool.num_free, pool.largest_free_run, pool.external_fragmentation) == (4, 1, 0.75)
    with pytest.raises(NoFreeBlocksError, match="one run; 4 of 8 are free") as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)


def test_a_pool_of_any_size_is_used_in_full():
    pool = BuddyAllocator(13)
    assert pool.largest_free_run == 8
    assert sorted(len(pool.allocate(n)) for n in (8, 4, 1)) == [1, 4, 8]
    assert (pool.num_free, pool.largest_free_run, pool.external_fragmentation) == (0, 0, 0.0)


@pytest.mark.parametrize("wrong", [range(2), range(4, 8), range(1, 4), range(0, 4, 2)])
def test_only_a_whole_allocated_run_can_be_freed(wrong):
    pool = BuddyAllocator(8)
    assert pool.allocate(4) == range(4)
    with pytest.raises(NotAllocatedError, match="range"):
        pool.free(wrong)
    assert pool.num_free == 4


def test_a_run_cannot_be_freed_twice():
    pool = BuddyAllocator(8)
    run = pool.allocate(2)
    pool.free(run)
    with pytest.raises(NotAllocatedError):
        pool.free(run)


def test_random_runs_never_overlap_and_all_come_home():
    rng = random.Random(1)
    pool, runs = BuddyAllocator(100), []
    for _ in range(4000):
        if rng.random() < 0.55:
            n = rng.randint(1, 20)
            try:
                runs.append(pool.allocate(n))
                assert len(runs[-1]) == 1 << (n - 1).bit_length()
            except NoFreeBlocksError:
                assert (
                    pool.largest_free_run < n or pool.largest_free_run < 1 << (n - 1).bit_length()
                )
        elif runs:
            pool.free(runs.pop(rng.randrange(len(runs))))
        blocks = [block for run in runs for block in run]
        assert len(set(blocks)) == len(blocks) == 100 - pool.num_free
        assert not blocks or 0 <= min(blocks) <= max(blocks) < 100
    for run in runs:
        pool.free(run)
    assert (pool.num_free, pool.largest_free_run) == (100, 64)
