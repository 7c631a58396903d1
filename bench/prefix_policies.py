"""How good the cache's choice is: hit tokens on a request trace, against the offline optimum.

Requests run one after the other: a prompt is admitted, computed and freed. A hit is a block in an
unbroken prefix, and at least one token of a prompt is computed. Prompts that are longer than the
whole pool are left out. Without --trace, conversations that grow turn by turn are made up.

ours     the block manager; it must find what the least recently used rule finds, counted apart.
optimum  Belady's rule: forget what is needed again last. It knows the future.
fifo     forget what was computed first, however often it was hit since.
vLLM     the pool of release 0.33, as TOOL finds it under DIR.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

from tqdm import tqdm

from bench.charts import new_figure, series_style
from bench.prefix_policies_vllm import in_own_process
from bench.records import (
    BenchError,
    Record,
    at_least,
    exact_record,
    existing_file,
    require_peers,
    text_table,
)
from bench.report import Result
from paged import BlockSpaceManager, CacheConfig, Sequence
from paged.trace import HASH_BLOCK_TOKENS, Request, read_trace
from paged.tuning.eviction import Prompts, count_hits, fifo, lru, optimum

BLOCK_SIZE = 16
OURS, OPTIMUM, FIFO, VLLM = "ours", "optimum", "fifo", "vLLM 0.33"
POOLS = (8_192, 32_768, 131_072)  # of a trace
MADE_UP_POOLS, QUICK_POOLS = (1_024, 4_096, 16_384), (1_024, 4_096)


def tokens_of(request: Request) -> list[int]:
    """Prompt tokens that are equal exactly where the hash ids are."""
    size = HASH_BLOCK_TOKENS
    units = (range(unit * size, (unit + 1) * size) for unit in request.hash_ids or ())
    return [token for unit in units for token in unit][: request.prompt_len]


def made_up_requests(num_requests: int, seed: int) -> list[Request]:
    """Conversations that begin with one of a few system prompts; the latest go on most often."""
    rng, names = random.Random(seed), count()

    def longer(ids: tuple[int, ...], num_units: int) -> tuple[int, ...]:
        return ids + tuple(next(names) for _ in range(num_units))

    systems = [longer((), 4) for _ in range(5)]
    talks: list[tuple[int, ...]] = []
    requests = []
    for number in range(num_requests):
        before = rng.choice(systems)
        if talks and rng.random() < 0.7:
            before = talks.pop(max(0, len(talks) - 1 - int(rng.expovariate(1 / 20))))
        talks.append(longer(before, rng.randint(1, 5)))
        prompt_len = (len(talks[-1]) - 1) * HASH_BLOCK_TOKENS + rng.randint(1, HASH_BLOCK_TOKENS)
        requests.append(Request(float(number), prompt_len, 1, talks[-1]))
    return requests


def ours(requests: list[Request], num_blocks: int) -> int:
    """Hit tokens of a block manager's pool."""
    manager = BlockSpaceManager(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks))
    hit_tokens = 0
    for number, request in enumerate(requests):
        seq = Sequence(number, tokens_of(request))
        manager.allocate(seq)
        hit_tokens += manager.num_cached_tokens(seq)
        manager.mark_computed(seq, len(seq))
        manager.free(seq)
    return hit_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=existing_file, metavar="FILE", help="JSON lines in the Mooncake format")
    add("--requests", type=at_least(1), metavar="N", help="only the first so many of the trace")
    add("--peers", nargs=2, type=Path, metavar=("DIR", "TOOL"), help="measure vLLM, too")


def run(options: argparse.Namespace) -> Result:
    """Hit tokens of every policy in pools of several sizes."""
    require_peers(options.peers)
    pools: tuple[int, ...] = QUICK_POOLS if options.quick else MADE_UP_POOLS
    requests, source = made_up_requests(150 if options.quick else 1_000, options.seed), "made up"
    if options.trace is not None:
        requests, pools = read_trace(options.trace, limit=options.requests), POOLS
        source = options.trace.stem
        if any(request.hash_ids is None for request in requests):
            raise BenchError(f"{options.trace} has no hash_ids: what its prompts share is unknown")
    prompts = Prompts(requests, BLOCK_SIZE)
    policies: dict[str, Callable[[list[Request], int], int]] = {
        OURS: ours,
        OPTIMUM: lambda _, num_blocks: count_hits(prompts, optimum, num_blocks),
        FIFO: lambda _, num_blocks: count_hits(prompts, fifo, num_blocks),
    }
    if options.peers:
        policies[VLLM] = lambda fitting, num_blocks: in_own_process(
            [tokens_of(request) for request in fitting], num_blocks, *options.peers
        )
    records: list[Record] = []
    failures = []
    todo = [(num_blocks, name) for num_blocks in pools for name in policies]
    for num_blocks, name in tqdm(todo, desc="prefix_policies", unit="pool"):
        fitting = [r for r in requests if -(-r.prompt_len // BLOCK_SIZE) <= num_blocks]
        title = f"{source}, {len(requests):,} requests, {num_blocks:,} blocks: {name}"
        hits = policies[name](fitting, num_blocks)
        records.append(exact_record(title, hits, "tokens hit", policy=name, num_blocks=num_blocks))
        if name == OURS and hits != (counted := count_hits(prompts, lru, num_blocks)):
            failures.append(
                f"{title}: {hits:,} tokens hit where its rule, counted, hits {counted:,}"
            )
    return {
        "prompt_tokens": sum(request.prompt_len for request in requests),
        "unlimited_hit_tokens": count_hits(prompts, lru, 1 << 60),
        "records": records,
        "failures": failures,
    }


def table(result: Result) -> str:
    """A line for each policy in each pool."""
    total, unlimited = result["prompt_tokens"], result["unlimited_hit_tokens"]
    best = {r["num_blocks"]: r["value"] for r in result["records"] if r["policy"] == OPTIMUM}
    rows = [
        [
            r["name"],
            f"{r['value']:,}",
            f"{r['value'] / total:.1%}",
            f"{r['value'] / max(1, best[r['num_blocks']]):.1%}",
        ]
        for r in result["records"]
    ]
    text = text_table(["", "tokens hit", "of prompts", "of optimum"], rows)
    return f"{text}\n{total:,} prompt tokens, {unlimited / total:.1%} could hit"


def plot(result: Result, path: Path) -> None:
    """Share of the prompt tokens that hit, by policy and pool."""
    total, records = result["prompt_tokens"], result["records"]
    figure = new_figure(result, 7, 4.5)
    axes = figure.add_subplot()
    for number, policy in enumerate(dict.fromkeys(r["policy"] for r in records)):
        own = [r for r in records if r["policy"] == policy]
        sizes, shares = (
            [r["num_blocks"] for r in own],
            [100 * r["value"] / total for r in own],
        )
        axes.errorbar(sizes, shares, label=policy, **series_style(number))
    could = 100 * result["unlimited_hit_tokens"] / total
    axes.axhline(could, color="black", linestyle=":", label="unlimited memory")
    axes.set_xscale("log")
    pools = list(dict.fromkeys(r["num_blocks"] for r in records))
    axes.set_xticks(pools, [f"{num_blocks:,}" for num_blocks in pools])
    axes.minorticks_off()
    axes.set(ylim=(0, None), xlabel="blocks in the pool", ylabel="% of prompt tokens found cached")
    axes.legend(fontsize=8)
    figure.savefig(path)
