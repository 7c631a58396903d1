"""How good the cache's choice is: hit tokens on a request trace, against the offline optimum.

Requests run one after the other: a prompt is admitted, computed and freed. A hit is a block in an
unbroken prefix, and at least one token of a prompt is computed. Prompts that are longer than the
whole pool are left out. Without --trace, conversations that grow turn by turn are made up.

optimum  Belady's rule on blocks: forget what is needed again last. It knows the future.
fifo     forget what was computed first, however often it was hit since.
vLLM     the pool of release 0.33, as TOOL finds it under DIR.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from paged.trace import HASH_BLOCK_TOKENS, read_trace

BLOCK_SIZE = 16
OURS, OPTIMUM, FIFO, VLLM = "ours", "optimum", "fifo", "vLLM 0.33"
POOLS, MADE_UP_POOLS, QUICK_POOLS = (
    (8_192, 32_768, 131_072),
    (1_024, 4_096, 16_384),
    (1_024, 4_096),
)


@dataclass(frozen=True)
class Prompt:
    num_tokens: int
    ids: tuple[int, ...]  # one for each HASH_BLOCK_TOKENS tokens

    def tokens(self) -> list[int]:
        """Tokens that are equal exactly where the ids are."""
        size = HASH_BLOCK_TOKENS
        units = (range(unit * size, (unit + 1) * size) for unit in self.ids)
        return [token for unit in units for token in unit][: self.num_tokens]

    def blocks(self) -> list[tuple[int, int]]:
        """Its full blocks: (id, part of the id's tokens)."""
        parts = HASH_BLOCK_TOKENS // BLOCK_SIZE
        return [(self.ids[k // parts], k % parts) for k in range(self.num_tokens // BLOCK_SIZE)]

    @property
    def most_hits(self) -> int:
        return (self.num_tokens - 1) // BLOCK_SIZE


def prompts_of(trace: Path, num_requests: int | None) -> list[Prompt]:
    """The prompts of a trace in the Mooncake format."""
    prompts = []
    for request in read_trace(trace, limit=num_requests):
        if request.hash_ids is None:
            raise BenchError(
                f"{trace} has no hash_ids, so it does not say which prompts begin alike"
            )
        prompts.append(Prompt(request.prompt_len, request.hash_ids))
    return prompts


def made_up_prompts(num_requests: int, seed: int) -> list[Prompt]:
    """Conversations that begin with one of a few system prompts; the latest go on most often."""
    rng = random.Random(seed)
    names = iter(range(1 << 30))
    systems = [tuple(next(names) for _ in range(4)) for _ in range(5)]
    talks: list[tuple[int, ...]] = []
    prompts = []
    for _ in range(num_requests):
        if talks and rng.random() < 0.7:
            place = max(0, len(talks) - 1 - int(rng.expovariate(1 / 20)))
            before = talks.pop(place)
        else:
            before = rng.choice(systems)
        talks.append(before + tuple(next(names) for _ in range(rng.randint(1, 5))))
        tail = rng.randint(1, HASH_BLOCK_TOKENS)
        prompts.append(Prompt((len(talks[-1]) - 1) * HASH_BLOCK_TOKENS + tail, talks[-1]))
    return prompts


# --- policies: hit tokens of all prompts with a pool of so many blocks ---------------------------


def ours(prompts: Iterable[Prompt], num_blocks: int) -> int:
    manager = BlockSpaceManager(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks))
    hit_tokens = 0
    for name, prompt in enumerate(prompts):
        seq = Sequence(name, prompt.tokens())
        manager.allocate(seq)
        hit_tokens += manager.num_cached_tokens(seq)
        manager.mark_computed(seq, len(seq))
        manager.free(seq)
    return hit_tokens


def fifo(prompts: Iterable[Prompt], num_blocks: int) -> int:
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    hit_tokens = 0
    for prompt in prompts:
        blocks = prompt.blocks()
        num_hits = count_hits(prompt, blocks, cached)
        hit_tokens += num_hits * BLOCK_SIZE
        in_use = set(blocks)
        kept = []
        for block in blocks[num_hits:]:
            while block not in cached and len(cached) >= num_blocks:
                oldest, _ = cached.popitem(last=False)
                if oldest in in_use:  # it runs: nobody may forget it now
                    kept.append(oldest)
            cached.setdefault(block)
        for block in reversed(kept):
            cached[block] = None
            cached.move_to_end(block, last=False)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hit_tokens


def optimum(prompts: list[Prompt], num_blocks: int) -> int:
    """Belady's MIN; of blocks needed again at the same time the later part goes first."""
    never = len(prompts)
    next_use: list[list[int]] = []
    last_seen: dict[int, int] = {}
    for number in reversed(range(never)):
        ids = prompts[number].ids
        next_use.append([last_seen.get(unit, never) for unit in ids])
        last_seen.update(dict.fromkeys(ids, number))
    next_use.reverse()

    cached: dict[tuple[int, int], int] = {}  # block -> when it is needed again
    heap: list[tuple[int, int, tuple[int, int]]] = []
    hit_tokens, parts = 0, HASH_BLOCK_TOKENS // BLOCK_SIZE
    for prompt, needed_at in zip(prompts, next_use, strict=True):
        blocks = prompt.blocks()
        hit_tokens += count_hits(prompt, blocks, cached) * BLOCK_SIZE
        for position, block in enumerate(blocks):
            cached[block] = needed_at[position // parts]
            heapq.heappush(heap, (-cached[block], -position, block))
        while len(cached) > num_blocks:
            when, _, block = heapq.heappop(heap)
            if cached.get(block) == -when:
                del cached[block]
    return hit_tokens


def count_hits(prompt: Prompt, blocks: list[tuple[int, int]], cached: Any) -> int:
    for num_hits, block in enumerate(blocks[: prompt.most_hits]):
        if block not in cached:
            return num_hits
    return prompt.most_hits


# --- the benchmark ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=existing_file, metavar="FILE", help="JSON lines in the Mooncake format")
    add("--requests", type=at_least(1), metavar="N", help="only the first so many of the trace")
    add("--peers", nargs=2, type=Path, metavar=("DIR", "TOOL"), help="measure vLLM, too")


def run(options: argparse.Namespace) -> Result:
    """Hit tokens of every policy in pools of several sizes."""
    require_peers(options.peers)
    pools: tuple[int, ...]
    if options.trace is not None:
        prompts, pools = prompts_of(options.trace, options.requests), POOLS
        source = options.trace.stem
    else:
        prompts = made_up_prompts(150 if options.quick else 1_000, options.seed)
        pools = QUICK_POOLS if options.quick else MADE_UP_POOLS
        source = "made-up conversations"
    policies: dict[str, Callable[[list[Prompt], int], int]] = {
        OURS: ours, OPTIMUM: optimum, FIFO: fifo,
    }  # fmt: skip
    if options.peers:
        policies[VLLM] = lambda prompts, num_blocks: in_own_process(
            [prompt.tokens() for prompt in prompts], num_blocks, *options.peers
        )
    total = sum(prompt.num_tokens for prompt in prompts)
    unlimited = optimum(prompts, 1 << 60)
    records: list[Record] = []
    todo = [(name, num_blocks) for num_blocks in pools for name in policies]
    for name, num_blocks in tqdm(todo, desc="prefix_policies", unit="pool"):
        fitting = that_fit(prompts, num_blocks)
        title = f"{source}, {len(prompts):,} requests, {num_blocks:,} blocks: {name}"
        hits = policies[name](fitting, num_blocks)
        records.append(exact_record(title, hits, "tokens hit", policy=name, num_blocks=num_blocks))
    return {"prompt_tokens": total, "unlimited_hit_tokens": unlimited, "records": records}


def that_fit(prompts: list[Prompt], num_blocks: int) -> list[Prompt]:
    """Without the prompts that are longer than the whole pool: no policy can serve them."""
    return [p for p in prompts if -(-p.num_tokens // BLOCK_SIZE) <= num_blocks]


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
