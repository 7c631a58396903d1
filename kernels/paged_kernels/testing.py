"""Hostile inputs and honest tolerances, for tests, bench and notebooks.

`make_batch` builds what a server would pass, and makes it unforgiving: blocks at random places,
every slot that no token owns poisoned, table tails full of ids that must not be followed, guard
bands around the caches. `assert_matches_reference` runs a backend on it and grants the error that
the same sums make when written plainly in the same precision, times a factor: no tolerance is
picked by hand. (The idea of such a budget is attention-gym's.)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ._checks import check_attention
from ._guards import GUARD, check_guard, guarded_empty, poison
from ._quantise import QUANTISED_DTYPES
from ._testing_batch import STALE_IDS, Layout, PagedBatch, make_batch
from .api import paged_attention
from .options import AttentionCall
from .reference import dense_attend

__all__ = [
    "ERROR_FACTOR",
    "FLOAT32_ERROR",
    "GUARD",
    "STALE_IDS",
    "Layout",
    "PagedBatch",
    "assert_close",
    "assert_matches_reference",
    "check_guard",
    "guarded_empty",
    "make_batch",
    "poison",
    "validated_call",
]

ERROR_FACTOR = 1.5  # times the largest error of eager sums in the same precision
FLOAT32_ERROR = 2e-6  # times the largest value: granted to any float32 accumulation


def validated_call(**arguments: Any) -> AttentionCall:
    """The call that a backend would get for these arguments of `paged_attention`."""
    bound = inspect.signature(paged_attention).bind(**arguments)
    bound.apply_defaults()
    return check_attention(**{**bound.arguments, "backend": "reference"})[0]


def assert_close(
    actual: Tensor, exact: Tensor, eager: Tensor, what: str = "output", granted: float = 0.0
) -> None:
    """`actual` errs at most as `eager` does, times ERROR_FACTOR, and by its own rounding.

    Args:
        actual: what a backend computed, any dtype.
        exact: the same in float64; infinities must be met exactly.
        eager: the same, computed plainly in the precision that `actual` was computed in.
        what: is compared, for the message.
        granted: an absolute error that is allowed in any case.
    """
    finite = exact.isfinite()
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, want {exact.shape}"
    assert not actual.isnan().any(), f"{what}: {int(actual.isnan().sum())} NaN"
    odd = actual.double()[~finite]
    assert torch.equal(odd, exact[~finite]), f"{what}: {odd}, want {exact[~finite]}"
    exact, got = exact[finite], actual.double()[finite]
    if exact.numel() == 0:
        return
    eager_error = float((eager.double()[finite] - exact).abs().max())
    least = FLOAT32_ERROR * float(exact.abs().max())
    # One unit in the last place: the interpreter truncates where a GPU rounds.
    rounding = torch.finfo(actual.dtype).eps * exact.abs()
    bound = max(ERROR_FACTOR * eager_error, least, granted) + rounding
    excess = (got - exact).abs() - bound
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{what}: error {float((got - exact).abs()[worst]):.3g} where {float(bound[worst]):.3g} "
        f"is granted: got {float(got[worst]):.9g}, want {float(exact[worst]):.9g}"
    )


def assert_matches_reference(
    batch: PagedBatch, backend: str, *, return_lse: bool = True, **options: Any
) -> None:
    """Run `backend` into guarded, poisoned outputs and compare output and lse."""
    shape = (*batch.query.shape[:2], batch.value_cache.shape[3])
    out = guarded_empty(shape, batch.query.dtype, batch.query.device, row_gap=GUARD)
    arguments = batch.arguments(**options)
    got = paged_attention(**arguments, out=out, return_lse=return_lse, backend=backend)
    assert (got[0] if return_lse else got) is out

    call = validated_call(**arguments)
    exact, exact_lse = dense_attend(call, torch.float64)
    eager, eager_lse = dense_attend(call, batch.query.dtype)
    if batch.key_cache.dtype not in QUANTISED_DTYPES:  # products of 16-bit numbers are exact
        _, eager_lse = dense_attend(call, torch.float32)
    assert_close(out, exact, eager)
    if return_lse:
        # An error of lse is a relative error of a merged part: well below the output's rounding.
        granted = max(FLOAT32_ERROR, torch.finfo(batch.query.dtype).eps / 16)
        assert_close(got[1], exact_lse, eager_lse, "lse", granted)
    check_guard(out)
    batch.check_guards()
