"""A request on its way through the engine: its sequences, and what is told of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from paged.sequence import Sequence, SequenceGroup

from .beam_search import BeamSearch
from .detokenizer import Detokenizer, Tokenizer
from .sampling import Draw, SamplingParams


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of `time.perf_counter`; up to date while the request runs."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sequence that a request has generated, so far.

    index          0 .. n - 1; of beams the best is 0
    new_token_ids  since the last output
    new_text       whole characters only, special tokens and the token that stopped it left out
    text           all of it; "" without a tokenizer
    finish_reason  "stop" (a stop token, the last of token_ids), "length", "abort", "rejected",
                   "error"; None while it runs
    score          of a beam: log-probability / length ** length_penalty
    """

    index: int
    new_token_ids: list[int]
    new_text: str
    text: str
    finish_reason: str | None
    score: float | None = None
    _tokens: list[int] = field(default_factory=list, repr=False)  # grows: not copied each step
    _start: int = field(default=0, repr=False)
    _stop: int = field(default=0, repr=False)

    @property
    def token_ids(self) -> list[int]:
        """All generated tokens."""
        return self._tokens[self._start : self._stop]


@dataclass(slots=True)
class RequestOutput:
    """What `Engine.step` tells of a request that has news.

    prompt   the text, None when tokens were given
    outputs  n sequences, less only for a beam search that was ended before it found so many
    error    why the request was rejected or failed; None otherwise
    """

    request_id: Hashable
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None
    metrics: RequestMetrics


class Continuation:
    """One sequence of a request: how it is drawn, and what it has said."""

    def __init__(self, seq: Sequence, index: int, seed: int, tokenizer: Tokenizer | None) -> None:
        self.seq = seq
        self.index = index
        self.seed = seed
        self.text = ""
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._new_token_ids: list[int] = []
        self._new_text = ""

    def record(self, token: int, finish_reason: str | None) -> None:
        """A token that the scheduler has appended."""
        self._new_token_ids.append(token)
        if self._detokenizer and finish_reason != "stop":
            self._new_text += self._detokenizer.add(token)
        if finish_reason:
            self.end(finish_reason)

    def end(self, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        if self._detokenizer:
            self._new_text += self._detokenizer.finish()

    def output(self, prompt_len: int) -> CompletionOutput:
        """What is there, and what is new since the last call."""
        new_token_ids, self._new_token_ids = self._new_token_ids, []
        new_text, self._new_text = self._new_text, ""
        self.text += new_text
        tokens = self.seq.token_ids
        return CompletionOutput(
            self.index,
            new_token_ids,
            new_text,
            self.text,
            self.finish_reason,
            None,
            tokens,
            prompt_len,
            len(tokens),
        )


class Request:
    """n sequences that are drawn independently, or one beam search.

    prompt          the text, None when tokens were given
    seqs            n sequences with the prompt's tokens; one for a beam search
    max_tokens      most tokens that a sequence generates, params.max_tokens or less
    stop_token_ids  tokens that end a sequence
    """

    def __init__(
        self,
        request_id: Hashable,
        prompt: str | None,
        seqs: list[Sequence],
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_token_ids: Collection[int],
        seed: int,
        tokenizer: Tokenizer | None,
        priority: int,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = seqs[0].token_ids.copy()
        self.params = params
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.error: str | None = None
        self.metrics = RequestMetrics(perf_counter())
        self.is_scheduled = False  # it has been, once
        self.group = SequenceGroup(
            request_id, seqs, arrival_time=self.metrics.arrival_time, priority=priority
        )
        self._tokenizer = tokenizer
        self.search: BeamSearch | None = None
        self.beams: list[Sequence] = []
        self.continuations: dict[Hashable, Continuation] = {}
        if params.num_beams > 1:
            self.search = BeamSearch(params, max_tokens, stop_token_ids)
            self.beams = seqs  # in the order of the search
        else:
            for index, seq in enumerate(seqs):
                self.continuations[seq.seq_id] = Continuation(seq, index, seed + index, tokenizer)

    @property
    def is_finished(self) -> bool:
        return self.metrics.finish_time is not None

    @property
    def has_all(self) -> bool:
        """Whether nothing of it is left to generate."""
        if self.search is not None:
            return self.search.is_done
        return all(one.finish_reason for one in self.continuations.values())

    @property
    def running_seqs(self) -> list[Sequence]:
        """Those that the scheduler has."""
        if self.search is not None:
            return self.beams
        return [one.seq for one in self.continuations.values() if one.finish_reason is None]

    def draw(self, seq: Sequence) -> Draw:
        """What the next token of `seq` depends on besides its logits."""
        position = len(seq) - len(self.prompt_token_ids)
        return Draw(self.params, self.continuations[seq.seq_id].seed, position)

    def finish_reason(self, seq: Sequence, token: int) -> str | None:
        """Whether, and why, `token` is the last of `seq`."""
        if token in self.stop_token_ids:
            return "stop"
        return "length" if len(seq) + 1 == len(self.prompt_token_ids) + self.max_tokens else None

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """Whatever still runs ends here."""
        self.error = error
        for continuation in self.continuations.values():
            if continuation.finish_reason is None:
                continuation.end(finish_reason)
        self.metrics.finish_time = perf_counter()

    def output(self) -> RequestOutput:
        """What is there, and what is new since the last call."""
        prompt_len = len(self.prompt_token_ids)
        outputs = [one.output(prompt_len) for one in self.continuations.values()]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs + list(self._beam_outputs()),
            self.is_finished,
            self.error,
            self.metrics,
        )

    def _beam_outputs(self) -> Iterable[CompletionOutput]:
        """The beams that have been found, when the search is over."""
        for index, beam in enumerate(self.search.best if self.search else ()):
            shown = beam.token_ids[: -1 if beam.is_stopped else None]
            text = (
                self._tokenizer.decode(
                    shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                if self._tokenizer
                else ""
            )
            yield CompletionOutput(
                index,
                beam.token_ids,
                text,
                text,
                "stop" if beam.is_stopped else "length",
                beam.score,
                beam.token_ids,
                0,
                len(beam.token_ids),
            )
