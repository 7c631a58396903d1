from types import SimpleNamespace

import pytest
import torch
from paged_kernels.kv_cache import KVCache
from paged_kernels.testing import make_batch

from paged import BlockSpaceManager, CacheConfig, Sequence

SIZES = {"num_layers": 3, "num_blocks": 8, "block_size": 4, "num_kv_heads": 2, "head_dim": 16}
QUANTISED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def make_cache(dtype=torch.float32, **options):
    return KVCache(**{**SIZES, "dtype": dtype, "device": "cpu", **options})


def batch_of(seq_len, table, query_len):
    """What a manager says about one sequence whose last `query_len` tokens are new."""
    slots = [table[i // 4] * 4 + i % 4 for i in range(seq_len - query_len, seq_len)]
    return SimpleNamespace(
        block_table=torch.tensor([table], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, query_len], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_query_len=query_len,
        max_seq_len=seq_len,
        common_prefix_len=0,
    )


def fill(cache):
    """Block b of layer l holds 10 l + b throughout, scale planes too."""
    for layer in range(cache.num_layers):
        for planes in (cache.key, cache.value, cache.k_scale, cache.v_scale):
            plane = planes[layer]
            if plane is not None and plane.shape[0] == cache.num_blocks:
                ids = torch.arange(cache.num_blocks).view(-1, *[1] * (plane.dim() - 1))
                plane.copy_((10 * layer + ids).expand_as(plane).to(plane.dtype))


def blocks_of(planes):
    """One number per layer and block."""
    return [[int(block.float().unique()) for block in plane] for plane in planes]


def test_shapes_are_those_of_the_kernels():
    cache = make_cache(head_dim_v=24)
    assert len(cache.key) == len(cache.value) == len(cache.k_scale) == 3
    assert all(key.shape == (8, 4, 2, 16) for key in cache.key)
    assert all(value.shape == (8, 4, 2, 24) for value in cache.value)
    assert cache.k_scale == cache.v_scale == (None, None, None)
    assert cache.nbytes == 3 * 8 * 4 * 2 * (16 + 24) * 4


def test_scales_follow_the_dtype():
    planes = make_cache(torch.int8)
    assert all(scale.shape == (8, 4, 2) for scale in (*planes.k_scale, *planes.v_scale))
    assert planes.nbytes == 3 * 8 * 4 * 2 * 2 * (16 + 4)
    vectors = make_cache(torch.float8_e5m2)
    assert all(torch.equal(scale, torch.ones(2)) for scale in (*vectors.k_scale, *vectors.v_scale))
    assert vectors.nbytes == 3 * 8 * 4 * 2 * 2 * 16


def test_neighbouring_blocks_of_a_layer_are_neighbours_in_memory():
    cache = make_cache()
    assert all(layer.is_contiguous() for layer in (*cache.key, *cache.value))


@pytest.mark.parametrize("dtype", [torch.float32, *QUANTISED])
def test_what_is_written_is_attended_to_layer_by_layer(dtype):
    torch.manual_seed(0)
    cache = make_cache(dtype)
    table, seq_len = [5, 2, 7], 10
    batch = batch_of(seq_len, table, seq_len)
    for layer in range(3):
        key, value = torch.randn(2, seq_len, 2, 16)
        cache.write(layer, key, value, batch, backend="torch")
        query = torch.randn(seq_len, 4, 16)
        out, lse = cache.attend(layer, query, batch, return_lse=True, backend="torch")
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) / 4
        scores = scores.masked_fill(torch.ones(seq_len, seq_len).triu(1).bool(), float("-inf"))
        want = torch.einsum("hqk,khd->qhd", scores.softmax(2), value.repeat_interleave(2, 1))
        error = {torch.float32: 1e-6, torch.int8: 0.05}.get(dtype, 0.5)
        torch.testing.assert_close(out, want, rtol=0, atol=error)
        torch.testing.assert_close(lse, scores.logsumexp(2).T, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_prefill_on_a_cached_prefix_agrees_with_one_at_once(dtype):
    torch.manual_seed(0)
    key, value = torch.randn(2, 16, 2, 16)
    query = torch.randn(16, 4, 16)
    once, twice = make_cache(dtype, num_layers=1), make_cache(dtype, num_layers=1)
    whole = batch_of(16, [5, 2, 7, 0], 16)
    once.write(0, key, value, whole)
    want = once.attend(0, query, whole)
    first, second = batch_of(12, [5, 2, 7, 0], 12), batch_of(16, [5, 2, 7, 0], 4)
    twice.write(0, key[:12], value[:12], first)
    twice.write(0, key[12:], value[12:], second)
    torch.testing.assert_close(twice.attend(0, query[12:], second), want[12:], rtol=0, atol=1e-5)


def test_the_scale_of_an_fp8_cache_is_used_by_write_and_attend():
    cache = make_cache(torch.float8_e4m3fn, num_layers=1)
    cache.k_scale[0].fill_(0.25)
    cache.v_scale[0].copy_(torch.tensor([0.5, 2.0]))
    batch = batch_of(1, [3], 1)
    cache.write(0, torch.ones(1, 2, 16), torch.ones(1, 2, 16), batch)
    assert (cache.key[0][3, 0].float() == 4).all()
    assert cache.value[0][3, 0].float()[:, 0].tolist() == [2.0, 0.5]
    assert (cache.attend(0, torch.randn(1, 4, 16), batch) == 1).all()


def test_options_and_promises_reach_the_kernel():
    source = make_batch([40, 24], [1, 1], block_size=4, shared_blocks=3, num_heads=4)
    cache = make_cache(num_layers=1, num_blocks=len(source.key_cache))
    cache.key[0].copy_(source.key_cache)
    cache.value[0].copy_(source.value_cache)
    batch = SimpleNamespace(
        block_table=source.block_table,
        seq_lens=source.seq_lens,
        cu_seqlens_q=source.cu_seqlens_q,
        max_query_len=1,
        max_seq_len=40,
        common_prefix_len=12,
    )
    options = {"sinks": torch.ones(4), "softcap": 2.0, "scale": 0.5, "return_lse": True}
    got = cache.attend(0, source.query, batch, **options)
    want = source.attend(backend="reference", **options)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="common_prefix_len"):  # 14 is no multiple of 4
        batch.common_prefix_len = 14
        cache.attend(0, source.query, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.int8])
