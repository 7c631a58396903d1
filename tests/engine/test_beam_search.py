"""Beam search: the rules alone, against transformers' own search over the same tiny model."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paged.engine.beam_search import BeamSearch
from paged.engine.sampling import SamplingParams

VOCAB = 11


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,  # peaked: beams differ in score
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def searched(model, prompt, params, stop_token_ids):
    """What `BeamSearch` finds when each step computes every beam from the start."""
    search = BeamSearch(params, params.max_tokens, stop_token_ids)
    beams = [list(prompt)]
    while not search.is_done:
        with torch.inference_mode():
            logits = model(torch.tensor(beams)).logits[:, -1]
        beams = [[*beams[beam], token] for beam, token in search.advance(search.candidates(logits))]
    return search.best


def generated(model, prompt, params, stop_token_ids):
    """Tokens and scores of transformers; tokens after a stop token cut off."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),  # also where the prompt holds the padding token
        max_new_tokens=params.max_tokens,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for tokens in found.sequences[:, len(prompt) :].tolist():
        end = next(
            (i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens)
        )
        texts.append(tokens[:end])
    return texts, found.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("stop_token_ids", [(), (3,), (3, 7, 9)], ids=["none", "one", "three"])
def test_beams_and_scores_are_those_of_transformers(
    model, early_stopping, length_penalty, stop_token_ids
):
    for seed, (num_beams, n, max_tokens) in enumerate([(4, 4, 9), (2, 1, 12), (3, 2, 1)]):
        prompt = torch.randint(VOCAB, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        params = SamplingParams(
            max_tokens=max_tokens,
            num_beams=num_beams,
            n=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        best = searched(model, prompt, params, stop_token_ids)
        texts, scores = generated(model, prompt, params, stop_token_ids)
        assert [beam.token_ids for beam in best] == texts
        assert [beam.score for beam in best] == pytest.approx(scores, rel=1e-4)


def advance(search, *probabilities):
    return search.advance(search.candidates(torch.tensor(probabilities).log()))


def test_three_steps_by_hand():
    search = BeamSearch(SamplingParams(num_beams=2, max_tokens=3, n=2), 3, {0})
    assert advance(search, [0.1, 0.5, 0.4]) == [(0, 1), (0, 2)]
    assert advance(search, [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]) == [(0, 2), (1, 1)]
    assert not search.is_done  # 2 0 has ended, one place is empty
    assert advance(search, [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]) == []
    assert search.is_done
    first, second = search.best
    assert (first.token_ids, first.is_stopped) == ([1, 2, 1], False)
    assert first.score == pytest.approx(math.log(0.5 * 0.8 * 0.6) / 3)
    assert (second.token_ids, second.is_stopped) == ([2, 0], True)
    assert second.score == pytest.approx(math.log(0.4 * 0.7) / 2)


def test_a_logit_that_is_not_a_number_gives_no_candidates():
    search = BeamSearch(SamplingParams(num_beams=2), 16, ())
    assert search.candidates(torch.tensor([[0.0, torch.nan, 1.0]])) is None
    assert advance(search, [0.2, 0.5, 0.3]) == [(0, 1), (0, 2)]
