"""The pool of vLLM 0.33 on prompts, for `prefix_policies --peers`.

In a process of its own, since it loads a package under vLLM's name: prompts as JSON on stdin, hit
tokens on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

from bench.records import BenchError

BLOCK_SIZE = 16
ROOT = Path(__file__).resolve().parents[1]


def in_own_process(prompts: list[list[int]], num_blocks: int, folder: Path, tool: Path) -> int:
    """Hit tokens of all prompts."""
    command = [sys.executable, "-m", __name__, str(num_blocks), str(tool.resolve())]
    environment = {**os.environ, "PEERS": str(folder.resolve())}
    done = subprocess.run(
        command, input=json.dumps(prompts), env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"vLLM's pool failed: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def hit_tokens(prompts: list[list[int]], num_blocks: int, tool: str) -> int:
    """By the real code of the release, as `tool` finds it under $PEERS."""
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
    total = 0
    for name, tokens in enumerate(prompts):
        request = Request(str(name), tokens, peer._SP(), None, block_hasher=hasher)
        blocks, num_hits, _ = manager.get_computed_blocks(request)
        total += num_hits
        new = request.num_tokens - num_hits
        allocated = manager.allocate_slots(request, new, num_hits, blocks, has_scheduled_reqs=False)
        assert allocated is not None
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    return total


if __name__ == "__main__":
    print(hit_tokens(json.load(sys.stdin), int(sys.argv[1]), sys.argv[2]))
