"""A scheduled step on the device: blocks are moved, then the model computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from paged.scheduler_output import SchedulerOutput
from paged.sequence import Sequence

from .runner import ModelRunner

if TYPE_CHECKING:
    from torch import Tensor

    from paged.movements import Pairs


class Execution:
    """Carries out what a scheduler decides; may raise at any point and be called for the next step.

    The scheduler names each movement once, so those that could not be made are kept for the next
    call. Blocks are only ever overwritten after them, so it is not too late then.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._moves: deque[tuple[Callable[[Pairs], None], Pairs]] = deque()

    def move(self, scheduled: SchedulerOutput) -> None:
        """Make the step's movements, in order."""
        cache = self._runner.cache
        self._moves.extend(
            (move, pairs)
            for move, pairs in (
                (cache.swap_out, scheduled.swap_out),
                (cache.swap_in, scheduled.swap_in),
                (cache.copy_blocks, scheduled.copies),
            )
            if pairs
        )
        while self._moves:
            move, pairs = self._moves[0]
            move(pairs)
            self._moves.popleft()

    def compute(self, scheduled: SchedulerOutput) -> tuple[list[Sequence], Tensor]:
        """Run the model. The sequences at their end, and logits [that many, vocab] of their next."""
        seqs = cast("list[Sequence]", scheduled.seqs)  # the engine makes no others
        query_lens, context_lens = scheduled.query_lens, scheduled.context_lens
        token_ids: list[int] = []
        positions: list[int] = []
        ends: list[Sequence] = []
        rows: list[int] = []
        for seq, query_len, context_len, reaches_end in zip(
            seqs, query_lens, context_lens, scheduled.reaches_end, strict=True
        ):
            stop = context_len + query_len
            token_ids += seq.token_ids[context_len:stop]
            positions += range(context_len, stop)
            if reaches_end:
                ends.append(seq)
                rows.append(len(token_ids) - 1)
        runner = self._runner
        batch = runner.manager.build_batch(
            seqs, query_lens, context_lens=context_lens, device=str(runner.device)
        )
        return ends, runner.forward(token_ids, positions, batch, rows)
