"""Memory that a kernel should have written and did not shows up as NaN."""

import pytest
import torch


def _poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """torch.empty and its kin return NaN, or the largest integer, in place of old memory."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
