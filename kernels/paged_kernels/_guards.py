"""Memory that shows what was written where it should not be, and read where nothing was written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._quantise import FP8_DTYPES

GUARD = 7  # exact in every dtype, fp8 included
_EDGE = 64


def poison(tensor: Tensor, filler: float = float("nan")) -> Tensor:
    """Fill with what no result may depend on: `filler`, as near as the dtype can hold it."""
    if tensor.dtype == torch.int8:
        filler = 127
    elif tensor.dtype in FP8_DTYPES:
        limit = torch.finfo(tensor.dtype).max
        filler = filler if filler != filler else min(filler, limit)
    return tensor.fill_(filler)


def guarded_empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    row_gap: int = 0,
) -> Tensor:
    """A NaN tensor inside a larger buffer of sevens: before, after, `row_gap` of them between rows."""
    *leading, width = shape
    size = math.prod(leading) * (width + row_gap)
    buffer = torch.full((_EDGE + size + _EDGE,), GUARD, dtype=dtype, device=device)
    view = buffer[_EDGE : _EDGE + size].view(*leading, width + row_gap)[..., :width]
    return poison(view)


def check_guard(view: Tensor) -> None:
    """AssertionError when anything around `view`, in the buffer it lies in, was written."""
    buffer = view.new_empty(0).set_(view.untyped_storage()).clone()
    buffer.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(GUARD)
    touched = int((buffer.float() != GUARD).sum())
    assert touched == 0, f"{touched} elements beside a tensor of shape {list(view.shape)} changed"
