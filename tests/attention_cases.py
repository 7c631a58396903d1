"""What the kernel tests and the support table run over: backends, options and their settings."""

from __future__ import annotations

BACKENDS = ("reference", "torch", "triton")
