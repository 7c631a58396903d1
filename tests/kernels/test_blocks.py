import pytest
import torch
from paged_kernels import blocks
from paged_kernels.blocks import copy_blocks, swap_blocks
from paged_kernels.testing import check_guard, guarded_empty

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def numbered(num_blocks, *shape, dtype=torch.float32):
    """A cache whose block `b` holds the number b throughout."""
    ids = torch.arange(num_blocks).view(-1, *[1] * len(shape))
    return ids.expand(num_blocks, *shape).to(dtype).contiguous()


def content(cache):
    """One number per block, after checking that a block holds nothing else."""
    flat = cache.float().flatten(1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].int().tolist()


def test_a_chain_of_copies_reads_every_source_first():
    cache = numbered(3, 2, 1, 4)
    copy_blocks([cache], [(0, 1), (1, 2)])
    assert content(cache) == [0, 0, 1]


def test_two_blocks_change_places():
    cache = numbered(2, 2, 1, 4)
    copy_blocks([cache], [(0, 1), (1, 0)])
    assert content(cache) == [1, 0]


def test_one_source_fills_three_destinations():
    cache = numbered(5, 2, 1, 4)
    copy_blocks([cache], [(3, 0), (3, 1), (3, 4)])
    assert content(cache) == [3, 3, 2, 3, 3]


def test_a_block_copied_to_itself_stays_and_costs_nothing(monkeypatch):
    cache = numbered(3, 2)
    monkeypatch.setattr(blocks, "_move", None)  # calling it would fail
    copy_blocks([cache], [(2, 2), (0, 0)])
    assert content(cache) == [0, 1, 2]


@pytest.mark.parametrize("pairs", [[], torch.empty(0, 2, dtype=torch.int64)])
def test_no_pairs_is_no_work(monkeypatch, pairs):
    monkeypatch.setattr(blocks, "_move", None)  # calling it would fail
    caches = [numbered(3, 2), numbered(3, 2), numbered(3, 2)]
    copy_blocks(caches[:1], pairs)
    swap_blocks(caches[1:2], caches[2:], pairs)
    assert [content(cache) for cache in caches] == [[0, 1, 2]] * 3


