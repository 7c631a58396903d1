"""Waste and reservations in closed form: by hand, then against counting slot by slot."""

from pathlib import Path

import numpy as np
import pytest

from paged.trace import Request
from paged.tuning import as_requests, reservations, slots_at_end, slots_over_life

AZURE = Path(__file__).parents[3] / "shared" / "traces" / "AzureLLMInferenceTrace_code.csv"


def test_seventeen_tokens_waste_as_much_of_one_32_block_as_of_two_16_blocks():
    (request,) = as_requests([17])
    for block_size in (32, 16):
        slots = slots_at_end([request], block_size)
        assert (slots.held, slots.tokens) == (32, 17)
        assert round(100 * slots.waste) == 47
    assert slots_at_end([request], 8).held == 24
    assert slots_at_end([request], 1).waste == 0


def test_a_life_by_hand():
    """5, 6, 7, 8 and 9 tokens in blocks of 4: 8, 8, 8, 8 and 12 slots."""
    requests = as_requests([(5, 5)])
    assert slots_over_life(requests, 4) == (44, 35)
    assert slots_at_end(requests, 4) == (12, 9)


@pytest.mark.parametrize("seed", range(5))
def test_closed_forms_equal_counting_every_step(seed):
    rng = np.random.default_rng(seed)
    pairs = rng.integers([1, 0], [300, 60], (20, 2)).tolist()
    requests = as_requests([tuple(pair) for pair in pairs])
    for block_size in (1, 3, 16, 64, 500):
        held = tokens = 0
        for prompt, output in pairs:
            for length in range(prompt, prompt + max(output, 1)):
                tokens += length
                held += next(n for n in range(length, length + block_size) if n % block_size == 0)
        assert slots_over_life(requests, block_size) == (held, tokens)


def test_four_ways_of_reserving_by_hand():
    """Two sequences: 3 to 5 tokens in three steps, and 20 tokens in one; blocks of 4."""
    longest, power, pages, oracle = reservations(as_requests([(3, 3), 20]), 4, memory_tokens=100)
    assert [row.scheme for row in (longest, power, pages, oracle)] == [
        "longest",
        "power of two",
        "pages",
        "oracle",
    ]
    tokens = 3 + 4 + 5 + 20
    assert (longest.use_at_end, longest.use_over_life) == (25 / 40, tokens / 80)
    assert (power.use_at_end, power.use_over_life) == (25 / 40, tokens / (3 * 8 + 32))
    assert (pages.use_at_end, pages.use_over_life) == (25 / 28, tokens / (4 + 4 + 8 + 20))
    assert (oracle.use_at_end, oracle.use_over_life) == (1, tokens / (3 * 5 + 20))
    assert [row.average for row in (longest, power, pages, oracle)] == [20, 14, 9, 35 / 4]
    assert [row.sequences for row in (longest, power, pages, oracle)] == [5, 7, 11, 11]
    assert pages.to_dict()["scheme"] == "pages"


def test_without_a_memory_nothing_is_counted_to_fit():
    assert {row.sequences for row in reservations([Request(0.0, 9, 2)], 16)} == {None}


@pytest.mark.skipif(not AZURE.exists(), reason="the Azure trace is not beside the repository")
def test_a_production_trace_uses_its_reservations_as_published():
    requests = as_requests(AZURE)
    assert len(requests) == 8819
    shares = {row.scheme: row.use_at_end for row in reservations(requests, 16)}
    rounded = {scheme: round(100 * share, 1) for scheme, share in shares.items()}
    assert rounded == {"longest": 26.5, "power of two": 72.3, "pages": 99.6, "oracle": 100.0}
    assert round(100 - 100 * slots_at_end(requests, 32).waste, 1) == 99.3