def test_copies_move_k_v_and_scales_of_every_layer(dtype):
    cache = make_cache(dtype)
    fill(cache)
    cache.copy_blocks([(1, 0), (7, 2), (0, 5)])
    want = [[10 * layer + block for block in (1, 1, 7, 3, 4, 0, 6, 7)] for layer in range(3)]
    if dtype == torch.float8_e5m2:
        want = blocks_of([torch.tensor(row).to(dtype).view(-1, 1) for row in want])
    assert blocks_of(cache.key) == blocks_of(cache.value) == want
    if dtype == torch.int8:
        assert blocks_of(cache.k_scale) == blocks_of(cache.v_scale) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_swapped_out_blocks_come_back_elsewhere(dtype):
    cache = make_cache(dtype, num_cpu_blocks=4)
    fill(cache)
    cache.swap_out([(6, 3), (1, 0)])
    for planes in (cache.key, cache.value):
        for plane in planes:
            plane.zero_()
    cache.swap_in([(3, 2), (0, 7)])
    want = [[0, 0, 10 * layer + 6, 0, 0, 0, 0, 10 * layer + 1] for layer in range(3)]
    assert blocks_of(cache.key) == blocks_of(cache.value) == want
    if dtype == torch.int8:
        assert [row[7] for row in blocks_of(cache.k_scale)] == [1, 11, 21]


def test_a_swapped_sequence_attends_to_the_same_bits():
    torch.manual_seed(0)
    cache = make_cache(torch.int8, num_layers=1, num_cpu_blocks=3)
    before = batch_of(10, [5, 2, 7], 10)
    query = torch.randn(10, 4, 16)
    cache.write(0, *torch.randn(2, 10, 2, 16), before)
    want = cache.attend(0, query, before)
    cache.swap_out([(5, 1), (2, 2), (7, 0)])
    cache.key[0].fill_(99)
    cache.swap_in([(1, 0), (2, 6), (0, 4)])
    assert torch.equal(cache.attend(0, query, batch_of(10, [0, 6, 4], 10)), want)


def test_swapping_without_a_cpu_pool_names_the_block():
    with pytest.raises(ValueError, match="destination block"):
        make_cache().swap_out([(0, 0)])
    make_cache().swap_out([])


def test_the_cpu_pool_does_not_count_as_device_memory():
    assert make_cache(num_cpu_blocks=100).nbytes == make_cache().nbytes


def test_its_repr_says_what_it_holds():
    text = repr(make_cache(torch.bfloat16, head_dim_v=24, num_cpu_blocks=5))
    assert text == (
        "KVCache(3 layers, 8 blocks of 4 slots, 2 KV heads x 16/24, bfloat16 on cpu: 0.0 MiB; "
        "5 CPU blocks)"
    )


@pytest.mark.parametrize("name", [*SIZES, "head_dim_v", "num_cpu_blocks"])
@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError), ("4", TypeError)]
)
def test_wrong_sizes_are_refused_by_name(name, value, error):
    with pytest.raises(error, match=rf"^{name} must be"):
        make_cache(**{name: value})


@pytest.mark.parametrize("dtype", ["float16", torch.float64, torch.int32, None])
def test_dtypes_that_no_kernel_reads_are_refused(dtype):
    with pytest.raises(TypeError, match=r"^dtype must be"):
        make_cache(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.int8])
def test_resizing_moves_live_blocks_and_keeps_their_bytes(dtype):
    cache = KVCache(2, 8, 4, 2, 16, dtype=dtype, device="cpu")
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=8, watermark=0.0))
    first, last = Sequence("first", range(16)), Sequence("last", range(100, 108))
    manager.allocate(first)
    manager.allocate(last)
    batch = manager.build_batch([last], query_lens=[8])
    rows = torch.randn(8, 2, 16)
    cache.write(1, rows, rows, batch)
    query = torch.randn(8, 4, 16)
    want = cache.attend(1, query, batch)
    manager.free(first)

    before = cache.nbytes
    cache.resize(3, manager.resize(3))
    assert cache.num_blocks == 3
    assert cache.nbytes < before
    assert torch.equal(cache.attend(1, query, manager.build_batch([last], query_lens=[8])), want)
    cache.resize(20, manager.resize(20))
    assert torch.equal(cache.attend(1, query, manager.build_batch([last], query_lens=[8])), want)
    with pytest.raises(ValueError, match="num_blocks must be >= 1, got 0"):
        cache.resize(0)
    assert cache.num_blocks == 20
