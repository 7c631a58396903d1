"""From sizes and a device to tile shapes and split counts: plain functions, no tuning at call time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
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
def _device_of(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    num_sms = properties.multi_processor_count
    if torch.version.hip:
        digits = (c for c in properties.gcnArchName.split(":")[0] if c.isdigit())
        return Device("hip", int("".join(digits)), num_sms, 64 * KIB)
    capability = properties.major * 10 + properties.minor
    limit = getattr(  # not in every torch
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return Device("cuda", capability, num_sms, limit)


_stand_in = H200


def device_of(device: torch.device) -> Device:
    """The limits of a GPU. CPU tensors, of the interpreter, get the tiles of an H200."""
    return _device_of(device) if device.type == "cuda" else _stand_in


@contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """Plan launches over CPU tensors as on another GPU, to compile or explain them."""
    global _stand_in  # noqa: PLW0603
    before, _stand_in = _stand_in, device
    try:
        yield
    finally:
        _stand_in = before


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def padded(width: int) -> int:
    """The width of a tile: a power of two, and at least the 16 of a matrix instruction."""
    return max(16, power_of_two(width))


# Prefill tiles (m, n, num_warps, buffers) of 16-bit queries, by family and padded head width, 0
# for a quantised cache: the largest that neither spill nor starve, found by compiling them
# (bench/static.py prints the cost).
_PREFILL = {
    ("hopper", 64): (128, 128, 8, 2),
    ("hopper", 128): (128, 64, 8, 2),
    ("hopper", 256): (64, 32, 8, 2),
    ("hopper", 0): (64, 32, 8, 2),
    ("ampere", 64): (64, 64, 4, 3),
    ("ampere", 128): (64, 32, 4, 3),
    ("ampere", 256): (64, 32, 8, 2),
    ("ampere", 0): (64, 32, 8, 3),
    ("hip", 64): (64, 32, 8, 0),
    ("hip", 128): (64, 32, 8, 0),
    ("hip", 256): (32, 32, 4, 0),
    ("hip", 0): (32, 32, 4, 0),
}

# num_stages that keep so many tiles of K and V in shared memory. The block table is loaded in the
# same loop and takes every other stage: at 3 and 4 each tile is waited for as soon as it is asked.
# AMD's pipeliner is another one, and no stage beyond the first has been tried on its hardware.
_STAGES = {0: 1, 1: 3, 2: 5, 3: 7}


@lru_cache
def tiles_for(dims: Dims, itemsize: int, quantised: bool, device: Device) -> tuple[Tile, Tile]:
    """The tiles of decode and of prefill, for queries of `itemsize` bytes."""
    arguments = (dims, itemsize, quantised, device)
    return choose_tile(False, *arguments), choose_tile(True, *arguments)


def choose_tile(prefill: bool, dims: Dims, itemsize: int, quantised: bool, device: Device) -> Tile:
    """The tile of one phase. ValueError when not even the smallest fits in shared memory."""
    d, dv = padded(dims.head_dim), padded(dims.head_dim_v)
    width, rows = max(d, dv), padded(dims.group_size)
    family = "hip" if device.backend == "hip" else "hopper" if device.arch >= 90 else "ampere"
    if itemsize == 4:  # exact float32 is computed without matrix units, in registers
        m, n, num_warps = rows, 16, 4 if rows * width <= 16 * 128 else 8
        buffers = 0 if quantised else 2
    elif prefill:
        wide = width > 128
        entry = 0 if quantised and not wide else 256 if wide else max(64, width)
        m, n, num_warps, buffers = _PREFILL[family, entry]
        if rows > m:
            m, num_warps = rows, 8
    else:
        keys = (32 if rows <= 64 else 16) * KIB // ((d + dv) * itemsize)
        m, n, buffers = rows, max(16, min(128, 1 << (keys.bit_length() - 1))), 2
        num_warps = 2 if rows * width <= 16 * 128 else 4 if rows * width <= 64 * 128 else 8
        if quantised:  # converting takes registers
            n, num_warps = min(n, 64 if width >= 128 else 32), max(4, num_warps)
    if family == "hip":
        buffers = 0
    # On a smaller device, fewer buffers first and then fewer keys.
    for keys, depth in itertools.product(
        (n, max(16, n // 2), 16), range(buffers, min(buffers, 1) - 1, -1)
    ):
        need = _shared_memory(m, keys, d, dv, itemsize, depth)
        if need <= device.shared_memory:
            return Tile(m, keys, d, dv, num_warps, _STAGES[depth], need)
    raise ValueError(
        f"head_dim {dims.head_dim} and {dims.head_dim_v} with {dims.group_size} query heads per KV "
        f"head need {need} bytes of shared memory in the smallest tile, got a device with "
        f"{device.shared_memory}"
    )


def _shared_memory(m: int, n: int, d: int, dv: int, itemsize: int, buffers: int) -> int:
    """Bytes of shared memory, from above."""
    query, tile, scores = m * d * itemsize, n * ((d + dv) * itemsize + 8), m * n * itemsize
    if buffers == 0:  # no pipeline: one tile at a time
        return tile + query + scores + 4 * KIB
    # wgmma reads its operands from shared memory, where one more tile rests meanwhile
    loop = (buffers + (m >= 64)) * tile + query + scores
    store = m * dv * 4
    return max(loop, store) + 4 * KIB


def choose_num_splits(
    programs: int, max_keys: int, group_size: int, tile: Tile, device: Device
) -> int:
    """Splits that fill the GPU, with little waste in the last wave (after FlashAttention-2's rule).

    programs: unsplit ones; max_keys: keys of the longest sequence. A split has at least four tiles,
    and more where more heads share them, so that writing and reading back its partial result stays
    below 5 % of the traffic.
    """
    slots = device.num_sms * max(1, min(4, device.shared_memory // tile.shared_memory))
    most = max(1, max_keys // (max(4, group_size) * tile.n))
    one_wave = max(1, slots // max(1, programs))
    best, most_efficient = 1, 0.0
    for splits in range(min(one_wave, most), min(one_wave + 3, most) + 1):
        waves = programs * splits / slots
        efficiency = waves / max(1, ceil(waves))
        if efficiency >= 0.85:
            return splits
        if efficiency > most_efficient:
            best, most_efficient = splits, efficiency
    return best
