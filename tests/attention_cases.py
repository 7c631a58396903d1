"""What the kernel tests and the support table run over."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from paged_kernels.testing import PagedBatch, make_batch
from pairwise import pairwise

BACKENDS = ("reference", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PHASES = ("decode", "split decode", "prefill", "mixed")

# The options of paged_attention: off first, then as the tests turn them on.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (True, False),
    "sliding_window": (None, 5),
    "softcap": (None, 3.0),
    "alibi_slopes": (None, "per head"),
    "sinks": (None, "per head"),
    "scale": (None, "1.5 x default"),
    "common_prefix_len": (None, "whole blocks"),
    "draft_mask": (None, "a tree"),
    "return_lse": (False, True),
    "quantised cache": (None, *QUANTISED),
}
SIZES: dict[str, tuple[Any, ...]] = {
    "splits": ({"num_splits": 3}, {"num_splits": 8}, {"split_size": 16}, {}),
    "dtype": DTYPES,
    "head dims": (
        *((width, width) for width in (16, 32, 64, 80, 96, 112, 128, 192, 256)),
        (192, 128),
        (80, 16),
        (32, 64),
    ),
    "group_size": (1, 3, 5, 6, 7, 8, 12, 16, 20),
    "block_size": (1, 2, 8, 16, 17, 32, 64, 128, 256, 784),
    "layout": ("nhd", "hnd", "interleaved", "packed"),
    "fused_query": (False, True),
    "index_dtype": (torch.int32, torch.int64),
    "filler": (float("nan"), float("inf"), 1000.0),
}


def is_on(case: dict[str, Any], option: str) -> bool:
    """Whether the case turns the option on."""
    return case[option] != OPTIONS[option][0]


@cache
def matrix() -> list[dict[str, Any]]:
    """Every pair of settings, and every pair of options in every phase."""
    factors = {"phase": PHASES, **OPTIONS, **SIZES}
    triples = [("phase", *pair) for pair in itertools.combinations(OPTIONS, 2)]
    return pairwise(factors, allowed=_allowed, triples=triples)


def batch_of(case: dict[str, Any]) -> tuple[PagedBatch, dict[str, Any]]:
    """The batch of a case, and the options to attend with."""
    head_dim, head_dim_v = case["head dims"]
    block_size, num_heads = case["block_size"], 2 * case["group_size"]
    seq_lens, query_lens = _lengths(case)
    prefix = 0
    if case["common_prefix_len"]:  # at least one tile of keys
        prefix = 16 if case["dtype"] == torch.float32 else 128
        prefix = -(-prefix // block_size) * block_size
    if prefix and query_lens is None:  # no query may lie before the prefix
        seq_lens = [max(1, seq_len) for seq_len in seq_lens]
    batch = make_batch(
        [prefix + seq_len for seq_len in seq_lens],
        query_lens,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_size=block_size,
        dtype=case["dtype"],
        cache_dtype=case["quantised cache"],
        layout=case["layout"],
        fused_query=case["fused_query"],
        filler=case["filler"],
        padding_rows=2 if case["phase"] == "mixed" else 0,
        shared_blocks=prefix // block_size,
        index_dtype=case["index_dtype"],
    )
    options = {name: case[name] for name in ("causal", "sliding_window", "softcap")}
    options |= {"return_lse": case["return_lse"], **case["splits"]}
    if block_size >= 32:  # the table is far wider than the sequences are long
        options["max_seq_len"] = int(batch.seq_lens.max())
    if case["scale"]:
        options["scale"] = 1.5 * head_dim**-0.5
    if prefix:
        options["common_prefix_len"] = prefix
    if case["alibi_slopes"]:
        options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, num_heads)
    if case["sinks"]:
        options["sinks"] = torch.linspace(-1, 3, num_heads)
    if case["draft_mask"]:
        side = max(query_lens or [1])
        generator = torch.Generator().manual_seed(0)
        tree = torch.rand(len(seq_lens), side, side, generator=generator) < 0.5
        options["draft_mask"] = tree | torch.eye(side).bool()
    return batch, options


def _lengths(case: dict[str, Any]) -> tuple[list[int], list[int] | None]:
    """Of the sequences and of their queries, one of them too long for a decode tile of 16 rows."""
    longest = 16 // case["group_size"] + 3
    match case["phase"]:
        case "prefill":
            return [3, longest + 6], [3, longest]
        case "mixed":
            return [21, longest + 5, 3, 1], [1, longest, 0, 1]
        case _:
            return [1, 40, 0, 19], None


def _allowed(case: dict[str, Any]) -> bool:
    if case.get("block_size") == 784 and case.get("common_prefix_len"):
        return False  # minutes in the interpreter, and no other path than 256
    if case.get("layout") == "interleaved":
        head_dim, head_dim_v = case.get("head dims", (0, 0))
        if head_dim != head_dim_v:
            return False
    if case.get("phase") == "split decode":
        return case.get("splits") != {}
    return True
