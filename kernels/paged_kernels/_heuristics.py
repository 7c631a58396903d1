"""From sizes and a device to tile shapes and split counts: plain functions, no tuning at call time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

from .options import Dims

KIB = 1024


@dataclass(frozen=True)
class Device:
    """What the heuristics know of a GPU. `shared_memory` is the most that one program may take."""

    backend: str  # "cuda" or "hip"
    arch: int  # compute capability 80, 90, ...; 942 for gfx942
    num_sms: int
    shared_memory: int  # bytes


H200 = Device("cuda", 90, 132, 227 * KIB)


@dataclass(frozen=True)
class Tile:
    """The work of one program step, and how it is compiled. d and dv are padded head widths."""

    m: int  # query rows: tokens x heads of the group
    n: int  # keys
    d: int
    dv: int
    num_warps: int
    num_stages: int
    shared_memory: int  # bytes, estimated from above


@lru_cache
def device_of(device: torch.device) -> Device:
    """The limits of a GPU; of an H200 for CPU tensors, where kernels run in the interpreter."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = int("".join(c for c in properties.gcnArchName.split(":")[0] if c.isdigit()))
        return Device("hip", arch, properties.multi_processor_count, 64 * KIB)
    capability = properties.major * 10 + properties.minor
    shared_memory = properties.shared_memory_per_block_optin
    return Device("cuda", capability, properties.multi_processor_count, shared_memory)


def padded(width: int) -> int:
    """The next power of two, at least the 16 that a matrix instruction takes."""
    return max(16, 1 << (width - 1).bit_length())


# Prefill tiles (m, n, num_warps) for 16-bit values, by padded head width: the largest that neither
# spill nor starve; found by compiling (bench/static.py prints what they cost). Decode tiles follow
# from the group size and from 32 KiB of K and V per step.
_PREFILL = {
    "hopper": {128: (128, 64, 8), 256: (64, 32, 8)},
    "ampere": {128: (64, 32, 4), 256: (64, 32, 8)},
    "hip": {128: (64, 32, 8), 256: (64, 32, 8)},
}


@lru_cache
def tiles_for(dims: Dims, itemsize: int, device: Device) -> tuple[Tile, Tile]:
    """The tiles of decode and of prefill."""
    return choose_tile(False, dims, itemsize, device), choose_tile(True, dims, itemsize, device)


def choose_tile(prefill: bool, dims: Dims, itemsize: int, device: Device) -> Tile:
    """The tile for one phase. ValueError when not even the smallest fits in shared memory."""
    d, dv = padded(dims.head_dim), padded(dims.head_dim_v)
    width, rows = max(d, dv), padded(dims.group_size)
    if itemsize == 4:  # exact float32 runs without matrix units, in registers: small tiles
        m, n, num_warps = rows, 16, 4 if rows * width <= 16 * 128 else 8
    elif prefill:
        family = "hip" if device.backend == "hip" else "hopper" if device.arch >= 90 else "ampere"
        m, n, num_warps = _PREFILL[family][128 if width <= 128 else 256]
        m = max(m, rows)
    else:
        keys = 32 * KIB // ((d + dv) * itemsize)
        m, n = rows, max(16, min(128, 1 << (keys.bit_length() - 1)))
        num_warps = 2 if rows * width <= 16 * 128 else 4 if rows * width <= 64 * 128 else 8
    # Loads run ahead of use by the buffers that num_stages buys. The block table is loaded in the
    # same loop and takes stages up: 5 buys two buffers of K and V, 3 one (of wgmma operands two).
    depths = (1,) if device.backend == "hip" else (5, 3, 2)
    for keys in (n, n // 2, n // 4, n // 8):
        for num_stages in depths:
            buffers = 2 if num_stages == 5 else 1
            if prefill and device.arch >= 90 and itemsize < 4:
                buffers += 1
            need = _shared_memory(m, keys, d, dv, itemsize, buffers)
            if keys >= 16 and need <= device.shared_memory:
                return Tile(m, keys, d, dv, num_warps, num_stages, need)
    raise ValueError(
        f"head_dim={dims.head_dim}, head_dim_v={dims.head_dim_v} and {dims.group_size} query heads "
        f"per KV head need {need} bytes of shared memory in the smallest tile; "
        f"this device has {device.shared_memory}"
    )


def _shared_memory(m: int, n: int, d: int, dv: int, itemsize: int, buffers: int) -> int:
    """Bytes of shared memory, from above: staged K, V and block ids, the query, and reductions."""
    staged = buffers * n * ((d + dv) * itemsize + 8)
    loop = staged + m * (d + n) * itemsize + 4 * KIB
    epilogue = m * dv * 4
    return max(loop, epilogue)


def choose_num_splits(programs: int, max_keys: int, tile: Tile, device: Device) -> int:
    """Splits that fill the GPU with little waste in the last wave (after FlashAttention-2's rule).

    programs: unsplit ones; max_keys: keys of the longest sequence. A split has at least four tiles,
    so that storing and reading its partial result stays below 4 % of the traffic.
    """
    slots = device.num_sms * max(1, min(4, device.shared_memory // tile.shared_memory))
    most = min(max_keys // (4 * tile.n), slots // max(programs, 1))
    if most <= 1:
        return 1

    def efficiency(splits: int) -> float:
        waves = programs * splits / slots
        return waves / ceil(waves)

    best = max(efficiency(splits) for splits in range(1, most + 1))
    return next(s for s in range(1, most + 1) if efficiency(s) >= 0.85 * best)
