"""Advice: silent when all is well, else it names the figure and the setting."""

import pytest

from paged.advice import Load, advise, flags_line

CALM = {"steps": 100, "num_blocks": 64, "peak_blocks": 60, "requests": 10, "computed_tokens": 1000}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_short_of_blocks": 20},
        {"steps_short_of_seats": 90},  # the pool is used
        {"recomputed": 1, "recomputed_tokens": 50},
        {"swapped": 5},
        {"alike": 9, "hits": 5},
    ],
    ids=lambda changes: " ".join(changes) or "nothing",
)
def test_nothing_to_say(changes):
    assert advise(Load(**CALM | changes)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps_short_of_blocks": 21}, ("21%", "pool of 64", "num_gpu_blocks", "max_num_seqs")),
        ({"steps_short_of_seats": 50, "peak_blocks": 9}, ("50%", "9 of 64", "raise max_num_seqs")),
        (
            {"recomputed": 3, "recomputed_tokens": 100},
            ("3 preempt", "100 tok", "10%", "a CPU pool"),
        ),
        (
            {"recomputed": 3, "recomputed_tokens": 100, "num_cpu_blocks": 4},
            ("a larger CPU pool", "num_cpu_blocks"),
        ),
        ({"recomputed": 1, "recomputed_tokens": 64}, ("1 preemption made 64 tokens be", "6%")),
        ({"swapped": 1, "requests": 1}, ("1 time a request", "with 1 request in all")),
        ({"swapped": 6}, ("6 times", "10 requests", "num_gpu_blocks")),
        ({"alike": 9, "hits": 4}, ("9 prompts", "4 found", "raise num_gpu_blocks")),
        ({"alike": 9, "has_prefix_cache": False}, ("0 found", "enable_prefix_caching")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_one_figure_stands_out(changes, words):
    (sentence,) = advise(Load(**CALM | changes))
    for word in words:
        assert word in sentence


def test_options_are_named_for_what_advice_is_about():
    assert flags_line([]) is None
    assert flags_line(["raise num_gpu_blocks, or", "lower max_num_seqs"]) == (
        "options here: num_gpu_blocks is --num-blocks, max_num_seqs is --max-num-seqs"
    )
    assert flags_line(["raise max_num_seqs"], {"max_num_seqs": "-s"}) == (
        "options here: max_num_seqs is -s"
    )
