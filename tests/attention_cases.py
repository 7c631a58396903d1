"""What the kernel tests and the support table run over."""

from __future__ import annotations

import torch
from paged_kernels._backends import UNSUPPORTED

BACKENDS = ("reference", "torch", "triton")
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def refuses(backend: str, option: str) -> bool:
    """Whether `backend` raises for `option`; the tests then ask for the error instead."""
    return option in UNSUPPORTED[backend]


def serving(option: str) -> list[str]:
    """The backends that honour `option`."""
    return [backend for backend in BACKENDS if not refuses(backend, option)]
