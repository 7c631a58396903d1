"""What a quantised cache stores, in plain torch: the meaning on which every backend agrees.

fp8 keeps one scale per tensor or per KV head, which the caller chooses; int8 keeps one scale per
(slot, head), which the write finds. Stored = round-to-nearest-even(float32(x) / scale), saturated;
real = stored * scale. NaN stays NaN: in the byte for fp8, in the scale for int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISED_DTYPES = (*FP8_DTYPES, torch.int8)


def quantise_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """`x` [..., num_kv_heads, head_dim] as fp8; `scale` a float or float32 [num_kv_heads]."""
    # A tensor divisor on x's device: by a Python number, torch on a GPU multiplies by 1 / scale.
    divisor = torch.full((1,), scale, device=x.device) if isinstance(scale, float) else scale
    limit = torch.finfo(dtype).max
    return (x.float() / divisor[:, None]).clamp(-limit, limit).to(dtype)


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [..., head_dim] as int8, and its float32 scale [...]: absmax / 127, or 1.0 where that is 0."""
    x = x.float()
    scale = x.abs().amax(-1) / torch.full((1,), 127.0, device=x.device)
    scale = torch.where(scale == 0, 1.0, scale)
    return round_to_int8(x / scale[..., None]), scale


def round_to_int8(x: Tensor) -> Tensor:
    """Nearest int8, ties to even, saturated."""
    return x.round().clamp(-128, 127).to(torch.int8)
