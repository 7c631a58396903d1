"""Allocators: reference counts, free order, content under its own parent, buddies that merge."""

import random
from collections import Counter

import pytest
from manager_helpers import constant_hash

from paged import (
    BuddyAllocator,
    CacheConfig,
    NaiveBlockAllocator,
    NoFreeBlocksError,
    PagedError,
    PrefixCachingBlockAllocator,
)

# --- references ------------------------------------------------------------------------------------


@pytest.fixture(params=["fifo", "first_fit"])
def order(request):
    return request.param


@pytest.fixture(params=["naive", "caching"])
def allocator(request, order):
    if request.param == "naive":
        return NaiveBlockAllocator(8, free_order=order)
    return PrefixCachingBlockAllocator(8, 4, free_order=order)


def drain(allocator):
    return allocator.allocate(allocator.num_free)


def test_freeing_one_reference_twice_in_one_call_changes_nothing(allocator):
    a, b = allocator.allocate(2)
    for blocks in ([a, a], [b, a, b], [a, b, a, b]):
        with pytest.raises(PagedError, match=f"block {blocks[0]}"):
            allocator.free(blocks)
        assert [allocator.ref_count(x) for x in (a, b)] == [1, 1]
        assert allocator.num_free == 6
    allocator.free([a, b])
    assert sorted(drain(allocator)) == list(range(8))


def test_freeing_two_references_in_one_call_returns_the_block_once(allocator):
    (block,) = allocator.allocate(1)
    allocator.share([block])
    assert allocator.ref_count(block) == 2
    allocator.free([block, block])
    assert allocator.ref_count(block) == 0
    handed_out = drain(allocator)
    assert len(handed_out) == len(set(handed_out)) == 8


def test_freeing_more_references_than_there_are_changes_nothing(allocator):
    (block,) = allocator.allocate(1)
    allocator.share([block])
    with pytest.raises(PagedError, match=f"block {block}"):
        allocator.free([block] * 3)
    assert allocator.ref_count(block) == 2


@pytest.mark.parametrize("bad", [-1, 8, 1000])
def test_a_block_outside_the_pool_is_refused(allocator, bad):
    (block,) = allocator.allocate(1)
    for call in (allocator.free, allocator.share):
        with pytest.raises((PagedError, ValueError, IndexError), match=str(bad)):
            call([block, bad])
        assert allocator.ref_count(block) == 1
    assert allocator.num_free == 7


def test_sharing_a_free_block_is_refused(allocator):
    (block,) = allocator.allocate(1)
    other = (block + 1) % 8
    with pytest.raises(PagedError, match=f"block {other}"):
        allocator.share([block, other])
    assert allocator.ref_count(block) == 1


def test_sharing_the_same_block_twice_in_one_call_counts_twice(allocator):
    (block,) = allocator.allocate(1)
    allocator.share([block, block])
    assert allocator.ref_count(block) == 3


def test_an_allocation_that_fails_takes_nothing_and_keeps_the_order(allocator, order):
    first = allocator.allocate(3)
    allocator.free([first[1]])
    with pytest.raises(NoFreeBlocksError) as caught:
        allocator.allocate(7)
    assert (caught.value.needed, caught.value.available) == (7, 6)
    assert allocator.num_free == 6
    assert [allocator.ref_count(block) for block in first] == [1, 0, 1]
    in_order = [3, 4, 5, 6, 7, first[1]] if "fifo" in order else [first[1], 3, 4, 5, 6, 7]
    assert drain(allocator) == in_order


@pytest.mark.parametrize("bad", [-1, 1.5, "2", None])
def test_an_allocation_of_a_senseless_number_is_refused(allocator, bad):
    with pytest.raises((ValueError, TypeError)):
        allocator.allocate(bad)
    assert allocator.num_free == 8


def test_an_allocation_of_nothing_is_empty(allocator):
    assert list(allocator.allocate(0)) == []


@pytest.mark.parametrize(
    "make", [NaiveBlockAllocator, lambda n, **o: PrefixCachingBlockAllocator(n, 4, **o)]
)
def test_free_order_is_a_contract(make):
    fifo = make(8, free_order="fifo")
    assert list(fifo.allocate(8)) == list(range(8))
    fifo.free([3, 5, 7])
    fifo.free([0])
    assert list(fifo.allocate(4)) == [3, 5, 7, 0]
    lowest = make(8, free_order="first_fit")
    assert list(lowest.allocate(8)) == list(range(8))
    lowest.free([7, 3, 5])
    lowest.free([0])
    assert list(lowest.allocate(4)) == [0, 3, 5, 7]


