"""Memory of a full pool, in a process that holds nothing else: see `block_manager`."""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
from pathlib import Path

from bench.block_manager_works import BLOCK_SIZE, admitted, manager_of, random_tokens


def full_pool_memory(num_blocks: int) -> dict[str, float]:
    """Resident bytes per block of an empty pool, and of one in which every block is cached."""
    before = _resident()
    manager = manager_of(num_blocks)
    empty = _resident()
    rng = random.Random(6)
    for name in range(num_blocks // 256):
        manager.free(admitted(manager, name, random_tokens(rng, 256 * BLOCK_SIZE)))
    assert manager.stats().gpu.num_cached == num_blocks
    gc.collect()
    total = _resident()
    return {
        "memory per block when empty": (empty - before) / num_blocks,
        "memory per block of cached content": (total - before) / num_blocks,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(full_pool_memory(int(sys.argv[1]))))
