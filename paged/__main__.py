"""The command line: `python -m paged` replays a trace; further commands are modules of their own."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from paged.advice import flags_line
from paged.config import check_int
from paged.errors import PagedError
from paged.replay_config import TOLERANCES, ReplayConfig
from paged.trace import BUILT_IN_SOURCE
from paged.writable import require_writable

# Each of these modules has add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "generate": ("paged.generate", "text from a transformers model"),
    "size": ("paged.sizing", "bytes per token and block of a model, and what fits into a memory"),
    "tune": ("paged.tuning.tune_command", "which block size and pool for a traffic of yours"),
    "compare": ("paged.tuning.compare_command", "what paging costs and saves against dense"),
    "debug": ("paged.debug", "look into a block manager at work"),
}
PICTURES = (".png", ".svg", ".pdf")
BACKENDS = ("triton", "torch", "reference")
DISAGREES, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Bad input is one line on stderr and 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in COMMANDS:
            name = arguments.pop(0)
            module_name, description = COMMANDS[name]
            module = importlib.import_module(module_name)
            parser = _Parser(prog=f"paged {name}", description=description)
            module.add_arguments(parser)
            return int(module.run(parser.parse_args(arguments)))
        parser = _Parser(
            prog="paged",
            description="Replay a request trace with continuous batching over a paged KV cache.",
            epilog="other commands: "
            + "; ".join(f"paged {name}: {text}" for name, (_, text) in COMMANDS.items()),
        )
        add_arguments(parser)
        return run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        print("\npaged: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, OverflowError, RecursionError) as error:
        print(f"paged: a number or file is too large for this machine: {error!r}", file=sys.stderr)
        return BAD_INPUT
    except (PagedError, ValueError, OSError) as error:
        print(f"paged: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """Names a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the replay; those with a number are fields of ReplayConfig."""
    add, default = parser.add_argument, ReplayConfig()

    def add_number(flag: str, text: str) -> None:
        value = getattr(default, flag[2:].replace("-", "_"))
        shown = "" if value is None else " (default: %(default)s)"
        add(flag, type=int, metavar="N", default=value, help=text + shown)

    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure CSV or Mooncake JSON lines (default: built-in lengths)",
    )
    add(
        "--requests",
        type=int,
        metavar="N",
        default=64,
        help="how many, the first of the trace (default: %(default)s)",
    )
    add_number("--max-length", "tokens that longer requests are clipped to")
    add_number("--block-size", "tokens per block")
    add_number(
        "--num-blocks",
        "blocks in the pool (default: half of what --max-num-seqs longest requests take)",
    )
    add_number("--num-cpu-blocks", "blocks to swap to when the pool is full")
    add_number("--max-num-seqs", "sequences running at once")
    add_number("--max-num-batched-tokens", "tokens computed in a step")
    add_number("--heads", "query heads")
    add_number("--kv-heads", "KV heads, a divisor of --heads")
    add_number("--head-dim", "width of a head")
    add_number("--layers", "layers, each with K and V of its own")
    add(
        "--dtype",
        choices=TOLERANCES,
        default=default.dtype,
        help="of q, k, v and the cache (default: %(default)s)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        help="kernels (default: triton on a GPU, torch on a CPU)",
    )
    add("--device", default=default.device, help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="share no blocks between equal prefixes (default: share)",
    )
    add_number("--threads", "of torch on the CPU; more than one pay on an idle machine alone")
    add_number("--seed", "of lengths, tokens and vectors")
    add("--json", type=Path, metavar="FILE", help="write all figures there (default: do not)")
    add(
        "--block-map",
        type=Path,
        metavar="FILE",
        default=Path("paged-block-map.png"),
        help="write the picture there (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Replay, print the report, write the JSON file and the picture."""
    from paged.plots import block_map
    from paged.replay import replay_trace
    from paged.trace import read_trace, sample_requests

    settings = {field.name: getattr(args, field.name) for field in fields(ReplayConfig)}
    config = ReplayConfig(**settings)
    check_int("requests", args.requests, minimum=1)
    if args.block_map.suffix not in PICTURES:
        raise ValueError(f"block map {args.block_map} must end in {', '.join(PICTURES)}")
    for path in filter(None, (args.json, args.block_map)):
        require_writable(path)
    if args.trace is None:
        requests = sample_requests(args.requests, seed=config.seed)
        source = BUILT_IN_SOURCE
    else:
        requests = read_trace(args.trace, limit=args.requests)
        source = args.trace.name
    report = replay_trace(requests, config, progress=True)
    print(f"{len(requests):,} requests of {source}\n\n{report}")
    if flags := flags_line(report.advice()):
        print(flags)

    memory = report.memory
    figure = block_map(
        memory.block_map.frames(), steps=memory.block_map.steps, title=f"KV blocks, {source}"
    )
    figure.savefig(args.block_map)
    print(f"block map: {args.block_map}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict() | {"trace": source}, indent=1) + "\n")
        print(f"JSON: {args.json}")
    return 0 if report.agrees else DISAGREES


if __name__ == "__main__":
    sys.exit(main())
