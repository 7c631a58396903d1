"""Lengths, block ids and slots on the host, and what follows from them alone.

All layers of a step come with the same ones. What one call has found out about them, checks and
plans, holds for the next while the numbers are equal. They are compared and not trusted to be those
of last time, because buffers are written anew for every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from .options import AttentionCall

Found = TypeVar("Found")

MOST_FOUND = 32  # things kept about the same numbers
_kept = threading.local()


class Known:
    """Some tensors of integers, and what was found out about them."""

    def __init__(self, numbers: Hashable) -> None:
        self.numbers = numbers
        self._found: dict[Hashable, Any] = {}

    def once(self, question: Hashable, find: Callable[[], Found]) -> Found:
        """What `find` returns; it is called only when this has not been asked yet."""
        if question not in self._found:
            found = find()
            if len(self._found) == MOST_FOUND:
                self._found.clear()
            self._found[question] = found
        answer: Found = self._found[question]
        return answer


def known(use: str, *tensors: Tensor | None) -> Known:
    """What this thread knew at the last call of this use, when these are the same numbers."""
    numbers = tuple(None if x is None else (x.shape, x.dtype, _bytes(x)) for x in tensors)
    kept: Known | None = _kept.__dict__.get(use)
    if kept is None or kept.numbers != numbers:
        kept = _kept.__dict__[use] = Known(numbers)
    return kept


def known_of(call: AttentionCall) -> Known:
    """What is known of the lengths and block ids of an attention call."""
    return known("attention", call.block_table, call.seq_lens, call.cu_seqlens_q)


def _bytes(x: Tensor) -> bytes:
    data: bytes = x.cpu().numpy().tobytes()
    return data
