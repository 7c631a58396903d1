"""The engine over tiny random models: the tokens of plain transformers, how they end, their text."""

from types import SimpleNamespace

import pytest
import torch
from engine_helpers import EOS, PROMPTS, assert_empty, engine, greedy, tokens_of
from tiny_models import KINDS, tiny_model

from paged.engine import SamplingParams

# Tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_num_batched_tokens", [5, 2048])
def test_greedy_tokens_are_those_of_transformers(kind, max_num_batched_tokens):
    subject = engine(kind, max_num_batched_tokens=max_num_batched_tokens)
    outputs = subject.generate(PROMPTS, SamplingParams(max_tokens=9))
    expected = [[greedy(kind, prompt, 9)] for prompt in PROMPTS]
    assert tokens_of(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        (one,) = output.outputs
        assert one.finish_reason == ("stop" if one.token_ids[-1] == EOS else "length")
        assert output.finished and output.error is None and output.prompt is None
    assert_empty(subject)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_tokens_do_not_change_when_the_pool_is_too_small(preemption):
    subject = engine(blocks=13, cpu_blocks=40, preemption=preemption)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    expected = engine().generate(PROMPTS, params)
    outputs = subject.generate(PROMPTS, params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert subject.scheduler.num_preemptions[preemption] > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == sum(
        subject.scheduler.num_preemptions.values()
    )
    assert_empty(subject)
    assert any("too small" in sentence for sentence in subject.advice())


def test_n_sequences_are_those_of_n_single_runs():
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=12, temperature=1.5, n=4, seed=7)
    subject = engine()
    copies = []
    copy_blocks = subject.runner.cache.copy_blocks
    subject.runner.cache.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))
    (output,) = subject.generate([prompt], params)
    singles = [
        engine().generate([prompt], SamplingParams(max_tokens=12, temperature=1.5, seed=7 + index))[
            0
        ]
        for index in range(4)
    ]
    assert tokens_of([output])[0] == [one.outputs[0].token_ids for one in singles]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len(copies) == 3  # the last holder of the prompt's partial block writes in place


def test_without_a_seed_draws_differ_from_run_to_run():
    params = SamplingParams(max_tokens=12, temperature=3.0)
    outputs = engine().generate([PROMPTS[0]] * 4, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


def transformers_beams(kind, prompt, params):
    found = tiny_model(kind).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=params.max_tokens,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=[EOS, *params.stop_token_ids],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = {EOS, *params.stop_token_ids}
    results = []
    for tokens in found.sequences[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        results.append(tokens[:stop])
    return results, found.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_beams_are_those_of_transformers(kind, early_stopping):
    params = SamplingParams(
        max_tokens=10,
        num_beams=4,
        n=4,
        early_stopping=early_stopping,
        length_penalty=0.5,
        stop_token_ids=range(60, 70),
    )
    subject = engine(kind)
    outputs = subject.generate(PROMPTS[:3], params)
    stopped = 0
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        tokens, scores = transformers_beams(kind, prompt, params)
        assert tokens_of([output])[0] == tokens
        assert [one.score for one in output.outputs] == pytest.approx(scores, rel=1e-4)
        stopped += sum(one.finish_reason == "stop" for one in output.outputs)
    assert stopped > 0
    assert_empty(subject)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 2048])
def test_beams_that_have_parted_come_back_from_preemption(preemption, max_num_batched_tokens):
    params = SamplingParams(max_tokens=16, num_beams=4, n=2, ignore_eos=True)
    subject = engine(
        blocks=17,
        cpu_blocks=40,
        preemption=preemption,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    outputs = subject.generate(PROMPTS[:3], params)
    assert tokens_of(outputs) == tokens_of(engine().generate(PROMPTS[:3], params))
    assert subject.scheduler.num_preemptions[preemption] > 0
    assert_empty(subject)


# Ends


def test_a_stop_token_is_the_last():
    prompt = PROMPTS[0]
    tokens = greedy("llama", prompt, 20)
    stop = tokens[6]
    (output,) = engine().generate([prompt], SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_the_models_own_end_can_be_ignored():
    subject = engine()
    subject.runner.eos_token_ids = (greedy("llama", PROMPTS[0], 3)[2],)
    short, long = (
        subject.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=ignore))[0]
        for ignore in (False, True)
    )
    assert (short.outputs[0].finish_reason, long.outputs[0].finish_reason) == ("stop", "length")
    assert len(long.outputs[0].token_ids) == 8


