"""Settings are checked where they are made, and sizes are exact."""

import dataclasses

import pytest

from paged import BlockSpaceManager, CacheConfig, block_bytes, num_blocks_that_fit

GIB = 1 << 30


def test_defaults_are_those_of_the_documentation():
    assert dataclasses.asdict(CacheConfig()) == {
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


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().block_size = 8


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("block_size", 0, ValueError),
        ("block_size", True, TypeError),
        ("block_size", 16.0, TypeError),
        ("num_gpu_blocks", 0, ValueError),
        ("num_cpu_blocks", -1, ValueError),
        ("num_cpu_blocks", None, TypeError),
        ("gpu_memory_utilization", 0, ValueError),
        ("gpu_memory_utilization", 1.1, ValueError),
        ("gpu_memory_utilization", "0.9", TypeError),
        ("enable_prefix_caching", 1, TypeError),
        ("max_cached_blocks", -1, ValueError),
        ("free_order", "lifo", ValueError),
        ("watermark", 1.0, ValueError),
        ("watermark", float("nan"), ValueError),
        ("sliding_window", 0, ValueError),
        ("hash_fn", "xxhash", TypeError),
        ("hash_seed", 1.5, TypeError),
    ],
)
def test_a_wrong_setting_is_named(name, value, error):
    with pytest.raises(error, match=name):
        CacheConfig(**{name: value})


def test_block_bytes_counts_k_and_v():
    assert block_bytes(16, 8, 128, "float16") == 65536
    assert block_bytes(16, 8, 128, "float16", num_layers=32) == 32 * 65536
    assert block_bytes(16, 8, 128, "float32") == 2 * 65536
    assert block_bytes(16, 1, 576, "bfloat16", head_dim_v=512) == 16 * (576 + 512) * 2


def test_block_bytes_of_int8_include_a_scale_per_token_and_head():
    assert block_bytes(16, 8, 128, "int8") == 16 * 8 * (2 * 128 + 2 * 4)
    assert block_bytes(16, 8, 128, "float8_e4m3fn") == 16 * 8 * 2 * 128


def test_block_bytes_takes_torch_dtypes():
    torch = pytest.importorskip("torch")
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"):
        assert block_bytes(4, 2, 8, getattr(torch, name)) == block_bytes(4, 2, 8, name)


def test_block_bytes_names_an_unknown_dtype():
    with pytest.raises(ValueError, match="float64"):
        block_bytes(16, 8, 128, "float64")


@pytest.mark.parametrize(
    ("free", "total", "utilization", "per_block", "expected"),
    [
        (80 * GIB, 80 * GIB, 0.9, 65536, 72 * GIB // 65536),
        (70 * GIB, 80 * GIB, 0.9, 65536, 62 * GIB // 65536),  # 10 GiB are somebody else's
        (1000, 1000, 0.7, 100, 7),  # in binary, 1 - 0.7 is a little more than 0.3
        (1000, 1000, 1.0, 1000, 1),
    ],
)
def test_the_number_of_blocks_that_fit(free, total, utilization, per_block, expected):
    assert num_blocks_that_fit(free, total, utilization, per_block) == expected


def test_sized_returns_a_config_with_the_number():
    config = CacheConfig(gpu_memory_utilization=0.5, block_size=8).sized(1000, 1000, 100)
    assert (config.num_gpu_blocks, config.block_size) == (5, 8)


@pytest.mark.parametrize(("free", "total"), [(100, 1000), (99, 1000), (1099, 2000)])
def test_too_little_memory_is_refused_with_the_numbers(free, total):
    with pytest.raises(ValueError, match=f"{free}.*{total}.*0.5.*1000"):
        num_blocks_that_fit(free, total, 0.5, 1000)


def test_more_free_than_total_memory_is_refused():
    with pytest.raises(ValueError, match="free_bytes"):
        num_blocks_that_fit(2, 1, 0.9, 1)


def test_a_manager_refuses_a_config_without_blocks():
    with pytest.raises(ValueError, match=r"num_gpu_blocks.*sized"):
        BlockSpaceManager(CacheConfig())
