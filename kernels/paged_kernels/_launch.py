"""Kernel launches as data: planned in one place, then run, compiled ahead of time, or described."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Strided(NamedTuple):
    """A tensor and its strides, as one kernel argument."""

    ptr: Tensor
    strides: tuple[int, ...]


def strided(x: Tensor) -> Strided:
    return Strided(x, x.stride())


class Launch(NamedTuple):
    """One kernel, its grid and all of its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    device: torch.device
    num_warps: int = 4
    num_stages: int = 3

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch: compile-time constants and compiler options."""
        # Contraction to fused multiply-add is asked for by name: Triton's default is changing.
        compiler = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**self.constants, **compiler, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch on the device that owns the tensors, whichever device is current."""
        if 0 in self.grid:
            return
        for launches in _recorders:
            launches.append(self)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.kernel[self.grid](*self.args, **self.options)
        else:
            self.kernel[self.grid](*self.args, **self.options)


_recorders: list[list[Launch]] = []


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches made inside the `with` block, in order."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)
