"""What the commands of this package have in common: the traffic, the model, where results go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paged.config import block_bytes, check_int
from paged.sizing import ModelShape, add_shape_arguments, parse_bytes, shape_from
from paged.trace import BUILT_IN_SOURCE, Request, read_trace, sample_requests
from paged.writable import require_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUILT_IN_REQUESTS = 2000


class Answer(Protocol):
    """What every function of this package returns."""

    def to_dict(self) -> dict[str, Any]: ...
    def plot(self, path: Any = None) -> Figure: ...


def positive(text: str) -> int:
    """An integer >= 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be an integer >= 1")
    return number


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `traffic` reads."""
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure CSV or Mooncake JSON lines (default: built-in lengths)",
    )
    add("--requests", type=int, metavar="N", help="only the first so many (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `model` and `memory_tokens` read."""
    add_shape_arguments(parser)
    parser.add_argument(
        "--heads",
        type=positive,
        metavar="N",
        help="query heads (default: from --config, else as many as KV heads)",
    )
    parser.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="for K and V of all layers, like 8GiB; wants --config or the shape",
    )


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `write_results` reads."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures there (default: do not)")
    add("--plots", type=Path, metavar="DIR", help="draw into that folder (default: do not)")


def traffic(args: argparse.Namespace) -> list[Request]:
    """The requests asked about; prints what they are in two lines."""
    check_int("requests", args.requests, minimum=1, optional=True)
    check_int("seed", args.seed, minimum=0)
    if args.trace is None:
        requests = sample_requests(args.requests or BUILT_IN_REQUESTS, seed=args.seed)
        source = BUILT_IN_SOURCE
    else:
        requests, source = read_trace(args.trace, limit=args.requests), args.trace.name
    print(f"{len(requests):,} requests of {source}")
    parts = {"prompt": [r.prompt_len for r in requests], "output": [r.output_len for r in requests]}
    print("; ".join(f"{name} {_spread(lengths)}" for name, lengths in parts.items()), end="\n\n")
    return requests


def model(args: argparse.Namespace) -> ModelShape | None:
    """The model that is described; None when no option says anything of one."""
    flags = (args.config, args.layers, args.kv_heads, args.head_dim)
    if any(flag is not None for flag in flags):
        shape = shape_from(args)
        return shape if args.heads is None else replace(shape, heads=args.heads)
    for option, value in (
        ("--dtype", args.dtype), ("--heads", args.heads), ("--kv-memory", args.kv_memory),
    ):  # fmt: skip
        if value is not None:
            raise ValueError(f"{option} wants --config, or --layers, --kv-heads and --head-dim")
    return None


def heads_note(shape: ModelShape | None) -> list[str]:
    """What is assumed of the query heads, if anything is."""
    if shape is None or shape.heads is not None:
        return []
    return [f"query heads are taken to be as many as KV heads, {shape.kv_heads}: --heads"]


def memory_tokens(args: argparse.Namespace, shape: ModelShape | None) -> int | None:
    """Tokens that --kv-memory has room for; None without it."""
    if args.kv_memory is None or shape is None:
        return None
    per_token = block_bytes(1, shape.kv_heads, shape.head_dim, shape.dtype, shape.layers)
    tokens = parse_bytes(args.kv_memory) // per_token
    if tokens < 1:
        raise ValueError(f"--kv-memory is {args.kv_memory}; one token takes {per_token:,} bytes")
    return tokens


def check_results(args: argparse.Namespace) -> None:
    """Raise OSError now, not after the work, when results cannot be written."""
    option = "json"
    try:
        if args.json is not None:
            require_writable(args.json)
        option = "plots"
        if args.plots is not None:
            args.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        path = getattr(args, option)
        raise OSError(f"--{option} {path} cannot be written: {error.strerror}") from error


def write_results(args: argparse.Namespace, answers: Mapping[str, Answer]) -> None:
    """Write what was asked for, and say where."""
    if args.json is not None:
        figures = {name: answer.to_dict() for name, answer in answers.items()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"JSON: {args.json}")
    if args.plots is not None:
        for name, answer in answers.items():
            path = args.plots / f"{name}.png"
            answer.plot(path)
            print(f"picture: {path}")


def _spread(lengths: list[int]) -> str:
    ordered = sorted(lengths)
    middle, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
    return f"{middle:,} tokens (median), {high:,} (90 %), {ordered[-1]:,} (longest)"
