"""Requests that come, go, share, hurry or stream, and steps that fail among them."""

import random

import pytest
from engine_helpers import (
    PROMPTS,
    Failure,
    assert_empty,
    engine,
    failing,
    greedy,
    run,
    tokens_of,
)

from paged.engine import SamplingParams

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
