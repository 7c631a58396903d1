"""A policy of one's own: asked for each block that is forgotten, and never able to break anything."""

import random

import pytest

from paged import (
    AllocStatus,
    BlockSpaceManager,
    CacheConfig,
    PrefixCachingBlockAllocator,
    Sequence,
)
from paged.digests import pack


def manager_with(policy, **options):
    manager = BlockSpaceManager(CacheConfig(watermark=0.0, **options))
    manager.cache.eviction_policy = policy
    return manager


def oldest_first(cached):
    return next(iter(cached))


def newest_first(cached):
    return list(cached)[-1]


def cache_prompts(manager, prompts):
    """Compute prompts one after the other; their full blocks stay cached. Returns tokens found."""
    found = []
    for prompt in prompts:
        sequence = Sequence("prompt", prompt)
        manager.allocate(sequence)
        found.append(manager.num_cached_tokens(sequence))
        manager.mark_computed(sequence, len(sequence))
        manager.free(sequence)
    return found


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, [2, 3, 4]),
        (oldest_first, [2, 3, 4]),
        (newest_first, [0, 1, 2]),  # what comes to a full cache goes at once
    ],
    ids=["default", "oldest", "newest"],
)
def test_the_policy_says_which_content_goes(policy, kept):
    manager = manager_with(policy, block_size=4, num_gpu_blocks=8, max_cached_blocks=3)
    prompts = [range(10 * number, 10 * number + 5) for number in range(5)]  # one full block each
    cache_prompts(manager, prompts)
    assert manager.stats().gpu.num_cached == 3
    found = {entry.tokens for entry in manager.cache.index.entries()}
    assert found == {pack(prompts[number][:4]) for number in kept}
    manager.check_invariants()


def test_a_policy_sees_blocks_least_recently_used_first_and_their_content():
    seen = []

    def watch(cached):
        seen.append({block: entry.block for block, entry in cached.items()})
        with pytest.raises(TypeError):
            cached[0] = None
        return next(iter(cached))

    pool = PrefixCachingBlockAllocator(3, 2)
    pool.eviction_policy = watch
    a = pool.allocate_immutable(None, [1, 2])
    b = pool.allocate_immutable(None, [3, 4])
    pool.free([b])
    pool.free([a])
    assert pool.allocate(1) == [2]
    assert seen == []  # a block without content was free
    assert pool.allocate(2) == [b, a]
    assert seen == [{1: 1, 0: 0}, {0: 0}]
    assert list(seen[0]) == [b, a]


def test_a_head_takes_its_followers_with_it():
    manager = manager_with(min, block_size=4, num_gpu_blocks=4)  # the lowest block: the head
    cache_prompts(manager, [range(12)])
    assert manager.stats().gpu.num_cached == 3
    manager.allocate(Sequence("new", range(50, 57)))
    assert manager.stats().gpu.num_cached == 0
    manager.check_invariants()


@pytest.mark.parametrize(
    "policy",
    [lambda cached: -5, lambda cached: None, lambda cached: 1 / 0, "lru"],
    ids=["no such block", "none", "raises", "no function"],
)
def test_a_policy_that_fails_is_dropped_with_a_warning(policy):
    manager = manager_with(policy, block_size=4, num_gpu_blocks=2)
    cache_prompts(manager, [range(8)])
    with pytest.warns(RuntimeWarning, match="eviction_policy must return one of the blocks"):
        cache_prompts(manager, [range(20, 28)])
    assert manager.cache.eviction_policy is None
    assert cache_prompts(manager, [range(40, 48), range(40, 48)]) == [0, 4]  # no second warning
    manager.check_invariants()


def test_random_choices_keep_every_invariant():
    rng = random.Random(0)
    manager = manager_with(
        lambda cached: rng.choice(list(cached)),
        block_size=2,
        num_gpu_blocks=12,
        max_cached_blocks=6,
    )
    live = []
    for name in range(400):
        sequence = Sequence(name, rng.choices(range(2), k=rng.randrange(1, 9)))
        if manager.can_allocate(sequence) is AllocStatus.OK:
            manager.allocate(sequence)
            manager.mark_computed(sequence, len(sequence))
            live.append(sequence)
        else:
            manager.free(live.pop(rng.randrange(len(live))))
        manager.check_invariants()
    assert manager.stats().prefix_hit_tokens > 0
    assert manager.cache.eviction_policy is not None
