"""Slots that carry no token, in closed form: by arithmetic on lengths alone.

A sequence of n tokens holds ceil(n / b) blocks of b slots. Nothing else is wasted: any free block
serves any sequence. Sharing is left out here; a replay counts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paged.trace import Request

from .traffic import life


class Slots(NamedTuple):
    """Token slots that are held, and those of them that carry a token; over steps, summed."""

    held: int
    tokens: int

    @property
    def waste(self) -> float:
        """Share of the held slots without a token, 0..1."""
        return 1 - self.tokens / self.held if self.held else 0.0


def slots_at_end(requests: Iterable[Request], block_size: int) -> Slots:
    """Every sequence at its full length.

    >>> slots_at_end([Request(0.0, 17, 0)], 32)
    Slots(held=32, tokens=17)
    """
    lengths = [life(request)[-1] for request in requests]
    return Slots(sum(-(-length // block_size) * block_size for length in lengths), sum(lengths))


def slots_over_life(requests: Iterable[Request], block_size: int) -> Slots:
    """Every sequence in each of its steps, from the prompt to its full length."""
    held = tokens = 0
    for request in requests:
        steps = life(request)
        held += _held_up_to(steps[-1], block_size) - _held_up_to(steps[0] - 1, block_size)
        tokens += (steps[0] + steps[-1]) * len(steps) // 2
    return Slots(held, tokens)


def _held_up_to(length: int, block_size: int) -> int:
    """Slots held by sequences of 1, 2, ..., `length` tokens together."""
    full, rest = divmod(length, block_size)
    blocks = block_size * full * (full + 1) // 2 + rest * (full + 1)
    return blocks * block_size
