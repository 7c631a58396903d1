"""How many blocks there are, and what a configuration accepts."""

import dataclasses
import math
import random
from fractions import Fraction

import pytest
import torch
from manager_helpers import admit, make_manager

from paged import BlockSpaceManager, CacheConfig, block_bytes, num_blocks_that_fit

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "total", "utilization", "per_block", "want"),
    [
        (100, 100, 1.0, 10, 10),
        (100, 100, 0.9, 10, 9),
        (100, 100, 0.9, 91, None),
        (100, 100, 0.9, 90, 1),
        (60, 100, 0.9, 10, 5),  # another process holds 40: it counts against the 90 %
        (10, 100, 0.9, 1, None),  # used by others > total * utilization - nothing is left
        (5, 100, 0.9, 1, None),
        (11, 100, 0.9, 1, 1),
        (100, 100, 0.7, 10, 7),  # 1 - 0.7 in binary is a little above 0.3
        (80 * GIB, 80 * GIB, 0.9, 65536, 80 * GIB * 9 // 10 // 65536),
    ],
)
def test_blocks_that_fit(free, total, utilization, per_block, want):
    if want is None:
        with pytest.raises(ValueError) as caught:
            num_blocks_that_fit(free, total, utilization, per_block)
        for number in (free, total, per_block):
            assert str(number) in str(caught.value)
    else:
        assert num_blocks_that_fit(free, total, utilization, per_block) == want
        config = CacheConfig(gpu_memory_utilization=utilization).sized(free, total, per_block)
        assert config.num_gpu_blocks == want


def test_blocks_that_fit_is_the_formula_on_random_numbers():
    rng = random.Random(5)
    for _ in range(500):
        total = rng.randrange(1, 1 << 40)
        free = rng.randrange(0, total + 1)
        utilization = rng.choice([0.1, 0.5, 0.9, 0.95, 1.0, rng.random() or 1.0])
        per_block = rng.randrange(1, 1 << rng.randrange(1, 40))
        usable = free - total * (1 - Fraction(str(utilization)))
        want = math.floor(usable / per_block)
        if want < 1:
            with pytest.raises(ValueError, match=str(per_block)):
                num_blocks_that_fit(free, total, utilization, per_block)
        else:
            assert num_blocks_that_fit(free, total, utilization, per_block) == want


def test_sized_keeps_the_other_settings():
    config = CacheConfig(block_size=32, sliding_window=7, watermark=0.5)
    sized = config.sized(10 * GIB, 10 * GIB, 1 << 20)
    assert config.num_gpu_blocks is None
    assert sized == dataclasses.replace(config, num_gpu_blocks=sized.num_gpu_blocks)


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((16, 8, 128, torch.float16), {}, 65536),
        ((16, 8, 128, "float16"), {}, 65536),
        ((16, 8, 128, torch.float32), {}, 131072),
        ((16, 8, 128, torch.bfloat16), {"num_layers": 32}, 65536 * 32),
        ((16, 8, 128, torch.float8_e4m3fn), {}, 32768),
        ((16, 8, 128, "float8_e5m2"), {}, 32768),
        ((16, 1, 576, torch.float16), {"head_dim_v": 512}, 16 * (576 + 512) * 2),
        ((16, 8, 128, torch.int8), {}, 16 * 8 * (2 * 128 + 2 * 4)),
        ((1, 1, 16, "int8"), {"num_layers": 3}, 3 * (32 + 8)),
    ],
)
def test_block_bytes_count_k_v_layers_and_scale_planes(args, options, want):
    assert block_bytes(*args, **options) == want


@pytest.mark.parametrize("dtype", ["float15", torch.complex64, None, 2])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises((ValueError, TypeError), match="dtype"):
        block_bytes(16, 8, 128, dtype)


def test_a_manager_refuses_an_unsized_configuration():
    with pytest.raises(ValueError, match="num_gpu_blocks"):
        BlockSpaceManager(CacheConfig())


@pytest.mark.parametrize("block_size", [*range(1, 34), 48, 100, 255, 256, 784, 1024])
def test_every_block_size_that_is_accepted_works(block_size):
    manager = make_manager(4, block_size)
    seq = admit(manager, "a", range(block_size + 1))
    assert len(manager.block_table(seq)) == 2
    manager.step([seq], [1])
    manager.check_invariants()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("block_size", [0, -1, 1.5, "16", True, None]),
        ("num_gpu_blocks", [0, -1, 2.5, "9", True]),
        ("num_cpu_blocks", [-1, 0.5, None]),
        ("gpu_memory_utilization", [0, -0.1, 1.1, "0.9", float("nan"), None]),
        ("watermark", [-0.1, 1.0, 2, "0", float("nan")]),
        ("max_cached_blocks", [-1, 1.5]),
        ("sliding_window", [0, -1, 1.5]),
        ("free_order", ["lifo", None, 1]),
        ("enable_prefix_caching", [1, "no", None]),
        ("hash_fn", ["xxhash", 5]),
        ("hash_seed", ["x", 1.5]),
    ],
)
def test_a_bad_setting_is_refused_by_name(name, bad):
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=name):
            CacheConfig(**{name: value})


def test_a_configuration_is_frozen_and_has_the_documented_defaults():
    config = CacheConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8
    assert dataclasses.asdict(config) == {
        "block_size": 16,
        "num_gpu_blocks": None,
        "num_cpu_blocks": 0,
        "gpu_memory_utilization": 0.90,
        "enable_prefix_caching": True,
        "max_cached_blocks": None,
        "free_order": "fifo",
        "watermark": 0.01,
        "sliding_window": None,
        "hash_fn": None,
        "hash_seed": None,
    }
