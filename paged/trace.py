"""Request traces: when each request arrives, its prompt tokens, the tokens it generates.

Two public formats are read, told apart by their first line:

- Azure LLM inference traces, CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens
  (https://github.com/Azure/AzurePublicDataset);
- Mooncake traces, JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id
  per 512 prompt tokens (https://github.com/kvcache-ai/Mooncake).

Without a file, `sample_requests` draws from the lengths of a production trace.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from paged.errors import PagedError

HASH_BLOCK_TOKENS = 512  # prompt tokens under one of a Mooncake trace's hash_ids
MOST_TIME = 1e15  # milliseconds: 30,000 years
MOST = 2**31 - 1  # of every number in a trace: lengths are int32 in the arrays, too
VOCABULARY = 32_000  # token ids that stand in for the text, which no public trace has

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")

BUILT_IN_SOURCE = "the built-in lengths (Azure code completion, Nov 2023)"
# Azure Public Dataset, AzureLLMInferenceTrace_code.csv (Nov 2023, 8,819 requests, CC BY 4.0):
# tokens at these percentage points. Prompt and output lengths are uncorrelated there (r = 0.001).
PERCENTAGES = (0, 10, 25, 50, 75, 90, 99, 100)
PROMPT_QUANTILES = (3, 147, 578, 1469, 2745, 5194, 7436, 7437)
OUTPUT_QUANTILES = (6, 7, 9, 13, 24, 55, 252, 1899)


class TraceError(PagedError, ValueError):
    """A trace file that cannot be read; the message names the file, the line and what is wanted."""


@dataclass(frozen=True)
class Request:
    """One line of a trace. Lengths are in tokens, `arrival` in seconds after the first request."""

    arrival: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None  # equal leading ids: equal leading 512-token blocks

    def clipped(self, max_length: int) -> Request:
        """At most `max_length` tokens in all: the output keeps up to half, the prompt's tail goes."""
        output_len = min(self.output_len, max_length // 2)
        prompt_len = min(self.prompt_len, max_length - output_len)
        hash_ids = self.hash_ids and self.hash_ids[: num_hash_blocks(prompt_len)]
        return replace(self, prompt_len=prompt_len, output_len=output_len, hash_ids=hash_ids)


def read_trace(path: str | Path, *, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a trace file (None: all), in order of arrival.

    Raises TraceError, which names the file and, where there is one, the line.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = list(islice(_parse(file, path), limit))
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {path} is not a text file: {error.reason}") from error
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read: {error.strerror or error}") from error
    if not requests:
        raise TraceError(f"trace {path} holds no requests")
    start = min(request.arrival for request in requests)
    requests.sort(key=lambda request: request.arrival)
    return [replace(request, arrival=request.arrival - start) for request in requests]


def sample_requests(num_requests: int, *, seed: int) -> list[Request]:
    """Requests with the lengths of Azure's code-completion trace, one a second on average.

    Between two quantiles the logarithm of the length is uniform; arrivals are a Poisson process.
    """
    import numpy as np

    rng = np.random.default_rng(seed)

    def draw(quantiles: tuple[int, ...]) -> list[int]:
        points = rng.uniform(0, 100, num_requests)
        return [round(x) for x in np.exp(np.interp(points, PERCENTAGES, np.log(quantiles)))]

    prompt_lens, output_lens = draw(PROMPT_QUANTILES), draw(OUTPUT_QUANTILES)
    arrivals = np.cumsum(rng.exponential(1.0, num_requests))
    return [
        Request(float(arrival - arrivals[0]), prompt_len, output_len)
        for arrival, prompt_len, output_len in zip(arrivals, prompt_lens, output_lens, strict=True)
    ]


def token_ids(request: Request, *, index: int, seed: int) -> list[int]:
    """Stand-in tokens, the prompt's and then the output's: the same for the same arguments.

    A 512-token block of the prompt depends on its hash id alone, so requests that share leading
    ids share a prefix; all other tokens depend on `index`, the request's place in the trace.
    """
    import numpy as np

    def draw(kind: int, key: int, size: int) -> list[int]:
        tokens = np.random.default_rng((seed, kind, key)).integers(0, VOCABULARY, size)
        return tokens.tolist()  # type: ignore[no-any-return]

    if request.hash_ids is None:
        return draw(0, index, request.prompt_len + request.output_len)
    prompt = [
        token for hash_id in request.hash_ids for token in draw(1, hash_id, HASH_BLOCK_TOKENS)
    ]
    return prompt[: request.prompt_len] + draw(0, index, request.output_len)


def _parse(file: TextIO, path: Path) -> Iterator[Request]:
    """Requests of an open file, whichever of the two formats its first line shows."""
    first_line = file.readline()
    if not first_line:
        raise TraceError(f"trace {path} is empty")
    if first_line.lstrip().startswith("{"):
        return _parse_mooncake(file, first_line, path)
    header = [column.strip() for column in first_line.split(",")]
    if set(AZURE_COLUMNS) <= set(header):
        return _parse_azure(file, header, path)
    raise _error(
        path,
        1,
        f"wants a CSV header with {', '.join(AZURE_COLUMNS)} (Azure)"
        f" or a JSON object with {', '.join(MOONCAKE_KEYS)} (Mooncake)",
        first_line.strip(),
    )


def _parse_azure(file: TextIO, header: list[str], path: Path) -> Iterator[Request]:
    reader = csv.reader(file)
    try:
        for row in reader:
            if not row:
                continue
            line = reader.line_num + 1
            if len(row) != len(header):
                raise _error(path, line, f"wants {len(header)} columns", ",".join(row))
            cells = dict(zip(header, row, strict=True))
            yield Request(
                _timestamp(cells["TIMESTAMP"], path, line),
                _count(_integer(cells["ContextTokens"]), 1, "ContextTokens", path, line),
                _count(_integer(cells["GeneratedTokens"]), 0, "GeneratedTokens", path, line),
            )
    except csv.Error as error:
        raise TraceError(f"trace {path}, line {reader.line_num + 1}: {error}") from error


def _parse_mooncake(file: Iterable[str], first_line: str, path: Path) -> Iterator[Request]:
    for number, line in enumerate(chain([first_line], file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _error(path, number, "wants one JSON object", line.strip()) from error
        if not isinstance(row, dict) or not set(MOONCAKE_KEYS) <= set(row):
            wanted = f"wants a JSON object with {', '.join(MOONCAKE_KEYS)}"
            raise _error(path, number, wanted, line.strip())
        milliseconds = row["timestamp"]
        if type(milliseconds) not in (int, float) or not -MOST_TIME < milliseconds < MOST_TIME:
            raise _error(path, number, "timestamp must be a number of milliseconds", milliseconds)
        prompt_len = _count(row["input_length"], 1, "input_length", path, number)
        output_len = _count(row["output_length"], 0, "output_length", path, number)
        hash_ids = row["hash_ids"]
        if not isinstance(hash_ids, list) or len(hash_ids) != num_hash_blocks(prompt_len):
            wanted = f"hash_ids must be a list of {num_hash_blocks(prompt_len)} integers"
            raise _error(path, number, f"{wanted}, one per {HASH_BLOCK_TOKENS} tokens", hash_ids)
        for hash_id in hash_ids:
            _count(hash_id, 0, "each of hash_ids", path, number, math.inf)
        yield Request(milliseconds / 1000, prompt_len, output_len, tuple(hash_ids))


def num_hash_blocks(prompt_len: int) -> int:
    """How many hash ids a prompt of that length has."""
    return -(-prompt_len // HASH_BLOCK_TOKENS)


def _integer(text: str) -> int | str:
    """The number a CSV cell holds; the cell itself where it holds none."""
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) else text


def _count(
    value: object, minimum: int, name: str, path: Path, line: int, most: float = MOST
) -> int:
    if type(value) is not int or value < minimum:
        raise _error(path, line, f"{name} must be an integer >= {minimum}", value)
    if value > most:
        raise _error(path, line, f"{name} must be at most {most:,}", value)
    return value


def _timestamp(text: str, path: Path, line: int) -> float:
    """Seconds since 1970. The public files carry seven decimals, which Python 3.10 cannot parse."""
    match = re.fullmatch(r"([^.+]+?)(\.[0-9]+)?(Z|\+00:00)?", text.strip())
    try:
        moment = datetime.fromisoformat(match[1]) if match else None
    except ValueError:
        moment = None
    if match is None or moment is None or moment.tzinfo is not None:
        raise _error(path, line, "TIMESTAMP must look like 2023-11-16 18:17:03.9799600", text)
    return moment.replace(tzinfo=timezone.utc).timestamp() + float(match[2] or 0)


def _error(path: Path, line: int, wanted: str, got: object) -> TraceError:
    shown = repr(got)
    return TraceError(
        f"trace {path}, line {line}: {wanted}, got {shown[:60] + '...' if len(shown) > 60 else shown}"
    )
