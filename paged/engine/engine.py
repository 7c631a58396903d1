"""Continuous batching: requests come and go, and each step computes what the scheduler picks."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Iterator
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paged.admission import AllocStatus
from paged.advice import advise
from paged.config import CacheConfig
from paged.errors import PromptTooLongError
from paged.scheduler import Scheduler
from paged.scheduler_config import SchedulerConfig
from paged.scheduler_output import SchedulerOutput
from paged.sequence import Sequence

from .decision import Decision, Drawn, decide
from .detokenizer import Tokenizer
from .execution import Execution
from .prompts import Prompt, most_new_tokens, token_ids_of, with_params
from .request import Request, RequestOutput
from .runner import ModelRunner
from .sampling import SEED_BITS, SamplingParams
from .tally import Tally

if TYPE_CHECKING:
    import torch

    from paged.metrics import Metrics

_NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


class Engine:
    """Generates with a transformers model whose K and V lie in pages.

    Single-threaded: call it from one thread, or hold a lock. A step that raises loses nothing: the
    requests stay, and the next `step` does the same work.

    model             any decoder that `ModelRunner` takes, in eval mode
    tokenizer         of transformers, or any `Tokenizer`; without one prompts are token ids
    cache_config      of the pool; default: what fits
    scheduler_config  how many sequences and tokens a step takes, and in which order
    dtype, backend    of the cache and of the kernels, see `ModelRunner`
    metrics           a new `Metrics`, which will watch this engine

    >>> engine = Engine(model, tokenizer=tokenizer)
    >>> engine.generate("Once upon a time", SamplingParams(max_tokens=5))[0].outputs[0].text
    ', the city of Nova'
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Tokenizer | None = None,
        cache_config: CacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.runner = ModelRunner(model, cache_config, dtype=dtype, backend=backend)
        self.manager = self.runner.manager
        self.scheduler = Scheduler(scheduler_config or SchedulerConfig(), self.manager)
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.tally = Tally(self.scheduler)
        self.requests: dict[Hashable, Request] = {}  # unfinished
        self._execution = Execution(self.runner)
        self._owners: dict[Hashable, Request] = {}  # by seq_id
        self._seq_ids = count()
        self._outbox: list[RequestOutput] = []
        if metrics is not None:
            metrics.watch(self)

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: Hashable | None = None,
        priority: int = 0,
    ) -> Hashable:
        """Queue a prompt, text or token ids; returns its request_id, by default a number as text.

        priority: a lower number is more urgent, under the scheduler's policy "priority".
        PromptTooLongError when the prompt can never fit.
        """
        params = params or SamplingParams()
        if request_id is None:
            request_id = next(name for name in map(str, count()) if name not in self.requests)
        elif request_id in self.requests:
            raise ValueError(f"request_id is {request_id!r}; that request is not finished")
        runner = self.runner
        token_ids = token_ids_of(prompt, self.tokenizer, runner.vocab_size)
        num_seqs = 1 if params.num_beams > 1 else params.n
        request = Request(
            request_id,
            prompt if isinstance(prompt, str) else None,
            [Sequence(next(self._seq_ids), token_ids) for _ in range(num_seqs)],
            params,
            max_tokens=most_new_tokens(token_ids, params.max_tokens, runner.max_model_len),
            stop_token_ids={
                *params.stop_token_ids,
                *(() if params.ignore_eos else runner.eos_token_ids),
            },
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
            priority=priority,
        )
        self._check_fits(request)
        self.scheduler.add(request.group)
        self.requests[request_id] = request
        self._owners.update((seq.seq_id, request) for seq in request.running_seqs)
        return request_id

    def abort(self, request_id: Hashable) -> None:
        """End a request, whatever it is at; the next `step` tells of it. ValueError: unknown."""
        if request_id not in self.requests:
            raise ValueError(f"request_id is {request_id!r}; no such request is unfinished")
        self._end(self.requests[request_id], "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self.requests or self._outbox)

    def advice(self) -> list[str]:
        """What the run so far says about the settings; nothing when all is well."""
        return advise(self.tally.load())

    # Generating

    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns what is new. Of a beam search only the end is told."""
        self._advance()
        outputs, self._outbox = self._outbox, []
        return outputs

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Outputs of these prompts, as tokens come. Closing the iterator aborts what is left.

        params: for all of them, or one for each.
        """
        return self._follow(self._add_all(prompts, params))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The last output of each prompt, in their order. When it raises, they are aborted."""
        request_ids = self._add_all(prompts, params)
        last = {output.request_id: output for output in self._follow(request_ids)}
        return [last[request_id] for request_id in request_ids]

    def _add_all(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
    ) -> list[Hashable]:
        """Queue all prompts, or none and raise."""
        request_ids: list[Hashable] = []
        try:
            for prompt, each in with_params(prompts, params):
                request_ids.append(self.add_request(prompt, each))
        except BaseException:
            for request_id in request_ids:
                self._remove(self.requests[request_id])
            raise
        return request_ids

    def _follow(self, request_ids: list[Hashable]) -> Iterator[RequestOutput]:
        """Step until these are finished; outputs of others stay in the outbox."""
        open_ids = set(request_ids)
        try:
            while open_ids:
                self._advance()
                outputs, self._outbox = self._outbox, []
                mine = [output for output in outputs if output.request_id in open_ids]
                self._outbox = [output for output in outputs if output.request_id not in open_ids]
                open_ids -= {output.request_id for output in mine if output.finished}
                yield from mine
        finally:
            for request_id in open_ids & self.requests.keys():
                self._remove(self.requests[request_id])

    # One step

    def _advance(self) -> None:
        """One step of the scheduler; what is new goes to the outbox."""
        if not self.requests:
            return
        scheduled = self.scheduler.schedule()
        self._note(scheduled)
        self._execution.move(scheduled)
        decision = Decision()
        if scheduled.seqs:
            ends, logits = self._execution.compute(scheduled)
            owned = [(self._owners[seq.seq_id], seq) for seq in ends]
            decision = decide(owned, logits, self._fork)
            self.tally.add_step(scheduled)
        for request in decision.failed:
            self._end(request, "error", _NOT_A_NUMBER)
        self.scheduler.update(scheduled, decision.tokens, decision.finished)
        self._tell(decision)

    def _note(self, scheduled: SchedulerOutput) -> None:
        """What the scheduler has done to requests already, whatever becomes of the step."""
        for request_id in scheduled.preempted:
            self.requests[request_id].metrics.num_preemptions += 1
        for request_id, reason in scheduled.rejected.items():
            self._end(self.requests[request_id], "rejected", reason)
        for seq in scheduled.seqs:
            request = self._owners[seq.seq_id]
            if not request.is_scheduled:
                request.is_scheduled = True
                request.metrics.num_cached_tokens = self.manager.num_cached_tokens(seq)
                self.tally.add_request(request)

    def _fork(self, parent: Sequence) -> Sequence:
        child = parent.fork(next(self._seq_ids))
        self.scheduler.fork(parent, child)
        self._owners[child.seq_id] = self._owners[parent.seq_id]
        return child

    def _tell(self, decision: Decision) -> None:
        """Record, count and announce what the scheduler has taken in."""
        now = perf_counter()
        for seq_id in decision.finished:
            self._owners.pop(seq_id, None)
        for request, drawn in decision.news.items():
            if request.is_finished:  # another of its sequences has failed
                continue
            for seq, token, finish_reason in drawn:
                request.continuations[seq.seq_id].record(token, finish_reason)
            self._measure(request, drawn, now)
            if request.has_all:
                request.metrics.finish_time = now
                del self.requests[request.request_id]
            if request.is_finished or request.search is None:
                self._outbox.append(request.output())

    def _measure(self, request: Request, drawn: list[Drawn], now: float) -> None:
        """Note the time of a first token, and tell the metrics of first and last ones."""
        times = request.metrics
        if times.first_token_time is None:
            times.first_token_time = now
            if self.metrics:
                self.metrics.on_first_token(now - times.arrival_time)
        if self.metrics:
            prompt_len = len(request.prompt_token_ids)
            lengths = [len(seq) - prompt_len for seq, _, finish_reason in drawn if finish_reason]
            if request.search and request.search.is_done:
                lengths.append(request.search.length)
            for length in lengths:
                self.metrics.on_finish(now - times.first_token_time, length)

    # The end of a request that has not got everything

    def _end(self, request: Request, finish_reason: str, error: str | None = None) -> None:
        self._remove(request, is_scheduled=finish_reason != "rejected")
        request.end(finish_reason, error)
        self._outbox.append(request.output())

    def _remove(self, request: Request, is_scheduled: bool = True) -> None:
        if is_scheduled:
            self.scheduler.abort(request.request_id)
        for seq in request.running_seqs:
            self._owners.pop(seq.seq_id, None)
        del self.requests[request.request_id]

    def _check_fits(self, request: Request) -> None:
        """Refuse what can never run, as far as it can be told now; `step` rejects the rest."""
        config, limits = self.manager.config, self.scheduler.config
        if self.manager.can_allocate(request.group) is AllocStatus.NEVER:
            raise PromptTooLongError(
                f"prompt has {len(request.prompt_token_ids):,} tokens; the pool has "
                f"{config.num_gpu_blocks:,} blocks of {config.block_size}"
            )
        num_beams = request.params.num_beams
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        if 2 * num_beams - 1 > most and num_beams > 1:  # beams are forked before others end
            raise ValueError(
                f"num_beams is {num_beams}; the scheduler's max_num_seqs and "
                f"max_num_batched_tokens must be at least {2 * num_beams - 1} for it, and one is "
                f"{most}"
            )
