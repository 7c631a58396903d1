"""Combine attention over disjoint sets of keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial results of the same queries over disjoint keys.

    A part weighs `exp(lse - total)`, with `total` the log of the summed exponentials: the split
    softmax of online softmax (Milakov and Gimelshein, 2018), done once at the end.

    Args:
        outs: one or more `[num_tokens, num_heads, head_dim_v]` tensors.
        lses: as many `[num_tokens, num_heads]` tensors, natural logarithm, `-inf` where the part
            saw no key; what `outs` holds there is never read.

    Returns:
        `out` in the dtype of `outs[0]` and `lse` in float32. Rows without any key: 0 and `-inf`.

    Raises:
        ValueError: no parts, or parts that do not match in number, shape or device.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            "outs and lses must hold equally many parts, at least one, "
            f"got {len(outs)} outs and {len(lses)} lses"
        )
    shape, device = outs[0].shape, outs[0].device
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dim() != 3 or out.shape != shape or lse.shape != shape[:2]:
            raise ValueError(
                f"part {i}: out must be [num_tokens, num_heads, head_dim_v] = {list(shape)} and lse "
                f"{list(shape[:2])}, got {list(out.shape)} and {list(lse.shape)}"
            )
        if out.device != device or lse.device != device:
            raise ValueError(
                f"part {i}: out and lse must be on {device}, got {out.device} and {lse.device}"
            )

    total = torch.logsumexp(torch.stack([lse.float() for lse in lses]), dim=0)
    merged = torch.zeros(shape, dtype=torch.float32, device=device)
    for out, lse in zip(outs, lses, strict=True):
        empty = lse == float("-inf")
        weight = torch.exp(lse.float() - total).masked_fill(empty, 0.0)
        merged += weight[..., None] * out.float().masked_fill(empty[..., None], 0.0)
    return merged.to(outs[0].dtype), total
