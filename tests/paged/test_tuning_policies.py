"""Eviction policies: by hand, against the real manager, and never above the offline optimum."""

import json
import random
from collections import Counter
from itertools import combinations

import pytest

from paged import BlockSpaceManager, CacheConfig, Sequence
from paged.trace import Request
from paged.tuning import (
    POLICIES,
    TuningError,
    compare_policies,
    fifo,
    largest_first,
    lfu,
    lru,
    optimum,
    reused_last,
)
from paged.tuning.eviction import Prompts, count_hits
from paged.tuning.traffic import StandIns

LETTERS = "ABCDEFGH"


def one_block_prompts(text):
    """Prompts of one full block and one more token each, so that the block can be hit."""
    return [Request(float(i), 513, 0, (LETTERS.index(x), 100)) for i, x in enumerate(text)]


def random_trace(seed, num_requests=60, max_blocks=4):
    rng, tree, requests = random.Random(seed), [()], []
    for index in range(num_requests):
        ids = rng.choice(tree[-20:])
        ids = ids[: rng.randint(0, len(ids))]
        while len(ids) < rng.randint(1, max_blocks):
            ids = (*ids, len(tree) * 10 + len(ids))
        tree.append(ids)
        length = len(ids) * 512 - rng.choice((0, 0, 1, 300))
        requests.append(Request(float(index), length, 0, ids))
    return requests


def hits(requests, policy, num_blocks, most=None):
    return count_hits(Prompts(requests), policy, num_blocks, most) // 512


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ABACA", {lru: 2, fifo: 1, lfu: 2, reused_last: 2, optimum: 2}),  # B or A gives way to C
        ("AABCA", {lru: 1, fifo: 1, lfu: 2, reused_last: 2, optimum: 2}),
        ("ABCBB", {lru: 2, fifo: 2, lfu: 2, reused_last: 2, optimum: 2}),
    ],
    ids=["used again", "used twice", "used last"],
)
def test_each_policy_keeps_what_it_says(text, found):
    """Three blocks: beside a running prompt, of one full block and a partial one, one stays."""
    requests = one_block_prompts(text)
    assert {policy: hits(requests, policy, 3) for policy in found} == found
    assert {hits(requests, policy, 100) for policy in found} == {len(text) - len(set(text))}


def test_largest_first_forgets_the_longest_prompt():
    requests = [
        Request(0.0, 513, 0, (1, 100)),
        Request(1.0, 3 * 512 + 1, 0, (2, 3, 4, 100)),
        Request(2.0, 513, 0, (5, 100)),
        Request(3.0, 513, 0, (1, 100)),
    ]
    assert hits(requests, largest_first, 5) == 1
    assert hits(requests, lru, 5) == 0


def random_policy(seed):
    rng = random.Random(seed)
    return lambda block: rng.random()


class Aging:
    """A policy with a memory: frequency and recency of use, in ten lines."""

    def __init__(self):
        self.scores = Counter()

    def __call__(self, block):
        score = 0.9 * self.scores[block.computed_at, block.position] + block.last_used
        self.scores[block.computed_at, block.position] = score
        return score, -block.position


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_finds_more_than_the_optimum(seed):
    requests = random_trace(seed)
    for num_blocks in (5, 9, 20):
        best = hits(requests, optimum, num_blocks)
        for policy in (*POLICIES.values(), random_policy(seed), Aging()):
            assert hits(requests, policy, num_blocks) <= best


