"""An engine over a tiny random model, and what its runs are held to."""

import torch
from tiny_models import tiny_model

from paged import CacheConfig, SchedulerConfig
from paged.engine import Engine

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
