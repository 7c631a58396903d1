"""How fast the block manager is: `python bench/block_manager.py [--quick] [--peers DIR TOOL]`.

Every row is measured in this run, ours in process CPU time and wall time. With --peers, TOOL (a
script that prints the figures of vLLM 0.33 and 0.6.3 as JSON, both found under DIR) runs on the
same machine right after, so that ratios compare like with like.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paged import (
    BlockSpaceManager,
    CacheConfig,
    NaiveBlockAllocator,
    PrefixCachingBlockAllocator,
    Sequence,
    SequenceGroup,
)

NUM_BLOCKS = 131_072
BLOCK_SIZE = 16
CHUNK = 128
LONG_PROMPT = 32_768
SWAPPED_BLOCKS = 64


@dataclass
class Row:
    """One measurement: seconds, or items per second where `unit` says so."""

    name: str
    unit: str
    cpu_min: float
    cpu_median: float
    wall_min: float
    wall_median: float
    wanted: str = ""
    vllm_033: float | None = None
    vllm_063: float | None = None


class Timings:
    """Repeated measurements of one piece of work on two clocks."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def add(self, work: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def row(self, name: str, wanted: str = "") -> Row:
        """Milliseconds."""
        return Row(name, "ms", *self._summary(lambda seconds: 1e3 * seconds), wanted)

    def rate(self, name: str, items: int, wanted: str = "") -> Row:
        """Millions of items per second; `min` is the fastest repeat."""
        return Row(name, "M/s", *self._summary(lambda seconds: items / seconds / 1e6), wanted)

    def _summary(self, convert: Callable[[float], float]) -> tuple[float, float, float, float]:
        cpu, wall = sorted(self.cpu), sorted(self.wall)
        return (
            convert(cpu[0]),
            convert(statistics.median(cpu)),
            convert(wall[0]),
            convert(statistics.median(wall)),
        )


# --- the work -----------------------------------------------------------------------------------


def allocators(repeats: int) -> Iterator[Row]:
    """Take all blocks in chunks, give them back; then the same where every block has content."""
    num_chunks = NUM_BLOCKS // CHUNK
    pool = NaiveBlockAllocator(NUM_BLOCKS)
    taken, given = Timings(), Timings()
    for _ in range(repeats):
        chunks: list[list[int]] = []
        taken.add(lambda: chunks.extend([pool.allocate(CHUNK) for _ in range(num_chunks)]))  # noqa: B023
        given.add(lambda: deque(map(pool.free, chunks), maxlen=0))  # noqa: B023
    yield taken.rate("allocate, chunks of 128, caching off", NUM_BLOCKS, ">= 2 x 0.33")
    yield given.rate("free, chunks of 128, caching off", NUM_BLOCKS, ">= 2 x 0.33")

    evicting = Timings()
    for _ in range(repeats):
        cache = PrefixCachingBlockAllocator(NUM_BLOCKS, 1)
        for number in range(num_chunks):  # a chain per chunk, given back tail first
            chain: list[int] = []
            for token in range(CHUNK):
                parent = chain[-1] if chain else None
                chain.append(cache.allocate_immutable(parent, [token or number]))
            cache.free(chain[::-1])
        freeze()
        evicting.add(lambda: [cache.allocate(CHUNK) for _ in range(num_chunks)])  # noqa: B023
        assert cache.num_cached == 0
    yield evicting.rate("allocate, evicting, chunks of 128", NUM_BLOCKS, ">= 2 x 0.33")


