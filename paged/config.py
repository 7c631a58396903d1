"""How large a KV cache is and how its blocks are managed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from reprlib import repr as shortened
from typing import Any

HashFn = Callable[[bytes], bytes]

FREE_ORDERS = ("fifo", "first_fit")

_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_SCALE_BYTES = 4  # int8 caches keep one float32 scale per token and head


@dataclass(frozen=True)
class CacheConfig:
    """Settings of one `BlockSpaceManager`.

    block_size             token slots per block
    num_gpu_blocks         blocks of the GPU pool; None until `sized` has counted them
    num_cpu_blocks         blocks of the CPU pool that sequences are swapped to
    gpu_memory_utilization share of the device's memory that may be used in all (0..1]
    enable_prefix_caching  share full blocks of equal prefixes between sequences
    max_cached_blocks      most unreferenced blocks that keep their content; None: all
    free_order             "fifo" (reuse the block that is free longest) or "first_fit" (lowest id)
    watermark              share of the pool that admission leaves free while anything runs [0..1)
    sliding_window         tokens that a query may see, itself included; None: all
    hash_fn                bytes -> digest of a block; None: 128-bit xxhash
    hash_seed              makes digests equal across managers; None: random per manager
    """

    block_size: int = 16
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int = 0
    gpu_memory_utilization: float = 0.90
    enable_prefix_caching: bool = True
    max_cached_blocks: int | None = None
    free_order: str = "fifo"
    watermark: float = 0.01
    sliding_window: int | None = None
    hash_fn: HashFn | None = None
    hash_seed: int | None = None

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, minimum=1)
        check_int("num_gpu_blocks", self.num_gpu_blocks, minimum=1, optional=True)
        check_int("num_cpu_blocks", self.num_cpu_blocks, minimum=0)
        check_int("max_cached_blocks", self.max_cached_blocks, minimum=0, optional=True)
        check_int("sliding_window", self.sliding_window, minimum=1, optional=True)
        check_int("hash_seed", self.hash_seed, minimum=None, optional=True)
        _check_fraction("gpu_memory_utilization", self.gpu_memory_utilization, above_zero=True)
        _check_fraction("watermark", self.watermark, below_one=True)
        if not isinstance(self.enable_prefix_caching, bool):
            raise TypeError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be True or False"
            )
        if self.free_order not in FREE_ORDERS:
            raise ValueError(f"free_order is {self.free_order!r}; it must be one of {FREE_ORDERS}")
        if self.hash_fn is not None and not callable(self.hash_fn):
            raise TypeError(f"hash_fn is {self.hash_fn!r}; it must be a function bytes -> bytes")

    def sized(self, free_bytes: int, total_bytes: int, bytes_per_block: int) -> CacheConfig:
        """The same settings with `num_gpu_blocks` set to what fits (`num_blocks_that_fit`)."""
        num_blocks = num_blocks_that_fit(
            free_bytes, total_bytes, self.gpu_memory_utilization, bytes_per_block
        )
        return replace(self, num_gpu_blocks=num_blocks)


def block_bytes(
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    num_layers: int = 1,
    head_dim_v: int | None = None,
) -> int:
    """Bytes of one block: its K and V slots in `num_layers` layers.

    dtype: a torch dtype or its name ("float16"). int8 counts the float32 scales it needs, one
    per token and head for K and for V.
    """
    check_int("block_size", block_size, minimum=1)
    check_int("num_kv_heads", num_kv_heads, minimum=1)
    check_int("head_dim", head_dim, minimum=1)
    check_int("num_layers", num_layers, minimum=1)
    check_int("head_dim_v", head_dim_v, minimum=1, optional=True)
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEM_BYTES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(_ITEM_BYTES)}")
    width = head_dim + (head_dim if head_dim_v is None else head_dim_v)
    scales = 2 * _SCALE_BYTES if name == "int8" else 0
    return num_layers * block_size * num_kv_heads * (width * _ITEM_BYTES[name] + scales)


def num_blocks_that_fit(
    free_bytes: int, total_bytes: int, gpu_memory_utilization: float, bytes_per_block: int
) -> int:
    """Blocks that fit: floor((free - total * (1 - utilization)) / bytes_per_block).

    What is not free is used by somebody, this process or another; `1 - utilization` of the whole
    device stays untouched on top of that. ValueError, with the numbers, when not one block fits.
    """
    check_int("free_bytes", free_bytes, minimum=0)
    check_int("total_bytes", total_bytes, minimum=1)
    check_int("bytes_per_block", bytes_per_block, minimum=1)
    _check_fraction("gpu_memory_utilization", gpu_memory_utilization, above_zero=True)
    if free_bytes > total_bytes:
        raise ValueError(f"free_bytes is {free_bytes}, more than total_bytes {total_bytes}")
    # Exact arithmetic on the decimal that was written: 1 - 0.7 in binary is a little above 0.3.
    untouched = total_bytes * (1 - Fraction(str(gpu_memory_utilization)))
    num_blocks = int((free_bytes - untouched) // bytes_per_block)
    if num_blocks < 1:
        raise ValueError(
            f"no block fits: free_bytes {free_bytes} of total_bytes {total_bytes} at "
            f"gpu_memory_utilization {gpu_memory_utilization} leaves "
            f"{int(free_bytes - untouched)} bytes, one block takes {bytes_per_block}"
        )
    return num_blocks


def check_int(name: str, value: Any, *, minimum: int | None, optional: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless `value` is such an int."""
    if value is None and optional:
        return
    wanted = "an int" if minimum is None else f"an int >= {minimum}"
    wanted += " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be {wanted}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} is {value}; it must be {wanted}")


def check_threads(threads: Any, *, optional: bool = False) -> None:
    """Raise TypeError or ValueError unless torch can be given so many threads here."""
    check_int("threads", threads, minimum=1, optional=optional)
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ValueError(f"threads is {threads}; this machine has {cores} cores")


def is_cpu(device: str) -> bool:
    """Whether a device by that name is the CPU, "cpu:0" included."""
    return device.split(":")[0] == "cpu"


def check_kind(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raise TypeError, naming the argument, unless `value` is of that class."""
    if not isinstance(value, kind) and not (value is None and optional):
        wanted = f"a {kind.__name__}" + (" or None" if optional else "")
        raise TypeError(f"{name} is {shortened(value)}; it must be {wanted}")


def _check_fraction(
    name: str, value: Any, *, above_zero: bool = False, below_one: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not 0 <= value <= 1 or (above_zero and value == 0) or (below_one and value == 1):
        low, high = "(" if above_zero else "[", ")" if below_one else "]"
        raise ValueError(f"{name} is {value}; it must be in {low}0, 1{high}")