def test_the_models_length_ends_a_sequence():
    limit = tiny_model("llama").config.max_position_embeddings
    prompt = [7] * (limit - 3)
    (output,) = engine().generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")


def test_a_sequence_that_outgrows_the_pool_keeps_what_it_has():
    subject = engine(blocks=4)
    (output,) = subject.generate([[5] * 10], SamplingParams(max_tokens=50, ignore_eos=True))
    (one,) = output.outputs
    assert (one.finish_reason, output.finished) == ("rejected", True)
    assert len(one.token_ids) == 16 - 10 + 1
    assert "4 blocks" in output.error
    assert_empty(subject)


def test_a_prompt_that_the_scheduler_can_never_take_is_rejected_with_the_reason():
    subject = engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    long, short = subject.generate([[5] * 11, [5] * 10], SamplingParams(max_tokens=2))
    assert (long.outputs[0].finish_reason, long.outputs[0].token_ids) == ("rejected", [])
    assert "11" in long.error and "10" in long.error
    assert short.outputs[0].finish_reason == "length"


def test_logits_that_are_not_numbers_end_only_their_request():
    subject = engine()
    forward = subject.runner.forward
    steps = iter(range(10**6))

    def spoiled(*arguments):
        logits = forward(*arguments)
        if next(steps) == 2:
            logits[[1, -1]] = torch.nan
        return logits

    subject.runner.forward = spoiled
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(max_tokens=6, ignore_eos=True, n=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(max_tokens=6, ignore_eos=True, num_beams=3),
    ]
    outputs = subject.generate(PROMPTS[:4], params)
    reasons = [[one.finish_reason for one in output.outputs] for output in outputs]
    assert reasons == [["length"], ["error", "error"], ["length"], []]
    assert [bool(output.error) for output in outputs] == [False, True, False, True]
    assert "NaN" in outputs[1].error
    assert len(outputs[1].outputs[0].token_ids) == 2
    expected = engine().generate([PROMPTS[0], PROMPTS[2]], params[0])
    assert tokens_of([outputs[0], outputs[2]]) == tokens_of(expected)
    assert_empty(subject)


# Text and times


class Letters:
    """A token per letter: 'a' is 10. Token 2 is special."""

    def encode(self, text):
        return [ord(letter) - 87 for letter in text]

    def decode(self, token_ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(chr(token + 87) for token in token_ids if token != EOS)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_text_comes_in_pieces_without_the_token_that_stops_it(num_beams):
    prompt = "hello"
    token_ids = Letters().encode(prompt)
    subject = engine(tokenizer=Letters())
    params = SamplingParams(num_beams=num_beams, stop_token_ids=range(20, 50))
    outputs = list(subject.stream(prompt, params))
    (last,) = outputs[-1].outputs
    assert last.finish_reason == "stop" and last.token_ids[-1] in params.stop_token_ids
    assert last.text == "".join(output.outputs[0].new_text for output in outputs)
    assert last.text == "".join(chr(token + 87) for token in last.token_ids[:-1])
    assert outputs[-1].prompt == prompt and outputs[-1].prompt_token_ids == token_ids


def test_times_and_metrics():
    calls = SimpleNamespace(watched=None, first=[], finish=[])
    calls.watch = lambda source: setattr(calls, "watched", source)
    calls.on_first_token = calls.first.append
    calls.on_finish = lambda *arguments: calls.finish.append(arguments)
    subject = engine(metrics=calls)
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=4, ignore_eos=True, n=2, temperature=1.0),
        SamplingParams(max_tokens=3, ignore_eos=True, num_beams=2),
    ]
    outputs = subject.generate(PROMPTS[:3], params)
    assert calls.watched is subject
    assert len(calls.first) == 3 and min(calls.first) > 0
    assert sorted(num_tokens for _, num_tokens in calls.finish) == [3, 4, 4, 5]
    for output in outputs:
        times = output.metrics
        assert times.arrival_time < times.first_token_time < times.finish_time
    assert subject.tally.computed_tokens == sum(map(len, PROMPTS[:3])) + 4 + 2 * 3 + 2 * 2