def best_by_trying_everything(prompts, num_blocks):
    def best(number, cached):
        if number == len(prompts.blocks):
            return 0
        blocks, length = prompts.blocks[number], prompts.lengths[number]
        num_hits = 0
        for block in blocks[: (length - 1) // 512]:
            if block not in cached:
                break
            num_hits += 1
        others = cached - set(blocks[:num_hits])
        room = min(len(others), num_blocks - -(-length // 512))
        return num_hits + max(
            best(number + 1, frozenset(kept) | set(blocks)) for kept in combinations(others, room)
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_what_trying_every_choice_finds(seed):
    requests = random_trace(seed, num_requests=9, max_blocks=3)
    for num_blocks in (3, 4, 5):
        expected = best_by_trying_everything(Prompts(requests), num_blocks)
        assert hits(requests, optimum, num_blocks) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [None, 3])
def test_lru_is_what_the_block_manager_does(seed, most):
    requests = random_trace(seed)
    for num_blocks in (4, 6, 11, 100):
        config = CacheConfig(
            block_size=512, num_gpu_blocks=num_blocks, max_cached_blocks=most, watermark=0.0
        )
        manager, stand_ins, found = BlockSpaceManager(config), StandIns(), 0
        for index, request in enumerate(requests):
            sequence = Sequence(index, stand_ins.prompt(request, index))
            manager.allocate(sequence)
            found += manager.num_cached_tokens(sequence)
            manager.mark_computed(sequence, len(sequence))
            manager.free(sequence)
        assert count_hits(Prompts(requests), lru, num_blocks, most) == found


def test_smaller_blocks_hold_parts_of_a_hash_block():
    requests = [Request(0.0, 700, 0, (1, 2)), Request(1.0, 700, 0, (1, 2))]
    assert count_hits(Prompts(requests, 512), lru, 10) == 512
    assert count_hits(Prompts(requests, 64), lru, 100) == 640
    assert count_hits(Prompts(requests, 1), lru, 10_000) == 699


def test_a_comparison_by_hand():
    requests = [*one_block_prompts("ABACA"), Request(9.0, 5 * 512, 0, (7, 8, 9, 10, 11))]
    comparison = compare_policies(requests, [lru, fifo], pool_tokens=[3 * 512, 10**6])
    small, large = comparison.pools
    assert (small.pool_tokens, small.left_out, large.left_out) == (1536, 1, 0)
    assert (small.prompt_tokens, large.prompt_tokens) == (5 * 513, 5 * 513 + 2560)
    assert small.hits == {"lru": 1024, "fifo": 512}
    assert small.optimum == large.optimum == comparison.shared_tokens == 1024
    assert small.share_of_optimum("fifo") == 0.5
    assert comparison.best == "lru"
    figures = json.loads(json.dumps(comparison.to_dict()))
    assert figures["pools"][0]["hits"]["fifo"] == 512
    assert "Most hits in all: lru" in str(comparison)


def test_policies_may_be_named_and_keep_less():
    requests = one_block_prompts("ABCABC")
    comparison = compare_policies(requests, {"mine": lambda block: 0}, pool_tokens=[10**5])
    assert comparison.pools[0].hits == {"mine": 3 * 512}
    none = compare_policies(requests, pool_tokens=[10**5], max_cached_tokens=1023)
    assert set(none.pools[0].hits) == set(POLICIES)
    assert none.pools[0].hits["lru"] == 0
    assert none.pools[0].share_of_optimum("lru") < 1


def test_the_picture_has_a_curve_for_each_policy_and_the_optimum(tmp_path):
    comparison = compare_policies(random_trace(1), pool_tokens=[10_000, 3_000])
    path = tmp_path / "policies.png"
    (axes,) = comparison.plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(axes.lines) == 1 + len(POLICIES)
    best = axes.lines[0].get_ydata()
    assert list(axes.lines[0].get_xdata()) == [3_000, 10_000]
    assert all(all(line.get_ydata() <= best) for line in axes.lines)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trace": [9, 9]}, TuningError, "no hash_ids"),
        ({"policies": {}}, TuningError, "policies is empty"),
        ({"policies": {"x": 3}}, TypeError, r"policies\['x'\] is 3"),
        ({"policies": [lambda b: 0, lambda b: 1]}, TuningError, "equal names"),
        ({"pool_tokens": []}, TuningError, "pool_tokens is empty"),
        ({"pool_tokens": [100]}, ValueError, "pool_tokens is 100"),
        ({"max_cached_tokens": -1}, ValueError, "max_cached_tokens is -1"),
        ({"block_size": 48}, TuningError, "block_size is 48"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        compare_policies(**{"trace": one_block_prompts("AB")} | arguments)


@pytest.mark.parametrize("name", ["optimum", "pool_tokens", None, 1])
def test_a_name_that_the_tables_use_themselves_is_refused(name):
    with pytest.raises(TuningError, match=f"policies has the name {name!r}; it must be a string"):
        compare_policies([Request(0.0, 9, 1, (1,))], {name: lru})


@pytest.mark.parametrize("name", ["pool_tokens", "policies"])
def test_what_must_be_a_list_is_checked(name):
    with pytest.raises(TypeError, match=f"{name} is 5; it must be a list of"):
        compare_policies([Request(0.0, 9, 1, (1,))], **{name: 5})
