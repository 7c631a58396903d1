"""Continuous batching: requests come and go, and each step computes what the scheduler picks."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Iterator
from itertools import count
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from paged.admission import AllocStatus
from paged.advice import advise
from paged.config import CacheConfig, check_int, check_kind
from paged.errors import PromptTooLongError
from paged.scheduler import Scheduler
from paged.scheduler_config import SchedulerConfig
from paged.sequence import Sequence, check_hashable

from .detokenizer import Tokenizer
from .loop import Loop
from .prompts import Prompt, most_new_tokens, token_ids_of, with_params
from .request import Request, RequestOutput
from .runner import ModelRunner
from .sampling import SEED_BITS, SamplingParams
from .tally import Tally

if TYPE_CHECKING:
    import torch

    from paged.metrics import Metrics


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
        check_kind("scheduler_config", scheduler_config, SchedulerConfig, optional=True)
        _check_methods("tokenizer", tokenizer, "encode", "decode")
        _check_methods("metrics", metrics, "watch", "on_first_token", "on_finish")
        self.runner = ModelRunner(model, cache_config, dtype=dtype, backend=backend)
        self.manager = self.runner.manager
        self.scheduler = Scheduler(scheduler_config or SchedulerConfig(), self.manager)
        self.tokenizer = tokenizer
        self._loop = Loop(self.runner, self.scheduler, metrics)
        self._request_ids = map(str, count())
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
        salt: Any = None,
    ) -> Hashable:
        """Queue a prompt, text or token ids; returns its request_id, by default a number as text.

        priority  a lower number is more urgent; needs the scheduler's policy "priority"
        salt      requests share cached blocks only where it is equal (a tenant's secret)

        PromptTooLongError when the prompt can never fit. ValueError when there are too many
        sequences for one step, whose limits are the scheduler's max_num_seqs and
        max_num_batched_tokens: a request counts as n, a beam search as 2 * num_beams - 1.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {shortened(params)}; it must be SamplingParams")
        check_int("priority", priority, minimum=None)
        if priority and self.scheduler.config.policy != "priority":
            raise ValueError(
                f"priority is {priority}; the scheduler's policy is "
                f"{self.scheduler.config.policy!r}, it must be 'priority'"
            )
        if request_id is None:
            request_id = next(name for name in self._request_ids if self._is_free(name))
        elif not self._is_free(request_id):
            raise ValueError(f"request_id is {request_id!r}; that request is not finished")
        runner = self.runner
        token_ids = token_ids_of(prompt, self.tokenizer, runner.vocab_size)
        num_seqs = 1 if params.num_beams > 1 else params.n
        request = Request(
            request_id,
            prompt if isinstance(prompt, str) else None,
            [Sequence(next(self._loop.seq_ids), token_ids, salt=salt) for _ in range(num_seqs)],
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
        self._loop.add(request)
        return request_id

    def abort(self, request_id: Hashable) -> None:
        """End a request, whatever it is at; the next `step` tells of it. ValueError: unknown."""
        check_hashable("request_id", request_id)
        if request_id not in self.requests:
            raise ValueError(f"request_id is {request_id!r}; no such request is unfinished")
        request = self.requests[request_id]
        self._loop.remove(request)
        self._loop.tell_end(request, "abort")

    @property
    def requests(self) -> dict[Hashable, Request]:
        """The unfinished ones, by request_id."""
        return self._loop.requests

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._loop.requests or self._loop.outbox)

    @property
    def tally(self) -> Tally:
        """What has been counted since the beginning."""
        return self._loop.tally

    def advice(self) -> list[str]:
        """What the run so far says about the settings; nothing when all is well."""
        return advise(self._loop.tally.load())

    # Generating

    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns what is new. Of a beam search only the end is told."""
        loop = self._loop
        loop.advance()
        outputs, loop.outbox = loop.outbox, []
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
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """The last output of each prompt, in their order. When it raises, they are aborted.

        progress: show on stderr how many are finished.
        """
        request_ids = self._add_all(prompts, params)
        last: dict[Hashable, RequestOutput] = {}
        with tqdm(total=len(request_ids), unit="request", disable=not progress) as bar:
            for output in self._follow(request_ids):
                last[output.request_id] = output
                bar.update(output.finished)
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
                self._loop.remove(self.requests[request_id])
            raise
        return request_ids

    def _follow(self, request_ids: list[Hashable]) -> Iterator[RequestOutput]:
        """Step until these are finished; outputs of others stay in the outbox."""
        outputs = self._followed(set(request_ids))
        next(outputs)  # from now on its end is sure to be run
        return outputs  # type: ignore[return-value]

    def _followed(self, open_ids: set[Hashable]) -> Iterator[RequestOutput | None]:
        """None, and then the outputs."""
        loop = self._loop
        try:
            yield None
            while open_ids:
                loop.advance()
                mine = self._take_outputs(open_ids)
                open_ids &= loop.requests.keys()  # `step` may have told the end of others
                yield from mine
        finally:
            for request_id in open_ids & loop.requests.keys():
                loop.remove(loop.requests[request_id])
            self._take_outputs(open_ids)

    def _take_outputs(self, request_ids: set[Hashable]) -> list[RequestOutput]:
        """Those of these requests, out of the outbox."""
        loop = self._loop
        taken = [output for output in loop.outbox if output.request_id in request_ids]
        loop.outbox = [output for output in loop.outbox if output.request_id not in request_ids]
        return taken

    def _is_free(self, request_id: Hashable) -> bool:
        """Whether a name belongs neither to a running request nor to one yet to be told of."""
        check_hashable("request_id", request_id)
        return request_id not in self.requests and all(
            output.request_id != request_id for output in self._loop.outbox
        )

    def _check_fits(self, request: Request) -> None:
        """Refuse what can never run, as far as it can be told now; `step` rejects the rest."""
        config, limits = self.manager.config, self.scheduler.config
        if self.manager.can_allocate(request.group) is AllocStatus.NEVER:
            raise PromptTooLongError(
                f"prompt has {len(request.prompt_token_ids):,} tokens; the pool has "
                f"{config.num_gpu_blocks:,} blocks of {config.block_size}"
            )
        params = request.params
        name, least = "n", params.n
        if params.num_beams > 1:  # beams are forked before others end
            name, least = "num_beams", 2 * params.num_beams - 1
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        if least > most:
            raise ValueError(
                f"{name} is {getattr(params, name)}; the scheduler's max_num_seqs and "
                f"max_num_batched_tokens must be at least {least} for it, and one is {most}"
            )


def _check_methods(name: str, value: Any, *methods: str) -> None:
    """TypeError unless `value` is None or has what will be called."""
    if value is not None and not all(hasattr(value, method) for method in methods):
        raise TypeError(f"{name} is {shortened(value)}; it must have {', '.join(methods)}")
