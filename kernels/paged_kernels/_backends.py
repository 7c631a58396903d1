"""Which backend serves a call."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

import torch

BACKENDS = ("triton", "torch", "reference")


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """The backend's name for tensors on `device`; ValueError when it cannot serve them."""
    if backend is None:
        return "triton" if device.type != "cpu" and has_triton() else "torch"
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        if not has_triton():
            raise ValueError("backend='triton' needs the package triton, which is not installed")
        if device.type == "cpu" and not _interpreting():
            raise ValueError(
                "backend='triton' needs GPU tensors, got CPU tensors: use backend='torch', or set "
                "TRITON_INTERPRET=1 before triton is imported to run its kernels in the interpreter"
            )
    return backend


def backend_module(backend: str) -> ModuleType:
    """The module that holds `attend` and `reshape_and_cache`, imported when first chosen."""
    match backend:
        case "triton":
            from . import triton_backend

            return triton_backend
        case "torch":
            from . import torch_backend

            return torch_backend
        case _:
            from . import reference

            return reference


def debugging() -> bool:
    """Whether PAGED_DEBUG=1 asks for every value to be checked, on a GPU too."""
    return os.environ.get("PAGED_DEBUG") == "1"


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
