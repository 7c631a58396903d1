"""Memory of a full pool, in a process that holds nothing else: see `block_manager`."""

from __future__ import annotations

import gc
import random
import resource
import sys
from pathlib import Path

from bench.block_manager_works import BLOCK_SIZE, admitted, manager_of, random_tokens


def full_pool_memory(num_blocks: int) -> float:
    """Resident bytes per block of a pool in which every block is cached content."""
    before = _resident()
    manager = manager_of(num_blocks)
    rng = random.Random(6)
    for name in range(num_blocks // 256):
        manager.free(admitted(manager, name, random_tokens(rng, 256 * BLOCK_SIZE)))
    assert manager.stats().gpu.num_cached == num_blocks
    gc.collect()
    return (_resident() - before) / num_blocks


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(full_pool_memory(int(sys.argv[1])))
