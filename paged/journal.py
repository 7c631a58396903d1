"""A record of every call to a manager, and its replay.

The first line holds the configuration. Each further line is one call:

    {"call": "fork", "sequences": [{"id": "b", "tokens": [1, 2, 3]}],
     "arguments": [{"seq": "a"}, {"seq": "b"}], "keywords": {}, "result": null}

`sequences` says what became of sequences since the last call: their tokens when they are new, or
the tokens that were appended. `result` is what the call returned, or `error` what it raised.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import CacheConfig
from .sequence import Sequence, SequenceGroup, SequenceLike, members

if TYPE_CHECKING:
    from .block_manager import BlockSpaceManager

CALLS = (
    "can_allocate",
    "allocate",
    "num_cached_tokens",
    "can_append_slots",
    "append_slots",
    "step",
    "fork",
    "trim",
    "mark_computed",
    "can_swap_out",
    "swap_out",
    "can_swap_in",
    "swap_in",
    "resize",
    "free",
    "block_table",
    "build_batch",
    "reset_prefix_cache",
)


class Journal:
    """Writes the calls of one manager; a context manager, or `close` it.

    While it is open, the manager's public methods are shadowed by recording ones: a manager
    without a journal pays nothing.
    """

    def __init__(self, manager: BlockSpaceManager, path: str | PathLike[str]) -> None:
        if manager.history or manager.tables:
            raise ValueError("a journal must start with an unused manager; this one has been used")
        self._manager = manager
        self._lengths: dict[Any, int] = {}  # tokens of each sequence that the file knows
        self._is_inside = False
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._write({"config": _config_as_data(manager.config)})
        for name in CALLS:
            setattr(manager, name, self._recorded(name, getattr(manager, name)))

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            for name in CALLS:
                delattr(self._manager, name)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._is_inside:  # a call that another call makes
                return method(*arguments, **keywords)
            seqs = _sequences_in(arguments)
            line: dict[str, Any] = {"call": name, "sequences": self._news(seqs)}
            line["arguments"] = [_as_data(argument) for argument in arguments]
            line["keywords"] = {key: _as_data(value) for key, value in keywords.items()}
            self._is_inside = True
            try:
                result = method(*arguments, **keywords)
                line["result"] = result_as_data(result)
                return result
            except BaseException as error:
                line["error"] = type(error).__name__
                raise
            finally:
                self._is_inside = False
                self._lengths.update((_id(seq), len(seq)) for seq in seqs)
                if name == "free":
                    self._lengths.pop(_id(seqs[0]), None)
                self._write(line)

        return call

    def _news(self, seqs: list[SequenceLike]) -> list[dict[str, Any]]:
        news = []
        for seq in seqs:
            known = self._lengths.get(_id(seq))
            if known is None or known > len(seq):
                keys = {name: repr(getattr(seq, name, None)) for name in ("salt", "extra_key")}
                news.append({"id": _id(seq), "tokens": _tokens(seq, 0), **keys})
            elif known < len(seq):
                news.append({"id": _id(seq), "appended": _tokens(seq, known)})
        return news

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


class Replay:
    """A journal read back: iterating makes its calls, one at a time, on a new manager.

    An `eviction_policy` is not in the file: give `manager.cache` the same one before iterating.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        from .block_manager import BlockSpaceManager

        text = Path(path).read_text(encoding="utf-8", errors="backslashreplace")  # \xff: no JSON
        self._lines = text.splitlines()
        try:
            config = CacheConfig(**json.loads(self._lines[0])["config"])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a journal, line 1 has no config: {error!r}") from None
        self.manager = BlockSpaceManager(config)
        self._sequences: dict[Any, Sequence] = {}

    def __len__(self) -> int:
        return len(self._lines) - 1

    def __iter__(self) -> Iterator[tuple[int, str, str | None]]:
        """Line number, the call in words, and how its outcome differs from the recorded one."""
        for number, text in enumerate(self._lines[1:], 2):
            try:
                line = json.loads(text)
                self._take_news(line["sequences"])
                arguments = [self._from_data(value) for value in line["arguments"]]
                keywords = {key: self._from_data(v) for key, v in line["keywords"].items()}
                method = getattr(self.manager, line["call"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"line {number} is no recorded call: {error!r}") from None
            keywords.pop("device", None)
            try:
                outcome = {"result": result_as_data(method(*arguments, **keywords))}
            except Exception as error:  # a bug that is replayed is an outcome, too
                outcome = {"error": type(error).__name__}
            recorded = {key: line[key] for key in ("result", "error") if key in line}
            differs = None if outcome == recorded else f"{outcome}, recorded {recorded}"
            yield number, f"{line['call']}{tuple(line['arguments'])}", differs

    def _take_news(self, news: list[dict[str, Any]]) -> None:
        for item in news:
            if "tokens" in item:
                keys = {name: ast.literal_eval(item[name]) for name in ("salt", "extra_key")}
                self._sequences[item["id"]] = Sequence(item["id"], item["tokens"], **keys)
            else:
                for token in item["appended"]:
                    self._sequences[item["id"]].append_token(token)

    def _from_data(self, value: Any) -> Any:
        if isinstance(value, dict) and "seq" in value:
            return self._sequences[value["seq"]]
        if isinstance(value, dict):
            seqs = [self._sequences[seq_id] for seq_id in value["seqs"]]
            return SequenceGroup(value["group"], seqs)
        if isinstance(value, list):
            return [self._from_data(item) for item in value]
        return value


def _config_as_data(config: CacheConfig) -> dict[str, Any]:
    """All settings but the hash function: no block id depends on it."""
    names = [field.name for field in fields(config) if field.name != "hash_fn"]
    return {name: getattr(config, name) for name in names}


def _sequences_in(arguments: tuple[Any, ...]) -> list[SequenceLike]:
    found: list[SequenceLike] = []
    for argument in arguments:
        for item in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(item, SequenceGroup) or hasattr(item, "token_ids"):
                found += members(item)
    return found


def _as_data(value: Any) -> Any:
    if isinstance(value, SequenceGroup):
        return {"group": str(value.request_id), "seqs": [_id(seq) for seq in value.seqs]}
    if hasattr(value, "token_ids"):
        return {"seq": _id(value)}
    if isinstance(value, list | tuple) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        return [_as_data(item) for item in items] if isinstance(items, list | tuple) else items
    return value if isinstance(value, int | float | str | None) else str(value)


def result_as_data(result: Any) -> Any:
    """What a call returned; of a batch only that there was one."""
    if isinstance(result, Enum):
        return result.value
    if isinstance(result, list | tuple):
        return [result_as_data(item) for item in result]
    return result if isinstance(result, int | None) else type(result).__name__


def _tokens(seq: SequenceLike, first: int) -> list[int]:
    return [int(token) for token in seq.token_ids[first:]]


def _id(seq: SequenceLike) -> Any:
    return seq.seq_id if isinstance(seq.seq_id, int | str) else repr(seq.seq_id)
