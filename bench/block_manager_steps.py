"""Decode steps of running sequences, for `block_manager`."""

from __future__ import annotations

import random
from functools import partial
from itertools import count

from bench.block_manager_works import BLOCK_SIZE, admitted, freeze, manager_of, random_tokens
from bench.records import Work
from paged import Sequence


def steps(
    rng: random.Random, pool: int, context: int, num_seqs: int, *, single_calls: bool = False
) -> Work:
    """Steps of `num_seqs` sequences of about `context` tokens, tables and slots included.

    Between them one leaves now and then, one joins and two change places.
    """
    manager = manager_of(pool)
    names = count()

    def admit() -> Sequence:
        tokens = random_tokens(rng, context + rng.randrange(BLOCK_SIZE))
        return admitted(manager, next(names), tokens)

    def by_single_calls(tokens: list[int]) -> None:
        for seq, token in zip(seqs, tokens, strict=True):
            manager.mark_computed(seq, len(seq))
            seq.append_token(token)
            manager.append_slots(seq)
        manager.build_batch(seqs)

    seqs = [admit() for _ in range(num_seqs)]
    freeze()
    for number in count():
        tokens = random_tokens(rng, num_seqs)
        if number % 4 == 0:
            manager.free(seqs.pop(rng.randrange(num_seqs)))
            seqs.append(admit())
        i, j = rng.randrange(num_seqs), rng.randrange(num_seqs)
        seqs[i], seqs[j] = seqs[j], seqs[i]
        yield (
            partial(by_single_calls, tokens)
            if single_calls
            else partial(manager.step, seqs, tokens)
        )


def append_and_slot(rng: random.Random, num_seqs: int, context: int) -> Work:
    """The barest step: a token appended and its slot computed, sequence by sequence."""
    texts = [random_tokens(rng, context) for _ in range(num_seqs)]
    tables = [list(range(2 * context // BLOCK_SIZE)) for _ in range(num_seqs)]

    def step(tokens: list[int]) -> list[int]:
        slots = []
        for text, table, token in zip(texts, tables, tokens, strict=True):
            position = len(text)
            text.append(token)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        return slots

    while True:
        yield partial(step, random_tokens(rng, num_seqs))
