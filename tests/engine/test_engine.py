"""The engine over tiny random models: the tokens of plain transformers, whatever happens between."""

import random
from types import SimpleNamespace

import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, tiny_model

from paged import CacheConfig, PromptTooLongError, SchedulerConfig
from paged.engine import Engine, SamplingParams

EOS = 2
PROMPTS = [[5, 9, 3, 7, 1, 8, 4], [11] * 20, [42], list(range(3, 40)), [5, 9, 3, 7, 1, 8, 4, 6]]


def engine(kind="llama", *, blocks=64, cpu_blocks=0, tokenizer=None, metrics=None, **limits):
    config = CacheConfig(block_size=4, num_gpu_blocks=blocks, num_cpu_blocks=cpu_blocks)
    return Engine(
        tiny_model(kind),
        tokenizer=tokenizer,
        cache_config=config,
        scheduler_config=SchedulerConfig(**limits),
        metrics=metrics,
    )


def greedy(kind, prompt, max_tokens):
    """By plain transformers, every token computed from the start."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        with torch.no_grad():
            logits = tiny_model(kind)(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def tokens_of(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


def run(subject, failures=0):
    """Step until all is done; the last output of each request. Steps may raise `Failure`."""
    last = {}
    for _ in range(3000):
        if not subject.has_unfinished:
            break
        try:
            outputs = subject.step()
        except Failure:
            failures -= 1
            continue
        last |= {output.request_id: output for output in outputs}
    assert not subject.has_unfinished
    assert failures <= 0
    assert_empty(subject)
    return last


def assert_empty(subject):
    stats = subject.manager.stats()
    assert stats.gpu.num_used == stats.cpu.num_used == 0
    assert not subject._loop._owners
    subject.manager.check_invariants()


class Failure(Exception):
    pass


def failing(function, steps):
    """`function`, raising on the calls with these numbers: half of them before, half after."""
    calls = iter(range(10**6))

    def called(*arguments, **options):
        number = next(calls)
        if number in steps and number % 2:
            raise Failure
        result = function(*arguments, **options)
        if number in steps:
            raise Failure
        return result

    return called


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


# Failures


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_raises_changes_no_token(seed):
    """With swaps, recomputation, forks and beams under way."""
    rng = random.Random(seed)
    requests = [
        (prompt, params)
        for prompt in PROMPTS
        for params in (
            SamplingParams(max_tokens=9, ignore_eos=True),
            SamplingParams(max_tokens=7, temperature=2.0, n=3, seed=seed),
            SamplingParams(max_tokens=8, num_beams=2, n=2),
        )
    ]
    rng.shuffle(requests)
    expected = [engine().generate([prompt], params)[0] for prompt, params in requests]
    subject = engine(blocks=19, cpu_blocks=8, max_num_batched_tokens=16)
    subject.runner.forward = failing(subject.runner.forward, set(range(0, 300, 3)))
    ids = [subject.add_request(prompt, params) for prompt, params in requests]
    last = run(subject, failures=20)
    assert tokens_of([last[name] for name in ids]) == tokens_of(expected)
    assert min(subject.scheduler.num_preemptions.values()) > 0


@pytest.mark.parametrize("name", ["swap_out", "swap_in", "copy_blocks"])
def test_a_movement_that_raises_is_made_later(name):
    params = [
        SamplingParams(max_tokens=14, ignore_eos=True),
        SamplingParams(max_tokens=14, temperature=2.0, n=2, seed=3, ignore_eos=True),
    ]
    prompts = [prompt for prompt in PROMPTS for _ in params]
    subject = engine(blocks=20, cpu_blocks=60)
    cache = subject.runner.cache
    setattr(cache, name, failing(getattr(cache, name), set(range(40))))
    ids = [
        subject.add_request(prompt, each)
        for prompt, each in zip(prompts, params * len(PROMPTS), strict=True)
    ]
    last = run(subject, failures=3)
    expected = engine(blocks=200).generate(prompts, params * len(PROMPTS))
    assert tokens_of([last[name] for name in ids]) == tokens_of(expected)


def test_rejections_are_told_though_the_step_fails():
    subject = engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    subject.runner.forward = failing(subject.runner.forward, {0, 1})
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    ids = [subject.add_request([5] * length, params) for length in (11, 4)]
    last = run(subject, failures=2)
    assert [last[name].outputs[0].finish_reason for name in ids] == ["rejected", "length"]


def test_generate_that_fails_leaves_nothing_behind():
    subject = engine()
    other = subject.add_request(PROMPTS[2])
    subject.runner.forward = failing(subject.runner.forward, {3})
    with pytest.raises(Failure):
        subject.generate(PROMPTS[:2], SamplingParams(ignore_eos=True))
    assert list(subject.requests) == [other]
    assert list(run(subject)) == [other]


def test_generate_that_fails_leaves_no_rejection_to_be_told():
    subject = engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    subject.runner.forward = failing(subject.runner.forward, {0})
    with pytest.raises(Failure):
        subject.generate([[5] * 11, [5] * 4])
    assert not subject.has_unfinished


# Requests come and go


def test_requests_may_join_at_any_step():
    subject = engine()
    last, ids = {}, []
    for prompt in PROMPTS:
        ids.append(subject.add_request(prompt, SamplingParams(max_tokens=9)))
        for output in subject.step():
            last[output.request_id] = output
    last |= run(subject)
    assert tokens_of(last[name] for name in ids) == [[greedy("llama", p, 9)] for p in PROMPTS]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 8])
def test_abort_at_any_stage(num_steps):
    subject = engine(blocks=14, cpu_blocks=20, max_num_batched_tokens=16)
    kinds = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, n=2, temperature=1.0, ignore_eos=True),
        SamplingParams(max_tokens=12, num_beams=3, ignore_eos=True),
    ]
    ids = [subject.add_request(PROMPTS[0], params) for params in kinds * 2]
    last = {}
    for _ in range(num_steps):
        last |= {output.request_id: output for output in subject.step()}
    for request_id in ids[:5]:
        subject.abort(request_id)
        with pytest.raises(ValueError, match=request_id):
            subject.abort(request_id)
    last |= run(subject)
    for request_id in ids[:5]:
        reasons = {one.finish_reason for one in last[request_id].outputs}
        assert last[request_id].finished and reasons <= {"abort"}
    assert len(last[ids[5]].outputs[0].token_ids) == 12


def test_stream_gives_each_token_once_and_other_requests_wait_for_step():
    subject = engine()
    other = subject.add_request(PROMPTS[3], SamplingParams(max_tokens=3, ignore_eos=True))
    params = [SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=6)]
    pieces = {}
    outputs = list(subject.stream(PROMPTS[:2], params))
    for output in outputs:
        pieces.setdefault(output.request_id, []).extend(output.outputs[0].new_token_ids)
    assert list(pieces.values()) == [greedy("llama", PROMPTS[0], 4), greedy("llama", PROMPTS[1], 6)]
    assert [o.outputs[0].token_ids for o in outputs if o.request_id in list(pieces)[:1]] == [
        greedy("llama", PROMPTS[0], length) for length in (1, 2, 3, 4)
    ]
    with pytest.raises(ValueError, match=other):
        subject.add_request(PROMPTS[0], request_id=other)  # its outputs are still to be told
    told = subject.step()
    assert [output.request_id for output in told] == [other] * 3
    assert told[-1].outputs[0].token_ids == greedy("llama", PROMPTS[3], 3)


@pytest.mark.parametrize("num_read", [0, 1])
def test_closing_a_stream_aborts_what_is_left(num_read):
    subject = engine()
    stream = subject.stream(PROMPTS, SamplingParams(max_tokens=20))
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert not subject.requests
    assert_empty(subject)


def test_a_stream_ends_when_step_has_told_the_rest():
    subject = engine()
    stream = subject.stream(PROMPTS[:2], SamplingParams(max_tokens=4))
    next(stream)
    run(subject)
    assert all(len(output.outputs[0].token_ids) == 1 for output in stream)


def test_a_request_can_be_aborted_while_its_stream_is_read():
    subject = engine()
    outputs = []
    for output in subject.stream(PROMPTS[:2], SamplingParams(max_tokens=20, ignore_eos=True)):
        outputs.append(output)
        if (
            not output.finished
            and len(output.outputs[0].token_ids) == 3
            and "0" in subject.requests
        ):
            subject.abort("0")
    ends = {output.request_id: output for output in outputs if output.finished}
    assert ends["0"].outputs[0].finish_reason == "abort"
    assert len(ends["1"].outputs[0].token_ids) == 20


def test_the_more_urgent_request_is_first():
    subject = engine(policy="priority", max_num_seqs=1)
    for name, priority in (("later", 5), ("sooner", 1)):
        subject.add_request(PROMPTS[0], request_id=name, priority=priority)
    order = [output.request_id for output in iter_steps(subject) if output.finished]
    assert order == ["sooner", "later"]


def iter_steps(subject):
    while subject.has_unfinished:
        yield from subject.step()


def test_an_equal_beginning_is_computed_once():
    subject = engine()
    first, second = (
        subject.generate([[*range(3, 40), last]], SamplingParams(max_tokens=2))[0]
        for last in (50, 60)
    )
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 36)
    assert (subject.tally.hits, subject.tally.cached_tokens) == (1, 36)
    subject.add_request([*range(3, 40), 70], salt="other")
    assert next(iter_steps(subject)).metrics.num_cached_tokens == 0


# Wrong requests


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
