"""Combine attention over disjoint sets of keys into attention over all of them.

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), a whole part at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """Attention over some keys. A row that saw none: 0 and -inf."""

    out: Tensor  # [num_tokens, num_heads, head_dim_v]
    lse: Tensor  # float32 [num_tokens, num_heads]


def merge_two(a: State, b: State) -> State:
    """Their union, in float32. Its own neutral element comes out bit for bit."""
    weight = torch.sigmoid(b.lse - a.lse).nan_to_num_(0.0)  # -inf - -inf: no key in either
    out = torch.lerp(a.out.float(), b.out.float(), weight[..., None])
    return State(out, torch.logaddexp(a.lse, b.lse))


def merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial results of the same queries over disjoint keys.

    Args:
        outs: one or more `[num_tokens, num_heads, head_dim_v]` tensors.
        lses: as many `[num_tokens, num_heads]` tensors, natural logarithm, -inf where the part saw
            no key; what `outs` holds there is ignored.

    Returns:
        `out` in the dtype of `outs[0]` and `lse` in float32. Rows without any key: 0 and -inf.

    Raises:
        ValueError: no parts, or parts that do not match in number, shape or device.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            "outs and lses must hold equally many parts, at least one, "
            f"got {len(outs)} outs and {len(lses)} lses"
        )
    shape, device = outs[0].shape, outs[0].device
    merged: State | None = None
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dim() != 3 or out.shape != shape or lse.shape != shape[:2]:
            raise ValueError(
                f"part {i} must be out [num_tokens, num_heads, head_dim_v] = {list(shape)} and lse "
                f"{list(shape[:2])} like part 0, got {list(out.shape)} and {list(lse.shape)}"
            )
        if out.device != device or lse.device != device:
            raise ValueError(f"part {i} must be on {device}, got {out.device} and {lse.device}")
        part = State(out.masked_fill(lse[..., None] == float("-inf"), 0.0), lse.float())
        merged = part if merged is None else merge_two(merged, part)
    assert merged is not None
    return merged.out.to(outs[0].dtype), merged.lse
