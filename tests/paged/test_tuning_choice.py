"""The rule that picks a block size, on costs and times made up to meet each of its branches."""

import pytest

from paged.tuning import Candidate, Ratio, recommend, sweep_block_sizes
from paged.tuning.choice import SLACK, SMALLEST, TOO_MUCH

SIZES = (1, 4, 8, 16, 32, 64, 128)


def candidates(costs, **times):
    return [
        Candidate(size, cost, **{name: ratios.get(size) for name, ratios in times.items()})
        for size, cost in costs.items()
    ]


def slow(value):
    return Ratio(value, value - 0.05, value + 0.05, 20)


def noisy(value):
    return Ratio(value, 0.9, value + 2, 20)


SHORT = {1: 0.0, 4: 0.03, 8: 0.08, 16: 0.16, 32: 0.3}
LONG = {8: 0.001, 16: 0.002, 32: 0.004, 64: 0.008, 128: 0.016}


@pytest.mark.parametrize(
    ("costs", "times", "block_size", "words"),
    [
        (LONG, {}, 64, ("0.8%", "0.2%", "128 would cost 1.6%")),
        (LONG, {"kernel_time": {64: slow(1.4)}}, 32, ("attention takes 1.40",)),
        (LONG, {"kernel_time": {64: noisy(1.4)}}, 64, ("128 would cost",)),
        (LONG, {"host_time": {32: slow(1.9)}}, 16, ("with 32 the host takes 1.90",)),
        (SHORT, {}, 8, ("16.0%", "8.0%", "smaller sizes than 8")),
        (SHORT, {"host_time": {8: slow(1.6)}}, 16, ("which is much", "with 8 the host")),
        ({8: 0.29, 16: 0.3}, {}, 16, ("8 would save only 1.0%",)),
        ({16: 0.05, 32: 0.05 + 2 * SLACK}, {}, 16, ("costs 5.0%", "32 would cost 7.0%")),
        ({16: 0.05}, {}, 16, ("no larger size was asked for",)),
        ({1: 0.0, 4: 0.2}, {}, 4, ("costs 20.0%",)),
        ({64: 0.01, 128: 0.015}, {}, 128, ("1.5%",)),
    ],
    ids=[
        "long",
        "slow kernel",
        "noisy kernel",
        "slow host",
        "short",
        "short, slow host",
        "not worth it",
        "larger costs too much",
        "alone",
        "only small ones",
        "only large ones",
    ],
)
def test_the_rule_and_its_words(costs, times, block_size, words):
    found = recommend(candidates(costs, **times))
    assert found.block_size == block_size
    for word in words:
        assert word in str(found)


def recommended(traffic):
    return sweep_block_sizes(traffic, SIZES, replayed=False).recommendation.block_size


def test_short_chats_take_small_blocks_and_long_documents_larger_ones():
    assert recommended([(20, 20)] * 50) == SMALLEST
    assert recommended([(200, 200)] * 50) == 16
    assert recommended([(1500, 100)] * 50) == 32
    assert recommended([(30_000, 500)] * 50) == 128


@pytest.mark.parametrize("length", [30, 100, 300, 1000, 3000, 10_000, 30_000])
def test_the_recommended_size_grows_with_the_traffic(length):
    traffic = [(length + step, length // 10) for step in range(97)]
    sweep = sweep_block_sizes(traffic, SIZES, replayed=False)
    found = sweep.recommendation.block_size
    assert recommended([(3 * prompt, 3 * output) for prompt, output in traffic]) >= found
    assert found == SMALLEST or sweep.row(found).cost <= max(sweep.row(16).cost + SLACK, TOO_MUCH)
