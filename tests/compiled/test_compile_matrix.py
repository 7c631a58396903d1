"""Every kernel compiles for every target, over all pairs of dtypes, sizes and options, unspilled.

The launches are the backend's own: its plan for a batch, compiled instead of run.
"""

import pytest
import torch
from paged_kernels import aot
from paged_kernels._heuristics import planned_for
from paged_kernels.testing import make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write
from pairwise import pairwise

from bench.machine_code import Cubin, amd_usage

FACTORS = {
    "target": tuple(aot.DEVICES),
    "query_lens": ([1, 1], [40, 40], [1, 40]),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_dims": ((128, 128), (64, 64), (16, 16), (80, 80), (192, 128), (256, 256)),
    "group_size": (4, 1, 6, 8, 16, 32),
    "block_size": (16, 1, 17, 256),
    "cache_dtype": (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    "causal": (True, False),
    "sliding_window": (None, 20),
    "softcap": (None, 30.0),
    "bias": (None, "alibi_slopes", "sinks", "draft_mask"),
    "splits": ({}, {"num_splits": 4}, {"split_size": 64}),
    "common_prefix": (0, 256),
    "index_dtype": (torch.int32, torch.int64),
}


def allowed(case):
    e4m3_on_ampere = (
        case.get("cache_dtype") == torch.float8_e4m3fn and case.get("target") == "sm_80"
    )
    return not e4m3_on_ampere


CASES = pairwise(FACTORS, allowed=allowed)


def name(case):
    kinds = (case["dtype"], case["cache_dtype"] or "same")
    dtypes = "-".join(str(kind).removeprefix("torch.") for kind in kinds)
    dims = "x".join(map(str, case["head_dims"]))
    return f"{case['target']}-{dtypes}-{dims}-g{case['group_size']}-b{case['block_size']}"


def launches_of(case):
    """The launches of one attention call and of one write."""
    heads, width = 2 * case["group_size"], max(case["query_lens"])
    batch = make_batch(
        [300, 400],
        case["query_lens"],
        num_heads=heads,
        num_kv_heads=2,
        head_dim=case["head_dims"][0],
        head_dim_v=case["head_dims"][1],
        block_size=case["block_size"],
        dtype=case["dtype"],
        cache_dtype=case["cache_dtype"],
        shared_blocks=case["common_prefix"] // case["block_size"],
        index_dtype=case["index_dtype"],
    )
    common = case["common_prefix"] // case["block_size"] * case["block_size"]
    extras = {
        None: {},
        "alibi_slopes": {"alibi_slopes": torch.ones(heads)},
        "sinks": {"sinks": torch.ones(heads)},
        "draft_mask": {"draft_mask": torch.ones(2, width, width, dtype=torch.bool)},
    }
    call = validated_call(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        causal=case["causal"],
        sliding_window=case["sliding_window"],
        softcap=case["softcap"],
        common_prefix_len=common or None,
        return_lse=case["causal"],
        **case["splits"],
        **extras[case["bias"]],
    )
    key = torch.zeros(3, 2, case["head_dims"][0], dtype=case["dtype"])
    value = torch.zeros(3, 2, case["head_dims"][1], dtype=case["dtype"])
    slots = torch.arange(3, dtype=case["index_dtype"])
    scales = (call.k_scale, call.v_scale)
    return [*plan(call), plan_write(key, value, call.key_cache, call.value_cache, slots, *scales)]


@pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
def test_launches_compile_without_spilling(case):
    target = case["target"]
    device = aot.DEVICES[target]
    with planned_for(device):
        launches = launches_of(case)
    for launch in launches:
        kernel = aot.compiled(launch, target)  # raises when the code is for another target
        used = kernel.metadata.shared
        assert used <= device.shared_memory
        tile = launch.constants.get("TILE")
        if tile is not None:
            assert used <= tile.shared_memory, "the estimate must be an upper bound"
        if device.backend == "hip":
            spilled = amd_usage(kernel)["spilled"]
        else:
            spilled = Cubin(kernel).spilled_bytes
        if max(case["head_dims"]) <= 128:
            assert spilled == 0, f"{launch.kernel.__name__} {tile}"


def test_the_matrix_stays_small():
    assert sum(len(launches_of(case)) for case in CASES) <= 300