def test_an_unknown_free_order_is_refused():
    with pytest.raises(ValueError, match="free_order"):
        NaiveBlockAllocator(8, free_order="random")
    with pytest.raises(ValueError, match="free_order"):
        CacheConfig(free_order="random")


@pytest.mark.parametrize("bad", ["x", None, 1.5, [0]])
def test_freeing_what_is_no_block_changes_nothing(allocator, bad):
    blocks = allocator.allocate(2)
    with pytest.raises((PagedError, TypeError, ValueError)):
        allocator.free([blocks[0], bad])
    with pytest.raises((PagedError, TypeError, ValueError)):
        allocator.share([blocks[0], bad])
    assert [allocator.ref_count(block) for block in blocks] == [1, 1]
    assert allocator.num_free == 6


@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys, iter], ids=lambda k: k.__name__)
def test_blocks_come_in_any_iterable_or_are_refused_whole(allocator, kind):
    blocks = allocator.allocate(4)
    allocator.share(kind(blocks[:1]))
    references = [allocator.ref_count(block) for block in blocks]
    try:
        allocator.free(kind(blocks[::-1]))
    except TypeError:
        assert [allocator.ref_count(block) for block in blocks] == references
        assert allocator.num_free == 4
    else:
        assert [allocator.ref_count(block) for block in blocks] == [n - 1 for n in references]
        assert sorted(drain(allocator)) == sorted(set(range(8)) - {blocks[0]})


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_tiny_pools(num_blocks):
    for allocator in (NaiveBlockAllocator(num_blocks), PrefixCachingBlockAllocator(num_blocks, 4)):
        assert allocator.num_blocks == allocator.num_free == num_blocks
        assert sorted(allocator.allocate(num_blocks)) == list(range(num_blocks))
        with pytest.raises(NoFreeBlocksError):
            allocator.allocate(1)


def test_reference_counts_agree_with_a_list_of_references(allocator):
    rng = random.Random(2)
    references = []
    for _ in range(3000):
        action = rng.choice(["allocate", "share", "free", "bad free"])
        if action == "allocate":
            n = rng.randrange(4)
            free = 8 - len(set(references))
            if n <= free:
                blocks = list(allocator.allocate(n))
                assert not set(blocks) & set(references)
                references += blocks
            else:
                with pytest.raises(NoFreeBlocksError):
                    allocator.allocate(n)
        elif references:
            chosen = rng.sample(references, rng.randrange(1, len(references) + 1))
            if action == "share":
                allocator.share(chosen)
                references += chosen
            elif action == "free":
                allocator.free(chosen)
                references = list((Counter(references) - Counter(chosen)).elements())
            else:
                too_many = chosen + [chosen[0]] * references.count(chosen[0])
                with pytest.raises(PagedError):
                    allocator.free(too_many)
        if len(references) > 40:
            allocator.free(references)
            references = []
        assert [allocator.ref_count(b) for b in range(8)] == [references.count(b) for b in range(8)]
        assert allocator.num_free == 8 - len(set(references))


# --- immutable blocks ---------------------------------------------------------------------------


@pytest.fixture(params=[None, constant_hash], ids=["xxhash", "constant"])
def caching(request):
    return PrefixCachingBlockAllocator(6, 2, hash_fn=request.param)


def test_equal_content_under_one_parent_is_one_block(caching):
    first = caching.allocate_immutable(None, [1, 2])
    second = caching.allocate_immutable(first, [3, 4])
    assert caching.allocate_immutable(None, [1, 2]) == first
    assert caching.allocate_immutable(first, [3, 4]) == second
    assert [caching.ref_count(first), caching.ref_count(second)] == [2, 2]
    assert caching.num_free == 4


def test_equal_content_under_another_parent_is_another_block(caching):
    a, b = caching.allocate_immutable(None, [1, 2]), caching.allocate_immutable(None, [3, 4])
    children = [caching.allocate_immutable(parent, [5, 6]) for parent in (None, a, b)]
    assert len({a, b, *children}) == 5


