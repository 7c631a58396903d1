"""What the questions are asked about: requests, from a file, from objects or from bare lengths."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from paged.errors import PagedError
from paged.replay_config import final_length
from paged.sequence import as_count
from paged.trace import HASH_BLOCK_TOKENS, Request, read_trace

Traffic = str | PathLike[str] | Iterable[Request | int | tuple[int, int]]


class TuningError(PagedError, ValueError):
    """A question that cannot be answered as asked; the message says what is wanted."""


def as_requests(lengths_or_trace: Traffic, *, limit: int | None = None) -> list[Request]:
    """The first `limit` requests (None: all), in order of arrival.

    lengths_or_trace: the path of a trace file (`paged.trace`), or any iterable, whose items may be
        Request    as `read_trace` and `sample_requests` return them
        int        tokens that a sequence holds at its end, all of them its prompt
        (int, int) prompt tokens and tokens to generate
    Lengths without an arrival arrive one a second. TraceError for a file, TypeError or TuningError
    for anything else that cannot be read; both name the position.
    """
    if isinstance(lengths_or_trace, str | PathLike):
        return read_trace(Path(lengths_or_trace), limit=limit)
    try:
        items = islice(iter(lengths_or_trace), limit)
    except TypeError:
        raise TypeError(
            f"lengths_or_trace is {lengths_or_trace!r}; it must be a path, or a list of requests,"
            " lengths or (prompt, output) pairs"
        ) from None
    requests = [_as_request(item, position) for position, item in enumerate(items)]
    if not requests:
        raise TuningError("lengths_or_trace is empty; it must hold a request")
    if len({request.hash_ids is None for request in requests}) > 1:
        raise TuningError(
            "lengths_or_trace has requests with hash_ids and without; all must have them or none"
        )
    return sorted(requests, key=lambda request: request.arrival)


def _as_request(item: Any, position: int) -> Request:
    if isinstance(item, Request):
        return item
    name = f"lengths_or_trace[{position}]"
    pair = (item, 0)
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise TuningError(f"{name} is {item!r}; a pair must be (prompt, output) tokens")
        pair = (item[0], item[1])
    prompt_len, output_len = (as_count(name, number) for number in pair)
    if prompt_len < 1:
        raise TuningError(f"{name} is {item!r}; a sequence must begin with at least one token")
    return Request(float(position), prompt_len, output_len)


def life(request: Request) -> range:
    """The tokens that a request has in the cache in each of its steps, one step after the other."""
    return range(request.prompt_len, final_length(request) + 1)


class StandIns:
    """Token ids in place of the text that no public trace has, made at the cost of a list.

    Two prompts have equal tokens exactly where the trace's hash ids are equal; what no hash id
    covers, the output included, belongs to one request alone.
    """

    def __init__(self) -> None:
        self._units: dict[int, int] = {}  # hash id -> a small number

    def prompt(self, request: Request, index: int) -> list[int]:
        """The prompt of the request at `index` in the trace."""
        if request.hash_ids is None:
            return [self.output(index)] * request.prompt_len
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            start = self._units.setdefault(hash_id, len(self._units)) * HASH_BLOCK_TOKENS
            tokens += range(start, start + HASH_BLOCK_TOKENS)
        return tokens[: request.prompt_len]

    @staticmethod
    def output(index: int) -> int:
        """The one token that the request at `index` generates, again and again."""
        return -1 - index
