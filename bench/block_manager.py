"""How fast the block manager is, in CPU time, beside the barest Python that moves the same data.

"Barest" keeps no promise: a list slice for an allocation, a dict lookup for a block of a prefix
hit, an append and a slot for a token of a step. It runs in turns with our code, so that their ratio
tells more than a time on a shared machine. With --peers, TOOL (a script that prints the figures of
vLLM 0.33 and 0.6.3 as JSON, both found under DIR) runs right after on the same machine.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from bench import block_manager_works as works
from bench.block_manager_peers import add_peers, peer_figures
from bench.block_manager_steps import append_and_slot, steps
from bench.block_manager_works import BLOCK_SIZE
from bench.charts import bar_chart
from bench.records import (
    GROUPS,
    Record,
    Work,
    exact_record,
    rate_record,
    ratio_record,
    require_peers,
    spread_text,
    text_table,
    time_in_turns,
    time_record,
)
from bench.report import Result

NUM_BLOCKS, QUICK_BLOCKS = 131_072, 16_384
LONG_PROMPT = 32_768
NUM_SEQS, CONTEXT = 256, 1_024
BAREST = ", over the barest"


class Item(NamedTuple):
    """Ours and the barest; a rate when `items` are counted."""

    name: str
    ours: Work
    barest: Work
    items: int = 0
    rounds: int = 100
    wanted: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs=2, type=Path, metavar=("DIR", "TOOL"), help="measure vLLM, too"
    )


def run(options: argparse.Namespace) -> Result:
    """Time everything, then vLLM if wanted."""
    import torch

    torch.set_num_threads(options.threads)
    require_peers(options.peers)
    records: list[Record] = []
    todo = deque(items(options.quick, options.seed))
    for _ in tqdm(range(len(todo)), desc="block_manager", unit="work"):
        records += measure(todo.popleft(), options.quick, options.seed)
    records += growth(options.quick, options.seed)
    records.append(memory(NUM_BLOCKS // 4 if options.quick else NUM_BLOCKS))
    if options.peers:
        folder, tool = options.peers
        add_peers(records, peer_figures(folder, tool, options.quick))
    return {"records": records, "exact_for": ["python"]}


def items(quick: bool, seed: int) -> Iterator[Item]:
    """What is timed. Wanted times are those of a quiet machine."""
    blocks, hit_blocks = QUICK_BLOCKS if quick else NUM_BLOCKS, LONG_PROMPT // BLOCK_SIZE
    rng = random.Random(seed)
    prompt = works.random_tokens(rng, LONG_PROMPT)
    hit = [*prompt, 1]
    yield Item(
        f"allocate, chunks of 128 of {blocks:,}, caching off",
        works.allocate(blocks), works.slice_list(blocks), blocks, 30, ">= 2 x 0.33",
    )  # fmt: skip
    yield Item(
        f"free, chunks of 128 of {blocks:,}, caching off",
        works.free(blocks), works.extend_list(blocks), blocks, 30, ">= 2 x 0.33",
    )  # fmt: skip
    yield Item(
        f"allocate, evicting, chunks of 128 of {blocks:,}",
        works.evict(blocks), works.pop_dict(blocks), blocks, 10, ">= 2 x 0.33",
    )  # fmt: skip
    yield Item(
        f"hash a prompt of {LONG_PROMPT:,} tokens",
        works.hash_prompt(prompt), works.hash_bytes(prompt), LONG_PROMPT, 50, ">= 30 M/s",
    )  # fmt: skip
    for name, single, wanted in (
        ("step", False, "<= 0.15 ms"),
        ("single calls", True, "<= 0.35 ms"),
    ):
        ours = steps(rng, NUM_BLOCKS, CONTEXT, NUM_SEQS, single_calls=single)
        title = f"{name}, {NUM_SEQS} sequences of {CONTEXT:,} tokens"
        yield Item(title, ours, append_and_slot(rng, NUM_SEQS, CONTEXT), wanted=wanted)
    yield Item(
        f"look up a {hit_blocks:,}-block hit again",
        works.look_up(NUM_BLOCKS, hit), works.look_up_dict(hit_blocks), wanted="<= 0.3 ms",
    )  # fmt: skip
    yield Item(
        f"allocate a {hit_blocks:,}-block hit after it",
        works.allocate_hit(NUM_BLOCKS, hit), works.count_references(hit_blocks), wanted="<= 0.2 ms",
    )  # fmt: skip
    for pool in (4_096, 131_072) if quick else (4_096, 32_768, 131_072):
        yield Item(
            f"swap out 64 blocks, pool of {pool:,}",
            works.swap_out(pool, 64, rng), works.pair_lists(64), wanted="<= 0.1 ms",
        )  # fmt: skip
    yield Item(
        f"fork a {hit_blocks:,}-block sequence",
        works.fork(NUM_BLOCKS, prompt), works.count_references(hit_blocks), wanted="<= 0.1 ms",
    )  # fmt: skip


def measure(item: Item, quick: bool, seed: int) -> list[Record]:
    """A time or rate, and its ratio to the barest."""
    rounds = max(GROUPS, item.rounds // 3) if quick else item.rounds
    times = time_in_turns({"ours": item.ours, "barest": item.barest}, rounds=rounds, seed=seed)
    if item.items:
        record = rate_record(item.name, times["ours"], item.items, wanted=item.wanted)
    else:
        record = time_record(item.name, times["ours"], wanted=item.wanted)
    return [
        record,
        ratio_record(f"{item.name}{BAREST}", times["ours"], times["barest"], "x barest"),
    ]


def growth(quick: bool, seed: int) -> Iterator[Record]:
    """A step must cost the same whatever the pool and the context, and follow the batch."""
    rng = random.Random(seed)
    long, short = CONTEXT * (8 if quick else 64), CONTEXT // 16
    sweeps = {
        f"{NUM_SEQS} sequences of {short} tokens, pool of {{:,}} over {{:,}} blocks": [
            (pool, short, NUM_SEQS) for pool in (NUM_BLOCKS, NUM_BLOCKS // 32)
        ],
        "16 sequences of {:,} over {:,} tokens": [
            (2 * NUM_BLOCKS, context, 16) for context in (long, CONTEXT)
        ],
        f"{{:,}} over {{:,}} sequences of {CONTEXT:,} tokens": [
            (NUM_BLOCKS, CONTEXT, num_seqs) for num_seqs in (4 * NUM_SEQS, NUM_SEQS)
        ],
    }
    for number, (text, sizes) in enumerate(sweeps.items()):
        large, small = (steps(rng, *size) for size in sizes)
        times = time_in_turns(
            {"large": large, "small": small}, rounds=30 if quick else 100, seed=seed
        )
        name = f"step, {text.format(*(size[number] for size in sizes))}"
        yield ratio_record(name, times["large"], times["small"], "x")


def memory(num_blocks: int) -> Record:
    """Of a pool in which every block is cached content, in a fresh process."""
    command = [sys.executable, "-m", "bench.block_manager_memory", str(num_blocks)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    name = f"memory per block of cached content, pool of {num_blocks:,}"
    return exact_record(name, float(done.stdout), "bytes", tolerance=0.2)


def table(result: Result) -> str:
    """A line for each time, with its ratio; then the ratios and sizes that stand alone."""
    records = {record["name"]: record for record in result["records"]}
    peers = any("vllm_033" in record for record in records.values())
    head = ["quartiles and median of CPU time", "", "", "x barest", "spread"]
    rows: list[list[str]] = []
    alone: list[list[str]] = []
    for name, record in records.items():
        if record["kind"] in ("time", "rate"):
            ratio = records[name + BAREST]
            spread = f"{ratio['lower']:.3g}-{ratio['upper']:.3g}"
            row = [name, record["unit"], spread_text(record), f"{ratio['value']:.3g}", spread]
            if peers:
                row += [_peer(record, release) for release in ("vllm_033", "vllm_063")]
            rows.append([*row, record["wanted"]])
        elif not name.endswith(BAREST):
            alone.append([name, record["unit"], spread_text(record)])
    head += ["0.33", "0.6.3"] * peers + ["wanted"]
    return f"{text_table(head, rows)}\n\n{text_table(['', '', 'least, value, most'], alone)}"


def _peer(record: Record, release: str) -> str:
    theirs = record.get(release)
    if theirs is None:
        return "-"
    better = record["value"] / theirs if record["kind"] == "rate" else theirs / record["value"]
    return f"{theirs:.3g} (ours x {better:.1f})"


def plot(result: Result, path: Path) -> None:
    """The ratios."""
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    title = "CPU time of the block manager (log scale, spread as a line)"
    bar_chart(result, path, ratios, title, "the barest Python, or the smaller size")