def hashing(repeats: int) -> Iterator[Row]:
    hasher = PrefixCachingBlockAllocator(1, BLOCK_SIZE).hasher
    timings = Timings()
    tokens = random_tokens(random.Random(0), LONG_PROMPT)
    for _ in range(repeats):
        chain = hasher.chain_of(Sequence("prompt", ()))
        timings.add(lambda: hasher.extend(chain, tokens, LONG_PROMPT // BLOCK_SIZE))  # noqa: B023
    yield timings.rate("hash a 32,768-token prompt, tokens", LONG_PROMPT, ">= 30")


def decode(repeats: int) -> Iterator[Row]:
    yield decode_step(repeats).row("step, 256 sequences, tables and slots", "<= 0.15")
    yield decode_step(repeats, single_calls=True).row("the same by single calls", "<= 0.35")


def growth(repeats: int) -> Iterator[Row]:
    """A step must cost the same whatever the pool and the context, and follow the batch."""
    for pool in (4_096, 32_768, 131_072):
        yield decode_step(repeats, pool, context=64).row(f"step, pool of {pool:,} blocks")
    for context in (1_024, 8_192, 65_536):
        row = decode_step(repeats, 4096 * 64, context, num_seqs=16)
        yield row.row(f"step, 16 sequences of {context:,} tokens")
    for num_seqs in (16, 256, 1_024):
        yield decode_step(repeats, num_seqs=num_seqs).row(f"step, {num_seqs:,} sequences")


def decode_step(
    repeats: int,
    pool: int = NUM_BLOCKS,
    context: int = 1_024,
    num_seqs: int = 256,
    single_calls: bool = False,
) -> Timings:
    """Steps of running sequences; between them one leaves, one joins and two change places."""
    rng = random.Random(1)
    manager = BlockSpaceManager(
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=pool, watermark=0.0)
    )
    names = iter(range(1 << 30))

    def admit() -> Sequence:
        seq = Sequence(next(names), random_tokens(rng, context + rng.randrange(BLOCK_SIZE)))
        manager.allocate(seq)
        manager.mark_computed(seq, len(seq))
        return seq

    def by_single_calls() -> None:
        for seq, token in zip(seqs, tokens, strict=True):
            manager.mark_computed(seq, len(seq))
            seq.append_token(token)
            manager.append_slots(seq)
        manager.build_batch(seqs)

    seqs = [admit() for _ in range(num_seqs)]
    tokens: list[int] = []
    timings = Timings()
    freeze()
    for step in range(8 * repeats):
        tokens = random_tokens(rng, num_seqs)
        if step % 4 == 0:
            manager.free(seqs.pop(rng.randrange(num_seqs)))
            seqs.append(admit())
        i, j = rng.randrange(num_seqs), rng.randrange(num_seqs)
        seqs[i], seqs[j] = seqs[j], seqs[i]
        if single_calls:
            timings.add(by_single_calls)
        else:
            timings.add(lambda: manager.step(seqs, tokens))  # noqa: B023
    manager.check_invariants()
    return timings


def prefix_hit(repeats: int) -> Iterator[Row]:
    manager = BlockSpaceManager(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS))
    tokens = random_tokens(random.Random(2), LONG_PROMPT + 1)
    first = Sequence("first", tokens)
    manager.allocate(first)
    manager.mark_computed(first, len(first))
    manager.free(first)
    other = Sequence("other", random_tokens(random.Random(3), 4 * BLOCK_SIZE))
    lookups, allocations = Timings(), Timings()
    for repeat in range(4 * repeats):
        seq = Sequence(repeat, tokens)
        manager.can_allocate(seq)  # computes the digests
        other = Sequence(f"other {repeat}", random_tokens(random.Random(repeat), 64))
        manager.allocate(other)
        manager.mark_computed(other, 64)  # changes the index: the first answer is void
        lookups.add(lambda: manager.can_allocate(seq))  # noqa: B023
        allocations.add(lambda: manager.allocate(seq))  # noqa: B023
        assert manager.num_cached_tokens(seq) == LONG_PROMPT
        manager.free(seq)
        manager.free(other)
    yield lookups.row("2,048-block hit, second can_allocate", "<= 0.3")
    yield allocations.row("2,048-block hit, allocate after it", "<= 0.2")


def sharing(repeats: int) -> Iterator[Row]:
    for pool in (4_096, 32_768, 131_072):
        manager = BlockSpaceManager(
            CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=pool, num_cpu_blocks=pool)
        )
        seq = Sequence("a", random_tokens(random.Random(4), SWAPPED_BLOCKS * BLOCK_SIZE))
        group = SequenceGroup("g", [seq])
        manager.allocate(seq)
        manager.mark_computed(seq, len(seq))
        timings = Timings()
        for _ in range(4 * repeats):
            timings.add(lambda: manager.swap_out(group))  # noqa: B023
            manager.swap_in(group)
        yield timings.row(f"swap out 64 blocks, pool of {pool:,}", "<= 0.1")

    manager = BlockSpaceManager(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS))
    parent = Sequence("parent", random_tokens(random.Random(5), LONG_PROMPT))
    manager.allocate(parent)
    timings = Timings()
    for repeat in range(4 * repeats):
        child = parent.fork(repeat)
        timings.add(lambda: manager.fork(parent, child))  # noqa: B023
        manager.free(child)
    yield timings.row("fork a 2,048-block sequence", "<= 0.1")


