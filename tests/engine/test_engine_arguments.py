"""What an engine and a request are made of, and how a wrong one is refused."""

import pytest
import torch
from engine_helpers import PROMPTS, assert_empty, engine, greedy, run, tokens_of
from tiny_models import VOCAB_SIZE, tiny_model

from paged import PromptTooLongError
from paged.engine import Engine, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("text", {}, TypeError, "without a tokenizer"),
        ([], {}, ValueError, "prompt is empty"),
        ([3, "a"], {}, TypeError, "token 'a' at position 1"),
        ([3, VOCAB_SIZE], {}, ValueError, f"token {VOCAB_SIZE} at position 1"),
        ([3, -1], {}, ValueError, "token -1"),
        ([3] * 128, {}, PromptTooLongError, "128 tokens; the model takes 128"),
        ([3] * 41, {}, PromptTooLongError, "41 tokens; the pool has 10 blocks of 4"),
        ([3], {"num_beams": 5}, ValueError, "num_beams is 5; .* at least 9 for it, and one is 8"),
        ([3], {"n": 9, "temperature": 1.0}, ValueError, "n is 9; .* at least 9 .*, and one is 8"),
    ],
    ids=range(9),
)
def test_a_wrong_request_is_refused_and_nothing_has_changed(prompt, params, error, words):
    subject = engine(blocks=10, max_num_seqs=8)
    with pytest.raises(error, match=words):
        subject.add_request(prompt, SamplingParams(**params))
    with pytest.raises(error, match=words):
        subject.generate([[3, 4], prompt], SamplingParams(**params))
    assert not subject.has_unfinished
    assert subject.step() == []
    assert_empty(subject)


def test_names_priorities_and_params_are_checked():
    subject = engine()
    assert subject.add_request([3], request_id="1") == "1"
    assert [subject.add_request([3]) for _ in range(2)] == ["0", "2"]
    with pytest.raises(TypeError, match="params is"):
        subject.add_request([3], {"n": 1})
    with pytest.raises(ValueError, match="priority is 3"):
        subject.add_request([3], priority=3)
    with pytest.raises(ValueError, match="'1'"):
        subject.add_request([3], request_id="1")
    with pytest.raises(ValueError, match="'9'"):
        subject.abort("9")
    for call in (lambda name: subject.add_request([3], request_id=name), subject.abort):
        with pytest.raises(TypeError, match=r"request_id is \[1\]; it must be hashable"):
            call([1])
    run(subject)
    assert subject.add_request([3], request_id="1") == "1"


@pytest.mark.parametrize(
    ("params", "least"),
    [
        (SamplingParams(n=4, temperature=1.0, seed=1), 4),
        (SamplingParams(num_beams=2, ignore_eos=True), 3),
        (SamplingParams(num_beams=4, ignore_eos=True), 7),
    ],
    ids=["samples", "two beams", "four beams"],
)
def test_the_least_step_that_takes_a_request_is_enough(params, least):
    expected = tokens_of(engine().generate([PROMPTS[0]], params))
    assert tokens_of(engine(max_num_seqs=least).generate([PROMPTS[0]], params)) == expected
    with pytest.raises(ValueError, match=f"at least {least} for it, and one is {least - 1}"):
        engine(max_num_seqs=least - 1).add_request(PROMPTS[0], params)


@pytest.mark.parametrize(
    ("name", "value", "error", "wanted"),
    [
        ("cache_config", 0, TypeError, "a CacheConfig or None"),
        ("scheduler_config", 0, TypeError, "a SchedulerConfig or None"),
        ("tokenizer", "gpt2", TypeError, "have encode, decode"),
        ("metrics", 3, TypeError, "have watch, on_first_token, on_finish"),
        ("backend", "x", ValueError, "None or one of triton, torch, reference"),
    ],
    ids=["cache", "scheduler", "tokenizer", "metrics", "backend"],
)
def test_what_an_engine_is_made_of_is_checked_at_once(name, value, error, wanted):
    with pytest.raises(error, match=f"{name} .*must (be )?{wanted}"):
        Engine(tiny_model("llama"), **{name: value})


def test_params_must_be_as_many_as_prompts():
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        engine().generate([[3], [4], [5]], [SamplingParams()] * 2)
    with pytest.raises(TypeError, match="params is 3; it must be a list of SamplingParams"):
        engine().generate([[3]], 3)


def test_prompts_may_be_a_tensor():
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    expected = tokens_of(engine().generate([[3, 4], [5, 6]], params))
    assert tokens_of(engine().generate(torch.tensor([[3, 4], [5, 6]]), params)) == expected
    assert tokens_of(engine().generate(torch.tensor([3, 4]), params)) == expected[:1]
    with pytest.raises(TypeError, match="prompts is None"):
        engine().generate(None)


def test_progress_is_shown_when_asked_for(capfd):
    engine().generate(PROMPTS[:3], SamplingParams(max_tokens=2))
    assert capfd.readouterr().err == ""
    engine().generate(PROMPTS[:3], SamplingParams(max_tokens=2), progress=True)
    assert "3/3" in capfd.readouterr().err


def test_one_prompt_may_come_without_a_list_around_it():
    assert tokens_of(engine().generate([5, 9, 3])) == [[greedy("llama", [5, 9, 3], 16)]]
    assert engine().generate([]) == []