def test_freed_content_is_found_again_until_it_is_evicted(caching):
    first = caching.allocate_immutable(None, [1, 2])
    caching.free([first])
    assert caching.num_free == 6
    assert caching.allocate_immutable(None, [1, 2]) == first
    caching.free([first])
    taken = caching.allocate(6)
    caching.free(taken)
    again = caching.allocate_immutable(None, [1, 2])
    child = caching.allocate_immutable(again, [3, 4])
    assert child != again


def test_a_parent_is_not_evicted_by_its_child():
    allocator = PrefixCachingBlockAllocator(1, 2)
    parent = allocator.allocate_immutable(None, [1, 2])
    allocator.free([parent])
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_immutable(parent, [3, 4])
    assert allocator.allocate_immutable(None, [1, 2]) == parent
    allocator = PrefixCachingBlockAllocator(2, 2)
    parent, other = (allocator.allocate_immutable(None, [k, k]) for k in (1, 2))
    allocator.free([parent])
    allocator.free([other])
    assert allocator.allocate_immutable(parent, [3, 4]) == other
    assert [allocator.ref_count(parent), allocator.ref_count(other)] == [0, 1]
    assert allocator.num_free == 1


@pytest.mark.parametrize("parent", [-1, 3, 6, 100, "x", 1.5])
def test_a_parent_that_holds_nothing_is_refused(caching, parent):
    with pytest.raises((ValueError, TypeError, PagedError)):
        caching.allocate_immutable(parent, [1, 2])
    assert caching.num_free == 6


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2.5], [1, True], [1, 2**31]])
def test_an_immutable_block_holds_exactly_block_size_tokens(caching, tokens):
    with pytest.raises((ValueError, TypeError)):
        caching.allocate_immutable(None, tokens)
    assert caching.num_free == 6


# --- buddies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "rounded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_a_run_is_contiguous_aligned_and_a_power_of_two(n, rounded):
    buddy = BuddyAllocator(16)
    run = buddy.allocate(n)
    assert isinstance(run, range) and run.step == 1
    assert len(run) == rounded and run.start % rounded == 0
    assert buddy.num_free == 16 - rounded


def test_buddies_merge_back_to_one_run():
    buddy = BuddyAllocator(16)
    runs = [buddy.allocate(1) for _ in range(16)]
    assert buddy.largest_free_run == 0 and buddy.num_free == 0
    for run in runs[::2]:
        buddy.free(run)
    assert (buddy.num_free, buddy.largest_free_run) == (8, 1)
    assert buddy.external_fragmentation == pytest.approx(7 / 8)
    with pytest.raises(NoFreeBlocksError) as caught:
        buddy.allocate(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    for run in runs[1::2]:
        buddy.free(run)
    assert (buddy.num_free, buddy.largest_free_run) == (16, 16)
    assert buddy.external_fragmentation == 0.0


def test_a_run_is_freed_once_and_whole():
    buddy = BuddyAllocator(8)
    run = buddy.allocate(4)
    for bad in (run[:2], range(4, 8), range(run.start, run.stop, 2), range(0), range(-4, 0)):
        with pytest.raises(PagedError):
            buddy.free(bad)
        assert buddy.num_free == 4
    buddy.free(run)
    with pytest.raises(PagedError):
        buddy.free(run)
    assert buddy.num_free == 8


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2"])
def test_a_run_of_no_blocks_is_refused(bad):
    buddy = BuddyAllocator(8)
    with pytest.raises((ValueError, TypeError)):
        buddy.allocate(bad)
    assert buddy.num_free == 8


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 16, 24, 100])
def test_runs_never_overlap_and_free_space_is_counted_right(num_blocks):
    rng = random.Random(num_blocks)
    buddy, live = BuddyAllocator(num_blocks), []
    for _ in range(1500):
        if live and rng.random() < 0.5:
            buddy.free(live.pop(rng.randrange(len(live))))
        else:
            n = rng.randrange(1, max(2, num_blocks // 3))
            largest = buddy.largest_free_run
            if n <= largest:
                live.append(buddy.allocate(n))
            else:
                with pytest.raises(NoFreeBlocksError):
                    buddy.allocate(n)
        used = [block for run in live for block in run]
        assert len(set(used)) == len(used) and set(used) <= set(range(num_blocks))
        assert buddy.num_free == num_blocks - len(used)
        if buddy.num_free:
            want = 1 - buddy.largest_free_run / buddy.num_free
            assert buddy.external_fragmentation == pytest.approx(want)
    for run in live:
        buddy.free(run)
    assert buddy.largest_free_run == 1 << (num_blocks.bit_length() - 1)
