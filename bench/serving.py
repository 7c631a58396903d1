"""One fixed budget of KV memory, and ways of reserving it: who fits, what it costs, what it brings.

README.md has the rules by which loads and budgets were chosen, written down before any was run. The
loads are replayed without a model; the article's also run with SmolLM2, where it is at hand and
without --quick.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.model_source import NAME, load_smollm2
from bench.records import NotMeasuredError, Record, at_least, exact_record
from bench.report import Result
from bench.serving_engine import NUM_RUNS, REQUESTS, measure, shortened
from bench.serving_loads import Load, text_loads, trace_load
from bench.serving_plot import draw
from bench.serving_replay import Outcome, replay
from bench.serving_table import PER_STEP, WITH_TOKENS, show
from bench.serving_ways import WAYS
from paged import block_bytes

SEATS = 256
TEXTS, QUICK_TEXTS = 64, 16
OF_TRACE, QUICK_OF_TRACE = 1000, 32
BYTES_PER_TOKEN = block_bytes(1, 3, 64, "float32", 30)  # of SmolLM2-135M
plot, table = draw, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, nargs="+", default=[], metavar="FILE",
        help="traces to serve besides the texts (default: the built-in lengths)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=at_least(1), metavar="N",
        help=f"of each trace (default: {OF_TRACE:,}, with --quick {QUICK_OF_TRACE})",
    )  # fmt: skip


def run(options: argparse.Namespace) -> Result:
    """Replay every load at every budget by every way; then run the model."""
    num_texts, of_trace = (QUICK_TEXTS, QUICK_OF_TRACE) if options.quick else (TEXTS, OF_TRACE)
    loads = text_loads(num_texts, options.seed)
    for path in options.trace or [None]:
        loads.append(trace_load(path, options.requests or of_trace, options.seed))
    work = [(load, *place) for load in loads for place in product(load.budgets(SEATS), WAYS)]
    records: list[Record] = []
    for load, budget, way in tqdm(work, desc="serving", unit="replay"):
        outcome = replay(load, way, budget * load.unit, SEATS)
        records += replay_records(load, budget, way.name, outcome)
    state = "not measured with --quick"
    if not options.quick:
        try:
            records += engine_records(options)
            state = NAME
        except NotMeasuredError as error:
            state = f"not measured: {error}"
    return {
        "model": state,
        "loads": [load.to_dict() | {"budgets": load.budgets(SEATS)} for load in loads],
        "records": records,
    }


def engine_records(options: argparse.Namespace) -> list[Record]:
    """The article's rows, cut short, with SmolLM2."""
    import torch

    model = load_smollm2()  # tells in one line where transformers is missing
    from paged.engine import pack_linear_layers

    pack_linear_layers(model)
    torch.set_num_threads(options.threads)
    loads = [shortened(load) for load in text_loads(REQUESTS, options.seed)]
    with tqdm(desc=f"serving, {NAME}", total=len(loads) * NUM_RUNS, unit="run") as bar:
        return [r for load in loads for r in measure(model, load, options.seed, bar.update)]


def replay_records(load: Load, budget: int, way: str, outcome: Outcome) -> list[Record]:
    """Tokens per step, with all counts beside them; memory with tokens, where memory was short."""
    name = f"{load.name}, {len(load.requests)} requests, {budget} x {load.unit:,} slots: {way}"
    place: dict[str, Any] = {"load": load.name, "budget": budget, "way": way}
    counts: dict[str, Any] = outcome.to_dict() | {"copied_bytes": outcome.copied * BYTES_PER_TOKEN}
    tokens_per_step = exact_record(
        f"{name}: {PER_STEP}", outcome.tokens_per_step, "tokens", figure=PER_STEP, **place, **counts
    )
    if not outcome.memory:
        return [tokens_per_step]
    share = outcome.memory["tokens"]
    return [
        tokens_per_step,
        exact_record(f"{name}: {WITH_TOKENS}", share, "of it", figure=WITH_TOKENS, **place),
    ]
