"""The figures of vLLM's block managers beside ours, for `block_manager --peers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.records import BenchError, Record

Peers = dict[str, Any]  # what TOOL prints: {"v033": ..., "v063": ...}
POOL = ("a_block_pool", "caching=False,chunk=128")
EVICTING = ("a_block_pool_131072", "every block hashed", "chunk=128", "get_new_blocks", "blocks/s")
STEP_033 = ("c_kvcachemanager", "caching=True xxhash", "decode_ms_per_step_total_median")
STEP_063 = ("c_block", "V2 prefix_caching", "decode_ms_per_step_total_median")

# Start of our record's name -> where 0.33 and 0.6.3 have the like, and how to turn it into our unit.
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "allocate, chunks": (
        (*POOL, "get_new_blocks", "blocks/s"),
        ("a_allocators", "naive", "allocate_mutable", "blocks/s"),
        1e-6,
    ),
    "free, chunks": (
        (*POOL, "free_blocks", "blocks/s"),
        ("a_allocators", "naive", "free", "blocks/s"),
        1e-6,
    ),
    "allocate, evicting": (
        EVICTING,
        ("a_allocators", "prefix_caching", "allocate_mutable", "blocks/s"),
        1e-6,
    ),
    "hash a": (("b_hashing", "xxhash", "tokens/s"), (), 1e-6),
    "step, 256 sequences of": (STEP_033, STEP_063, 1.0),
    "single calls": (STEP_033, STEP_063, 1.0),
    "look up a 2,048": (("d_prefix_hit", "get_computed_blocks us"), (), 1e-3),
    "allocate a 2,048": (
        ("d_prefix_hit", "warm allocate_slots"),
        ("d_prefix_hit", "warm allocate"),
        1e-3,
    ),
    "swap out 64 blocks, pool of 4,096": ((), ("e_swap", "64 blocks, 4096 gpu"), 1.0),
    "swap out 64 blocks, pool of 32,768": ((), ("e_swap", "64 blocks, 32768 gpu"), 1.0),
    "swap out 64 blocks, pool of 131,072": ((), ("e_swap", "64 blocks, 131072 gpu"), 1.0),
}


def peer_figures(folder: Path, tool: Path, quick: bool) -> Peers:
    """Run the tool that drives the code of both releases."""
    command = [sys.executable, str(tool), *(["--quick"] if quick else [])]
    environment = {**os.environ, "PEERS": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BenchError(f"{tool} failed: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout))


def add_peers(records: list[Record], peers: Peers) -> None:
    """`vllm_033` and `vllm_063` in the records of the same work, in their units."""
    for record in records:
        if record["kind"] not in ("time", "rate"):
            continue
        for start, (new, old, scale) in PLACES.items():
            if record["name"].startswith(start):
                for name, release, place in (("vllm_033", "v033", new), ("vllm_063", "v063", old)):
                    found = _find(peers.get(release), place) if place else None
                    record[name] = found and found * scale


def _find(tree: Any, place: tuple[str, ...]) -> float | None:
    """Follow parts of keys: a key must hold all parts that are spelt of it."""
    if not isinstance(tree, dict):
        return None if place or tree is None else float(tree)
    for key, value in tree.items():
        used = 0
        while used < len(place) and place[used] in key:
            used += 1
        if used and (found := _find(value, place[used:])) is not None:
            return found
    return None
