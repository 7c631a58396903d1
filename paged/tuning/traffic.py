"""What the questions are asked about: requests, from a file, from objects or from bare lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from numbers import Real
from os import PathLike
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from paged.config import check_int
from paged.errors import PagedError
from paged.replay_config import final_length
from paged.sequence import as_count
from paged.trace import HASH_BLOCK_TOKENS, Request, num_hash_blocks, read_trace

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
    check_int("limit", limit, minimum=1, optional=True)
    if isinstance(lengths_or_trace, str | PathLike):
        return read_trace(Path(lengths_or_trace), limit=limit)
    try:
        items = islice(iter(lengths_or_trace), limit)
        if isinstance(lengths_or_trace, bytes | bytearray):
            raise TypeError
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
    name = f"lengths_or_trace[{position}]"
    if isinstance(item, Request):
        return _checked(name, item)
    pair = (item, 0)
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise TuningError(f"{name} is {item!r}; a pair must be (prompt, output) tokens")
        pair = (item[0], item[1])
    prompt_len, output_len = (as_count(name, number) for number in pair)
    if prompt_len < 1:
        raise TuningError(f"{name} is {item!r}; a sequence must begin with at least one token")
    return Request(float(position), prompt_len, output_len)


def _checked(name: str, request: Request) -> Request:
    """The request with plain ints; TypeError or TuningError names what is wrong with it."""
    arrival, hash_ids = request.arrival, request.hash_ids
    if isinstance(arrival, bool) or not isinstance(arrival, Real) or not math.isfinite(arrival):
        raise TuningError(f"{name}.arrival is {arrival!r}; it must be a finite number of seconds")
    prompt_len = as_count(f"{name}.prompt_len", request.prompt_len)
    output_len = as_count(f"{name}.output_len", request.output_len)
    if prompt_len < 1:
        raise TuningError(f"{name}.prompt_len is 0; a sequence must begin with at least one token")
    if hash_ids is not None:
        wanted = num_hash_blocks(prompt_len)
        if not isinstance(hash_ids, tuple | list) or len(hash_ids) != wanted:
            raise TuningError(
                f"{name}.hash_ids is {shortened(hash_ids)}; it must be a tuple of {wanted}, one per"
                f" {HASH_BLOCK_TOKENS} tokens of the prompt"
            )
        hash_ids = tuple(hash_ids)
    return Request(float(arrival), prompt_len, output_len, hash_ids)


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
