"""Sampling: arguments, what top_k and top_p keep, draws that follow the seed and nothing else."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paged.engine.sampling import Draw, SamplingParams, choose, probabilities, uniform


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens is 1.5"),
        ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot'"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"top_p": 0}, ValueError, "top_p is 0"),
        ({"top_p": 1.01}, ValueError, "top_p is 1.01"),
        ({"top_p": True}, TypeError, "top_p is True"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 2**63}, ValueError, "below"),
        ({"n": 0}, ValueError, "n is 0"),
        ({"n": 2}, ValueError, "n is 2 at temperature 0"),
        ({"num_beams": 0}, ValueError, "num_beams is 0"),
        ({"num_beams": 2, "temperature": 0.5}, ValueError, "temperature is 0.5 with num_beams 2"),
        ({"num_beams": 2, "n": 3}, ValueError, "n is 3"),
        ({"length_penalty": 2.0}, ValueError, "num_beams is 1"),
        ({"early_stopping": True}, ValueError, "num_beams is 1"),
        ({"num_beams": 2, "length_penalty": math.inf}, ValueError, "length_penalty is inf"),
        ({"num_beams": 2, "early_stopping": "soon"}, ValueError, "early_stopping is 'soon'"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids is 3"),
        ({"stop_token_ids": ["a"]}, TypeError, "token 'a'"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos is 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        SamplingParams(**arguments)


def test_stop_tokens_of_any_kind_become_plain_ints():
    assert SamplingParams(stop_token_ids=torch.tensor([3, 5])).stop_token_ids == (3, 5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.8, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 7] = logits[0, 9]  # a tie
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p is not None:
        warped = TopPLogitsWarper(top_p)(None, warped)
    got = probabilities(logits, temperature, top_k, top_p)
    torch.testing.assert_close(got, warped.softmax(-1))
    assert torch.equal(got > 0, warped > -torch.inf)


def test_top_k_and_top_p_keep_what_they_should():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert probabilities(logits, 1.0, 2, None)[0].tolist() == pytest.approx([0.625, 0.375, 0])
    assert probabilities(logits, 1.0, None, 0.6)[0].tolist() == pytest.approx([0.625, 0.375, 0])
    assert probabilities(logits, 1.0, None, 0.4)[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-320])
def test_a_tiny_temperature_does_not_overflow(temperature):
    logits = torch.tensor([[-300.0, 40.0, 700.0, 12.0]])
    assert probabilities(logits, temperature, None, None)[0].tolist() == [0, 0, 1, 0]


def test_temperature_0_takes_the_most_probable_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -torch.inf, 4.0]])
    greedy = Draw(SamplingParams(), seed=0, position=0)
    assert choose(logits, [greedy, greedy]) == [1, 0]


def test_uniform_is_a_function_of_seed_and_position_and_spreads_evenly():
    points = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert points == [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert len(set(points)) == len(points)
    assert 0 <= min(points) < max(points) < 1
    tenths = torch.tensor(points).histc(10, 0, 1)
    assert (tenths - 1000).abs().max() < 5 * math.sqrt(1000 * 0.9)
    pairs = torch.tensor(points).view(50, 200)
    assert (
        torch.corrcoef(torch.stack([pairs[:-1].flatten(), pairs[1:].flatten()]))[0, 1].abs() < 0.05
    )


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log().expand(20_000, 4)
    params = SamplingParams(temperature=1.0)
    tokens = choose(logits, [Draw(params, 3, position) for position in range(20_000)])
    shares = torch.tensor(tokens).bincount(minlength=4) / 20_000
    assert (shares - torch.tensor([0.5, 0.3, 0.2, 0.0])).abs().max() < 0.02
    assert shares[3] == 0


def test_a_draw_does_not_depend_on_the_other_rows():
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(2))
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=9),
        SamplingParams(temperature=1.3, top_p=0.9),
    ]
    draws = [Draw(kinds[row % 4], row, row * 3) for row in range(40)]
    alone = [choose(logits[row : row + 1], [draws[row]])[0] for row in range(40)]
    assert choose(logits, draws) == alone
    assert len(set(alone)) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_a_number_has_no_token(temperature):
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    draw = Draw(SamplingParams(temperature=temperature), 0, 0)
    tokens = choose(logits, [draw] * 3)
    assert tokens[1] is None
    assert tokens[0] is not None and tokens[0] == tokens[2]
