"""How good the cache's choice is: hit tokens on a request trace, against the offline optimum.

    python bench/prefix_policies.py TRACE [--peers DIR TOOL] [--requests N] [--json FILE]

TRACE is JSON lines with `input_length` and `hash_ids`, one id per 512 tokens of the prompt (the
Mooncake format). Requests run one after the other: a prompt is admitted, computed and freed. A hit
is a block in an unbroken prefix, and at least one token of a prompt is computed. Prompts that are
longer than the whole pool are left out.

optimum  Belady's rule on blocks: forget what is needed again last. It knows the future.
fifo     forget what was computed first, however often it was hit since.
vLLM     the pool of release 0.33, as TOOL finds it under DIR.
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from paged import BlockSpaceManager, CacheConfig, Sequence

BLOCK_SIZE = 16
UNIT = 512  # tokens that one id of the trace stands for
POOLS = (8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Prompt:
    num_tokens: int
    ids: tuple[int, ...]

    def tokens(self) -> list[int]:
        """Tokens that are equal exactly where the ids are."""
        units = (range(unit * UNIT, (unit + 1) * UNIT) for unit in self.ids)
        return [token for unit in units for token in unit][: self.num_tokens]

    def blocks(self) -> list[tuple[int, int]]:
        """Its full blocks: (id, part of the id's tokens)."""
        parts = UNIT // BLOCK_SIZE
        return [(self.ids[k // parts], k % parts) for k in range(self.num_tokens // BLOCK_SIZE)]

    @property
    def most_hits(self) -> int:
        return (self.num_tokens - 1) // BLOCK_SIZE


def read_trace(path: str, num_requests: int | None) -> list[Prompt]:
    prompts = []
    for line in Path(path).read_text(encoding="utf-8").splitlines()[:num_requests]:
        request = json.loads(line)
        prompts.append(Prompt(request["input_length"], tuple(request["hash_ids"])))
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
    hit_tokens, parts = 0, UNIT // BLOCK_SIZE
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


def vllm_033(prompts: Iterable[Prompt], num_blocks: int, tool: str) -> int:
    """The real pool of vLLM 0.33, in a process of its own: it loads a package under its name."""
    spec = util.spec_from_file_location("peer_tool", tool)
    assert spec is not None
    assert spec.loader is not None
    peer: Any = util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    peer.setup_v033()
    import torch
    from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.request import Request  # type: ignore[import-not-found]

    hash_fn = get_hash_fn_by_name("xxhash")
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
    spec_of_layer = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=num_blocks + 1,  # block 0 is the null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec_of_layer)],
        ),
        max_model_len=1 << 18,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
        log_stats=True,
    )
    hit_tokens = 0
    for name, prompt in enumerate(prompts):
        request = Request(str(name), prompt.tokens(), peer._SP(), None, block_hasher=hasher)
        blocks, num_hits, _ = manager.get_computed_blocks(request)
        hit_tokens += num_hits
        new = request.num_tokens - num_hits
        allocated = manager.allocate_slots(request, new, num_hits, blocks, has_scheduled_reqs=False)
        assert allocated is not None
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    return hit_tokens


# --- the table ----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    prompts = read_trace(args.trace, args.requests)
    policies: dict[str, Callable[[list[Prompt], int], int]] = {
        "ours": ours,
        "optimum": optimum,
        "fifo": fifo,
    }
    for num_blocks in POOLS:
        fitting = that_fit(prompts, num_blocks)
        for name, policy in policies.items():
            yield name, num_blocks, policy(fitting, num_blocks)
        if args.peers:
            yield "vLLM 0.33", num_blocks, in_own_process(args, num_blocks)


def that_fit(prompts: list[Prompt], num_blocks: int) -> list[Prompt]:
    """Without the prompts that are longer than the whole pool: no policy can serve them."""
    return [p for p in prompts if -(-p.num_tokens // BLOCK_SIZE) <= num_blocks]


def in_own_process(args: argparse.Namespace, num_blocks: int) -> int:
    command = [sys.executable, __file__, args.trace, "--peers", *args.peers]
    command += ["--only-vllm", str(num_blocks)]
    if args.requests:
        command += ["--requests", str(args.requests)]
    environment = {"PEERS": args.peers[0], "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM's pool failed: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", help="JSON lines in the Mooncake format")
    parser.add_argument("--peers", nargs=2, metavar=("DIR", "TOOL"), help="measure vLLM, too")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--only-vllm", type=int, metavar="BLOCKS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    prompts = read_trace(args.trace, args.requests)
    if args.only_vllm:
        fitting = that_fit(prompts, args.only_vllm)
        print(vllm_033(fitting, args.only_vllm, args.peers[1]))
        return 0

    total = sum(prompt.num_tokens for prompt in prompts)
    unlimited = optimum(prompts, 1 << 60)
    rows = []
    num_rows = len(POOLS) * (4 if args.peers else 3)
    print(f"{len(prompts)} requests, {total:,} prompt tokens; {unlimited / total:.1%} could hit")
    for name, num_blocks, hits in tqdm(measure(args), total=num_rows, file=sys.stderr):
        rows.append({"policy": name, "num_blocks": num_blocks, "hit_tokens": hits})
    for num_blocks in POOLS:
        hits_of = {r["policy"]: int(r["hit_tokens"]) for r in rows if r["num_blocks"] == num_blocks}
        cells = [
            f"{name} {hits:>11,} ({hits / total:5.1%}, {hits / hits_of['optimum']:4.0%} of optimum)"
            for name, hits in hits_of.items()
        ]
        print(f"{num_blocks:>8,} blocks  " + "  ".join(cells))
    if args.json:
        report = {"prompt_tokens": total, "unlimited_hit_tokens": unlimited, "rows": rows}
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
