"""Compile kernels for a GPU that is not there: what a launch costs, read from its machine code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ._heuristics import KIB, Device
from ._launch import Launch

DEVICES = {
    "sm_80": Device("cuda", 80, 108, 163 * KIB),
    "sm_90": Device("cuda", 90, 132, 227 * KIB),
    "sm_100": Device("cuda", 100, 148, 227 * KIB),
    "gfx942": Device("hip", 942, 304, 64 * KIB),
}


class _TargetDriver:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self.number, self.target = number, target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def target(name: str) -> Iterator[GPUTarget]:
    """Make a GPU of DEVICES Triton's target inside the `with` block."""
    device = DEVICES[name]
    cuda = device.backend == "cuda"
    gpu = GPUTarget("cuda", device.arch, 32) if cuda else GPUTarget("hip", name, 64)
    # Triton keeps compiled kernels by device number: each target needs one of its own.
    driver = _TargetDriver(1000 + list(DEVICES).index(name), gpu)
    try:
        before = triton.runtime.driver.active
    except RuntimeError:  # no GPU here
        before = driver
    triton.runtime.driver.set_active(driver)
    try:
        yield gpu
    finally:
        triton.runtime.driver.set_active(before)


def compiled(launch: Launch, name: str) -> Any:
    """The launch's kernel compiled for DEVICES[name], with metadata and asm (ptx, cubin, ...).

    Needs a process without TRITON_INTERPRET. RuntimeError when the code is for another target.
    """
    with target(name) as gpu:
        kernel = launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
    if kernel.metadata.target != gpu:
        raise RuntimeError(f"compiled for {kernel.metadata.target}, wanted {gpu}")
    return kernel