def test_no_caches_take_no_pairs():
    copy_blocks([], [])
    swap_blocks([], [], [])
    with pytest.raises(ValueError, match="pairs must name a source block"):
        copy_blocks([], [(0, 1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_copied_as_they_are(dtype):
    cache = torch.randint(0, 256, (6, 4, 2, 8), dtype=torch.uint8)
    if dtype.itemsize > 1:
        cache = torch.randint(0, 256, (6, 4, 2, 8 * dtype.itemsize), dtype=torch.uint8)
    before = cache.clone()
    copy_blocks([cache.view(dtype)], [(5, 0), (0, 2)])
    assert torch.equal(cache, before[[5, 1, 0, 3, 4, 5]])


def test_forty_layers_with_their_scale_planes_move_together():
    caches = [numbered(8, 4, 2, 3, dtype=torch.int8) for _ in range(80)]
    caches += [numbered(8, 4, 2) for _ in range(80)]
    copy_blocks(caches, [(7, 0), (0, 5)])
    assert all(content(cache) == [7, 1, 2, 3, 4, 0, 6, 7] for cache in caches)


@pytest.mark.parametrize("stage_bytes", [1, 1000, blocks.STAGE_BYTES])
def test_a_thousand_overlapping_pairs_in_any_stage_size(monkeypatch, stage_bytes):
    monkeypatch.setattr(blocks, "STAGE_BYTES", stage_bytes)
    cache = numbered(1200, 5, 3)
    generator = torch.Generator().manual_seed(0)
    destinations = torch.randperm(1200, generator=generator)[:1000]
    sources = torch.randint(1200, (1000,), generator=generator)
    want = torch.arange(1200)
    want[destinations] = sources
    copy_blocks([cache], torch.stack([sources, destinations], dim=1))
    assert content(cache) == want.tolist()


def test_strided_caches_are_copied_in_place_and_nothing_else_is_touched():
    both = guarded_empty((6, 2, 4, 3), torch.float32)
    both.copy_(numbered(6, 2, 4, 3))
    heads_first = numbered(6, 3, 4)
    copy_blocks([both[:, 0], heads_first.transpose(1, 2)], [(5, 0)])
    assert content(both[:, 0]) == content(heads_first) == [5, 1, 2, 3, 4, 5]
    assert content(both[:, 1]) == [0, 1, 2, 3, 4, 5]
    check_guard(both)


def test_a_plane_of_one_number_per_block_is_a_cache_too():
    cache = torch.arange(4.0)
    copy_blocks([cache], [(3, 1)])
    assert cache.tolist() == [0, 3, 2, 3]


def test_swapping_keeps_ids_of_both_pools_apart():
    pool, cpu_pool = numbered(3, 2, 4), numbered(8, 2, 4) + 10
    swap_blocks([pool], [cpu_pool], [(2, 7), (0, 2), (1, 1)])
    assert content(cpu_pool) == [10, 1, 0, 13, 14, 15, 16, 2]
    assert content(pool) == [0, 1, 2]
    swap_blocks([cpu_pool], [pool], [(7, 0), (0, 2)])
    assert content(pool) == [2, 1, 10]


def test_swapping_equal_ids_is_a_copy():
    pool, cpu_pool = numbered(3, 2), numbered(3, 2) + 10
    swap_blocks([pool], [cpu_pool], [(1, 1)])
    assert content(cpu_pool) == [10, 1, 12]


def test_swapping_within_one_pool_reads_every_source_first():
    pool = numbered(3, 2)
    swap_blocks([pool], [pool], [(0, 1), (1, 2)])
    assert content(pool) == [0, 0, 1]


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([(0, 1), (2, 1)], ValueError, "destination once, got block 1"),
        ([(1, 1), (2, 1)], ValueError, "destination once, got block 1"),
        ([(0, 4)], ValueError, r"destination block in 0\.\.3, got 4"),
        ([(4, 0)], ValueError, r"source block in 0\.\.3, got 4"),
        ([(-1, 0)], ValueError, r"source block in 0\.\.3, got -1"),
        ([(0, 1, 2)], ValueError, r"\[N, 2\]"),
        ([(0.5, 1)], TypeError, "block ids"),
        ([0, 1], TypeError, "block ids"),
        ([(0, 1), (2,)], TypeError, "block ids"),
        (torch.tensor([[0, 1]], dtype=torch.int32), TypeError, "int64"),
        (torch.tensor([0, 1]), ValueError, r"\[N, 2\]"),
    ],
)
def test_wrong_pairs_are_refused_and_nothing_is_copied(pairs, error, message):
    cache, other = numbered(4, 2), numbered(4, 2) + 10
    with pytest.raises(error, match=message):
        copy_blocks([cache], pairs)
    with pytest.raises(error, match=message):
        swap_blocks([cache], [other], pairs)
    assert content(cache) == [0, 1, 2, 3]
    assert content(other) == [10, 11, 12, 13]


def test_each_pool_bounds_its_own_ids():
    small, large = numbered(2, 2), numbered(5, 2)
    swap_blocks([large], [small], [(4, 1)])
    with pytest.raises(ValueError, match=r"destination block in 0\.\.1, got 4"):
        swap_blocks([large], [small], [(1, 4)])
    with pytest.raises(ValueError, match=r"source block in 0\.\.1, got 4"):
        swap_blocks([small], [large], [(4, 1)])


@pytest.mark.parametrize(
    ("sources", "destinations", "error", "message"),
    [
        ([numbered(4, 2), numbered(3, 2)], [numbered(4, 2)] * 2, ValueError, r"sources\[1\]"),
        ([numbered(4, 2)], [], ValueError, "a tensor for each of the 1 sources, got 0"),
        ([numbered(4, 2)], [numbered(4, 3)], ValueError, r"destinations\[0\] must match"),
        ([numbered(4, 2)], [numbered(4, 2).int()], ValueError, r"destinations\[0\] must match"),
        ([[1, 2]], [numbered(4, 2)], TypeError, r"sources\[0\]"),
        ([torch.tensor(1.0)], [numbered(4, 2)], TypeError, r"sources\[0\]"),
    ],
)
def test_pools_that_do_not_match_are_refused(sources, destinations, error, message):
    with pytest.raises(error, match=message):
        swap_blocks(sources, destinations, [(0, 1)])
