"""Hits that a trace allows: by hand, against tokens compared one by one, against the real cache."""

import random
from itertools import takewhile

import pytest

from paged import BlockSpaceManager, CacheConfig, Sequence
from paged.trace import Request
from paged.tuning import TuningError, expected_loss, hit_tokens, shared_prefixes
from paged.tuning.traffic import StandIns


def random_trace(seed, num_requests=30):
    """Prompts that continue, cut short or leave earlier ones, some by less than a hash block."""
    rng, requests, fresh = random.Random(seed), [], iter(range(10**6))
    for index in range(num_requests):
        ids = []
        if requests and rng.random() < 0.8:
            earlier = rng.choice(requests).hash_ids
            ids = list(earlier[: rng.randint(0, len(earlier))])
        ids += [next(fresh) for _ in range(rng.randint(not ids, 3))]
        length = len(ids) * 512 - rng.choice((0, 0, 1, 100, 511, rng.randrange(512)))
        requests.append(Request(float(index), length, 1, tuple(ids)))
    return requests


def prompts_of(requests):
    stand_ins = StandIns()
    return [stand_ins.prompt(request, index) for index, request in enumerate(requests)]


def test_prefixes_by_hand():
    requests = [
        Request(0.0, 600, 1, (1, 2)),  # 88 tokens of its second hash block
        Request(1.0, 1024, 1, (1, 2)),
        Request(2.0, 1500, 1, (1, 2, 3)),
        Request(3.0, 512, 1, (1,)),
        Request(4.0, 512, 1, (2,)),  # the same id elsewhere is another prefix
    ]
    assert shared_prefixes(requests) == [0, 600, 1024, 512, 0]
    shared = shared_prefixes(requests)
    assert hit_tokens(requests, shared, 1) == 600 + 1024 + 511
    assert hit_tokens(requests, shared, 16) == 592 + 1024 + 496
    assert hit_tokens(requests, shared, 512) == 512 + 1024
    assert hit_tokens(requests, shared, 1024) == 1024


@pytest.mark.parametrize("seed", range(4))
def test_shared_prefixes_are_what_comparing_tokens_finds(seed):
    requests = random_trace(seed)
    prompts = prompts_of(requests)

    def common(first, second):
        return len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        )

    found = [
        max((common(prompt, earlier) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    ]
    assert shared_prefixes(requests) == found


@pytest.mark.parametrize("block_size", [1, 16, 48, 512])
def test_hits_are_those_of_the_real_cache_with_room_for_all(block_size):
    requests = random_trace(7)
    manager = BlockSpaceManager(CacheConfig(block_size=block_size, num_gpu_blocks=60_000))
    hits = 0
    for index, prompt in enumerate(prompts_of(requests)):
        sequence = Sequence(index, prompt)
        manager.allocate(sequence)
        hits += manager.num_cached_tokens(sequence)
        manager.mark_computed(sequence, len(sequence))
        manager.free(sequence)
    assert hits > 0
    assert hit_tokens(requests, shared_prefixes(requests), block_size) == hits


@pytest.mark.parametrize("seed", range(4))
def test_expected_loss_is_the_average_over_every_place_to_part(seed):
    requests = random_trace(seed)
    shared = shared_prefixes(requests)
    for block_size in (1, 16, 100, 512, 2048):
        loss = 0.0
        for request, number in zip(requests, shared, strict=True):
            most = request.prompt_len - 1
            parts = [end for end in range(number, number + 512) if end <= most] or [most]
            loss += (number > 0) * sum(end % block_size for end in parts) / len(parts)
        assert expected_loss(requests, shared, block_size) == pytest.approx(loss)


def test_a_trace_without_hash_ids_is_refused():
    with pytest.raises(TuningError, match="hash_ids"):
        shared_prefixes([Request(0.0, 9, 1)])
