"""Every new token lands in its own slot, and nothing else changes."""

import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import reshape_and_cache
from paged_kernels.testing import GUARD, check_guard, guarded_empty, make_batch, poison

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def write(key, value, key_cache, value_cache, slots, backend, dtype=torch.int64):
    slots = torch.tensor(slots, dtype=dtype)
    reshape_and_cache(key, value, key_cache, value_cache, slots, backend=backend)


def caches(shape, dtype=torch.float32):
    return [poison(guarded_empty(shape, dtype), GUARD) for _ in range(2)]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_slots_are_never_written(backend, index_dtype):
    key_cache, value_cache = caches((4, 8, 2, 16))
    key, value = torch.randn(2, 4, 2, 16).unbind()
    write(key, value, key_cache, value_cache, [3, -1, -1, 20], backend, index_dtype)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        want = torch.full((4, 8, 2, 16), float(GUARD))
        want[0, 3], want[2, 4] = rows[0], rows[3]
        assert torch.equal(cache, want)
        check_guard(cache)


def test_only_padding_writes_nothing(backend):
    key_cache, value_cache = caches((2, 8, 1, 16))
    key = torch.randn(2, 1, 16)
    write(key, key, key_cache, value_cache, [-1, -1], backend)
    assert (key_cache == GUARD).all() and (value_cache == GUARD).all()


def test_rows_beyond_the_slots_are_ignored(backend):
    key_cache, value_cache = caches((2, 8, 1, 16))
    key = torch.randn(5, 1, 16)
    write(key, key[:3], key_cache, value_cache, [9, 2], backend)
    assert torch.equal(key_cache.flatten(0, 1)[[9, 2]], key[:2])
    assert (key_cache == GUARD).sum() == 14 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 16), (80, 80), (96, 64), (112, 112), (192, 128), (576, 512)]
)
def test_a_plain_write_copies_every_byte(backend, dtype, head_dim, head_dim_v):
    key = torch.randn(5, 3, head_dim).to(dtype)
    value = torch.randn(5, 3, head_dim_v).to(dtype)
    key[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    key_cache, value_cache = (
        caches((3, 4, 3, head_dim), dtype)[0],
        caches((3, 4, 3, head_dim_v), dtype)[1],
    )
    slots = [7, 0, 11, 5, 6]
    write(key, value, key_cache, value_cache, slots, backend)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        as_ints = torch.int32 if dtype == torch.float32 else torch.int16
        stored = cache.flatten(0, 1)[slots]
        assert torch.equal(stored.view(as_ints), rows.view(as_ints))
        check_guard(cache)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved", "packed"])
def test_writes_go_through_any_strides(backend, layout):
    batch = make_batch([9, 4], layout=layout, block_size=4, filler=GUARD)
    want = batch.key_cache.clone(), batch.value_cache.clone()
    poison(batch.key_cache, GUARD)
    poison(batch.value_cache, GUARD)
    reshape_and_cache(
        batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slots, backend=backend
    )
    assert torch.equal(batch.key_cache, want[0]) and torch.equal(batch.value_cache, want[1])
    batch.check_guards()


def test_interleaved_writes_land_in_the_shared_buffer(backend):
    both = torch.zeros(3, 2, 4, 2, 16)
    key_cache, value_cache = both.unbind(1)
    write(torch.ones(1, 2, 16), torch.full((1, 2, 16), 2.0), key_cache, value_cache, [6], backend)
    assert (both[1, 0, 2] == 1).all() and (both[1, 1, 2] == 2).all()
    assert both.sum() == 32 + 64


def test_slices_of_a_fused_qkv_are_written_as_they_are(backend):
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    qkv = torch.randn(6, (num_heads + 2 * num_kv_heads) * head_dim)
    _, key, value = (
        part.view(6, -1, head_dim)
        for part in qkv.split([num_heads * head_dim, *[num_kv_heads * head_dim] * 2], dim=1)
    )
    slots = [3, 0, 7, 4, -1, 1]
    for rows in ((key, value), (key.contiguous(), value.contiguous())):
        key_cache, value_cache = caches((2, 4, 2, 16))
        write(*rows, key_cache, value_cache, slots, backend)
        for source, cache in ((key, key_cache), (value, value_cache)):
            assert torch.equal(cache.flatten(0, 1)[[3, 0, 7, 4, 1]], source[[0, 1, 2, 3, 5]])
            assert (cache.flatten(0, 1)[[2, 5, 6]] == GUARD).all()


def test_rows_and_slots_may_start_at_any_address(backend):
    key, value = torch.randn(2, 9, 2, 16 + 1)[..., 1:].unbind()
    slots = torch.arange(9)[5:]
    key_cache, value_cache = caches((2, 8, 2, 16))
    reshape_and_cache(key[3:], value[5:], key_cache, value_cache, slots, backend=backend)
    assert torch.equal(key_cache.flatten(0, 1)[5:9], key[3:7])
    assert torch.equal(value_cache.flatten(0, 1)[5:9], value[5:9])


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 20])
def test_every_kv_head_is_written(backend, num_kv_heads):
    key_cache, value_cache = caches((2, 4, num_kv_heads, 16))
    key, value = torch.randn(2, 3, num_kv_heads, 16).unbind()
    write(key, value, key_cache, value_cache, [1, 4, 6], backend)
    assert torch.equal(key_cache.flatten(0, 1)[[1, 4, 6]], key)
    assert torch.equal(value_cache.flatten(0, 1)[[1, 4, 6]], value)
    check_guard(key_cache)
    check_guard(value_cache)
