"""`python -m bench`: run a benchmark or all of them, draw a result again, compare two results."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))  # where not installed

from bench.compare import SLACK, compare_paths
from bench.records import BenchError, NotMeasuredError, WrongResultError, at_least, text_table
from bench.report import Result, envelope, heading, machine, read_result, write_result
from paged.errors import PagedError

WRONG, BAD_INPUT, NOT_MEASURED, INTERRUPTED = 1, 2, 3, 130
DEFAULT_FOLDER = Path("bench-results")


class Benchmark(NamedTuple):
    """A module with `run(options)` and `table(result)`, perhaps `plot` and `add_arguments`."""

    module: str
    about: str
    environment: Mapping[str, str] = MappingProxyType(
        {}
    )  # set before torch and triton are imported


BENCHMARKS = {
    "attention": Benchmark("bench.attention", "attention over pages beside dense, on this CPU"),
    "block_manager": Benchmark("bench.block_manager", "the block manager's work, in CPU time"),
    "scheduler": Benchmark("bench.scheduler", "the scheduler's step, in CPU time"),
    "prefix_policies": Benchmark("bench.prefix_policies", "prefix hits against the optimum"),
    "model": Benchmark("bench.model", "tokens per second of a whole model, beside other engines"),
    "serving": Benchmark("bench.serving", "ways of reserving KV memory, within one budget"),
    "host": Benchmark(
        "bench.host", "host time of a call of the kernels", {"TRITON_INTERPRET": "1"}
    ),
    "traffic": Benchmark(
        "bench.traffic", "bytes that the kernels ask for, by count", {"TRITON_INTERPRET": "1"}
    ),
    "gpu": Benchmark("bench.gpu", "kernels on a GPU: checks, then % of its bandwidth"),
    "static": Benchmark(
        "bench.static", "registers, pipeline, instructions, by compiler", {"TRITON_INTERPRET": "0"}
    ),
}
COMMANDS = {
    "all": "run every benchmark, each in a process of its own",
    "plot": "show a result again: FILE.json",
    "compare": "two results, or folders of results: A.json B.json",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. What a user can put right is one line on stderr and 2."""
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if name in BENCHMARKS:
            return run_one(name, arguments)
        if name == "all":
            return run_all(arguments)
        if name == "plot":
            return plot_again(arguments)
        if name == "compare":
            return compare_two(arguments)
        if name not in ("-h", "--help"):
            known = ", ".join([*BENCHMARKS, *COMMANDS])
            raise BenchError(f"there is no benchmark {name}: it must be one of {known}")
        print("usage: python -m bench NAME [options]        python -m bench NAME --help\n")
        for about in BENCHMARKS, COMMANDS:
            for key, value in about.items():
                print(f"  {key:16} {value if isinstance(value, str) else value.about}")
        return 0
    except KeyboardInterrupt:
        print(f"\nbench {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except NotMeasuredError as error:
        print(f"bench {name}: not measured: {error}", file=sys.stderr)
        return NOT_MEASURED
    except (BenchError, PagedError, OSError) as error:
        print(f"bench {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG if isinstance(error, WrongResultError) else BAD_INPUT


def run_one(name: str, arguments: Sequence[str]) -> int:
    """Measure, print the table, write the JSON file, draw from it."""
    module = load(name)
    parser = _parser(name, (module.__doc__ or "").split("\n\n")[0])
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)  # before minutes of work that may be lost
    if not os.access(options.out, os.W_OK):
        raise BenchError(f"--out: {options.out} cannot be written to")
    start, result = time.monotonic(), envelope(name, options)
    result |= module.run(options)
    result["machine"]["load_after"] = machine()["load"]
    result["seconds"] = round(time.monotonic() - start, 1)
    path = write_result(result, options.out)
    show(path)
    failures = result.get("failures", [])
    print(*failures, sep="\n", end="\n" if failures else "")
    return WRONG if failures else 0


def show(path: Path, picture: Path | None = None) -> None:
    """Print the table of a JSON file and draw its picture beside it."""
    result: Result = read_result(path)
    if result["benchmark"] not in BENCHMARKS:
        raise BenchError(f"{path} is of an unknown benchmark, {result['benchmark']}")
    module = load(result["benchmark"])
    print(f"{heading(result)}\n{module.table(result)}\n{path}")
    if hasattr(module, "plot") and result["records"]:
        picture = picture or path.with_suffix(".png")
        module.plot(result, picture)
        print(picture)


def load(name: str) -> Any:
    """The module of a benchmark, in the environment that it needs."""
    os.environ.update(BENCHMARKS[name].environment)
    return import_module(BENCHMARKS[name].module)


def run_all(arguments: Sequence[str]) -> int:
    """Every benchmark with its default options."""
    options = _parser("all", COMMANDS["all"]).parse_args(arguments)
    rows, codes = [], []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", "bench", name, "--out", str(options.out)]
        command += ["--seed", str(options.seed), "--threads", str(options.threads)]
        start = time.monotonic()
        code = subprocess.call(command + ["--quick"] * options.quick)
        outcome = {0: "done", NOT_MEASURED: "not measured"}.get(code, f"failed: exit code {code}")
        rows.append([name, f"{time.monotonic() - start:.0f} s", outcome])
        codes.append(0 if code == NOT_MEASURED else code)
        print()
    print(text_table(["benchmark", "time", ""], rows))
    return max(codes, key=abs)


def plot_again(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="bench plot", description=COMMANDS["plot"])
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--png", type=Path, metavar="FILE", help="default: beside the JSON file")
    args = parser.parse_args(arguments)
    if args.png is not None and args.png.suffix != ".png":
        parser.error(f"--png must end in .png, got {args.png}")
    show(args.file, args.png)
    return 0


def compare_two(arguments: Sequence[str]) -> int:
    """0: nothing is off; 1: something is."""
    parser = _Parser(prog="bench compare", description=COMMANDS["compare"])
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument(
        "--slack", type=float, default=SLACK, metavar="FACTOR",
        help="how far the spreads of a ratio may lie apart (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    if not args.slack >= 1:
        parser.error(f"--slack must be at least 1, got {args.slack}")
    return 0 if compare_paths(args.first, args.second, args.slack) else WRONG


class _Parser(argparse.ArgumentParser):
    """Names a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see python -m {self.prog} --help)\n")


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = _Parser(
        prog=f"bench {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes, few repeats")
    add(
        "--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR",
        help="where the JSON file and the picture go (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N", help="default: %(default)s")
    add("--threads", type=at_least(1), default=1, metavar="N", help="of torch; default: 1")
    return parser


if __name__ == "__main__":
    sys.exit(main())