def full_pool_memory() -> dict[str, float]:
    """Resident bytes of a pool in which every block is cached content, in this fresh process."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    before = resident()
    manager = BlockSpaceManager(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS))
    empty = resident()
    rng = random.Random(6)
    for name in range(NUM_BLOCKS // 256):
        seq = Sequence(name, random_tokens(rng, 256 * BLOCK_SIZE))
        manager.allocate(seq)
        manager.mark_computed(seq, len(seq))
        manager.free(seq)
    assert manager.stats().gpu.num_cached == NUM_BLOCKS
    gc.collect()
    total = resident()
    return {
        "process_mb": total / 1e6,
        "bytes_per_block": (total - before) / NUM_BLOCKS,
        "bytes_per_empty_block": (empty - before) / NUM_BLOCKS,
    }


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return rng.choices(range(128_000), k=n)


def freeze() -> None:
    """As a server does once it is set up: what lives now is not looked at again."""
    gc.collect()
    gc.freeze()


# --- the peers ----------------------------------------------------------------------------------


def peer_figures(peers: str, tool: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, tool, *(["--quick"] if quick else [])]
    environment = {**os.environ, "PEERS": peers}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout))


def add_peers(rows: Iterable[Row], figures: dict[str, Any]) -> None:
    """Medians of the peers' CPU time beside our rows, where they do the same work."""
    new, old = figures.get("v033", {}), figures.get("v063", {})

    def find(tree: dict[str, Any], *path: str) -> float | None:
        found: Any = tree
        for key in path:
            matches = [value for name, value in found.items() if key in name] if found else []
            found = matches[0] if matches else None
        return None if found is None else float(found)

    pool = ("a_block_pool", "caching=False,chunk=128")
    evicting = ("a_block_pool", "every block hashed", "get_new_blocks")
    decode_new = ("c_kvcachemanager", "caching=True xxhash", "decode_ms_per_step_total_median")
    decode_old = ("c_block", "V2 prefix_caching", "decode_ms_per_step_total_median")
    hit = ("d_prefix_hit",)
    peers: dict[str, tuple[float | None, float | None]] = {
        "allocate, chunks": (
            find(new, *pool, "get_new_blocks", "blocks/s"),
            find(old, "a_allocators", "naive", "allocate_mutable", "blocks/s"),
        ),
        "free, chunks": (
            find(new, *pool, "free_blocks", "blocks/s"),
            find(old, "a_allocators", "naive", "free", "blocks/s"),
        ),
        "allocate, evicting": (
            find({"a_block_pool": chunk_128(new)}, *evicting, "blocks/s"),
            find(old, "a_allocators", "prefix_caching", "allocate_mutable", "blocks/s"),
        ),
        "hash a": (find(new, "b_hashing", "xxhash", "tokens/s"), None),
        "step, 256 sequences, tables": (find(new, *decode_new), find(old, *decode_old)),
        "the same by single": (find(new, *decode_new), find(old, *decode_old)),
        "2,048-block hit, second": (find(new, *hit, "get_computed_blocks us"), None),
        "2,048-block hit, allocate": (
            find(new, *hit, "warm allocate_slots"),
            find(old, *hit, "warm allocate"),
        ),
        "swap out 64 blocks, pool of 4,096": (None, find(old, "e_swap", "64 blocks, 4096 gpu")),
        "swap out 64 blocks, pool of 32,768": (None, find(old, "e_swap", "64 blocks, 32768 gpu")),
        "swap out 64 blocks, pool of 131,072": (
            None,
            find(old, "e_swap", "64 blocks, 131072 gpu"),
        ),
    }
    for row in rows:
        for name, pair in peers.items():
            if row.name.startswith(name):
                scale = 1e-6 if row.unit == "M/s" else 1e-3 if "hit" in row.name else 1.0
                row.vllm_033, row.vllm_063 = (x and x * scale for x in pair)


def chunk_128(new: dict[str, Any]) -> dict[str, Any]:
    pool = new.get("a_block_pool_131072", {})
    return {name: value for name, value in pool.items() if "chunk=128" in name}


# --- the table ----------------------------------------------------------------------------------


def print_table(rows: list[Row], memory: dict[str, float], peers: dict[str, Any]) -> None:
    heads = ("cpu min", "cpu med", "wall min", "wall med", "0.33", "0.6.3", "x 0.33", "x 0.6.3")
    print(f"{'':42} {'':4}", *(f"{head:>9}" for head in heads), " wanted")
    for row in rows:
        figures = [row.cpu_min, row.cpu_median, row.wall_min, row.wall_median]
        theirs = (row.vllm_033, row.vllm_063)
        cells = [f"{x:9.3f}" for x in figures]
        cells += [" " * 9 if x is None else f"{x:9.3f}" for x in theirs]
        for x in theirs:
            better = x and (row.cpu_median / x if row.unit == "M/s" else x / row.cpu_median)
            cells.append(f"{better:9.1f}" if better else " " * 9)
        print(f"{row.name:42} {row.unit:4}", *cells, f" {row.wanted}")
    print(
        f"memory, {NUM_BLOCKS:,} blocks of cached content: {memory['process_mb']:.0f} MB in all, "
        f"{memory['bytes_per_block']:.0f} bytes per block "
        f"({memory['bytes_per_empty_block']:.0f} when empty); wanted <= 250 MB"
    )
    for name, key in (("0.33", "v033"), ("0.6.3", "v063")):
        if megabytes := peers.get(key, {}).get("peak_rss_mib"):
            print(f"memory of vLLM {name}'s run, peak: {megabytes * 1.048576:.0f} MB")


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--peers", nargs=2, metavar=("DIR", "TOOL"), help="measure vLLM, too")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.memory:
        print(json.dumps(full_pool_memory()))
        return 0

    repeats = 3 if args.quick else 12
    rows: list[Row] = []
    parts = (allocators, hashing, decode, prefix_hit, sharing, growth)
    for part in tqdm(parts, unit="part", file=sys.stderr):
        rows += part(repeats)
    command = [sys.executable, str(Path(__file__).resolve()), "--memory"]
    memory = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    peers = peer_figures(args.peers[0], args.peers[1], args.quick) if args.peers else {}
    add_peers(rows, peers)
    print_table(rows, memory, peers)
    if args.json:
        report = {"rows": [asdict(row) for row in rows], "memory": memory, "peers": peers}
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
