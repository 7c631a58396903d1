"""What `explain` says: the right numbers, for every option, without launching or waiting."""

import inspect

import pytest
import torch
from attention_cases import batch_of, matrix
from paged_kernels import _explain, explain, paged_attention
from paged_kernels._explain import planned
from paged_kernels._launch import recorded
from paged_kernels._roofline import PEAKS, Costs, costs
from paged_kernels.testing import make_batch, validated_call


def costs_of(batch, **options):
    call = validated_call(**batch.arguments(**options))
    return costs(call, planned(call))


def test_a_small_decode_is_explained_word_for_word():
    batch = make_batch([5, 20], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    assert explain(**batch.arguments(num_splits=1)).splitlines() == [
        "sequences 2, query tokens 2, heads 4/2 of 16, float16, blocks of 16",
        "backend: torch, the default for CPU tensors",
        "  blocks that lie in order are viewed, others gathered; dense attention per sequence",
        "a plan for an H200, not a measurement: Triton would launch",
        "  1. decode: grid 2 x 2 x 1, 1 split, tile 16 rows x 128 keys, 2 warps, 5 stages",
        # 25 keys x 2 heads x (16 + 16) x 2 bytes; 2 queries x 4 heads x 16 x 2; 1 + 2 ids
        "bytes: K and V 3.2 kB + queries 256 B + outputs 256 B + block ids 12 B = 3.724 kB",
        # 25 pairs x 4 heads x (16 + 16) x 2
        "flops: 6.4 k, 1.7 per byte",
        "time: at least 0.000776 us on NVIDIA H200 at 4.8 TB/s and 989 TFLOP/s, bound by memory",
    ]


def test_costs_of_a_decode():
    batch = make_batch([5, 20], num_heads=4, num_kv_heads=2, head_dim=16)
    assert costs_of(batch, num_splits=1) == Costs(
        cache=25 * 2 * 32 * 4, query=2 * 4 * 16 * 4, out=2 * 4 * 16 * 4,
        parts=0, block_ids=3 * 4, flops=2 * 25 * 4 * 32,
    )  # fmt: skip
    # each of 2 parts: 2 rows x 4 heads of 16 values and one lse, float32, there and back
    assert costs_of(batch, num_splits=2).parts == 2 * 2 * (2 * 4 * 17 * 4)
    assert costs_of(batch, num_splits=1, return_lse=True).out == 2 * 4 * 17 * 4


def test_costs_of_a_prefill_count_what_each_query_sees():
    batch = make_batch([5, 7], [3, 0], num_heads=1, num_kv_heads=1)
    pair = 2 * 32
    assert costs_of(batch).flops == (3 + 4 + 5) * pair
    assert costs_of(batch, causal=False).flops == 15 * pair
    assert costs_of(batch).cache == 5 * 32 * 4  # nobody asks about the other sequence
    windowed = costs_of(batch, sliding_window=2)
    assert windowed.flops == (2 + 2 + 2) * pair
    assert windowed.cache == 4 * 32 * 4
    # two queries stand before the sequence and see nothing
    assert costs_of(make_batch([3], [5], num_heads=1, num_kv_heads=1)).flops == 6 * pair


def test_only_decodes_of_a_mixed_batch_have_parts():
    batch = make_batch([50, 60, 40], [2, 30, 1], num_heads=8, num_kv_heads=2)
    assert costs_of(batch, num_splits=3).parts == 3 * 2 * (3 * 8 * 17 * 4)


def test_a_shared_prefix_moves_once():
    batch = make_batch([40, 50, 33], shared_blocks=2, num_kv_heads=1)
    assert costs_of(batch).cache == (40 + 50 + 33) * 32 * 4
    assert costs_of(batch, common_prefix_len=32).cache == (40 + 50 + 33 - 64) * 32 * 4


def test_int8_moves_its_scales():
    batch = make_batch([10], num_kv_heads=1, cache_dtype=torch.int8)
    assert costs_of(batch).cache == 10 * (32 + 8)


def test_cascade_is_planned_in_order():
    batch = make_batch([300, 290], [1, 20], shared_blocks=16, dtype=torch.float16)
    lines = explain(**batch.arguments(common_prefix_len=256)).splitlines()[4:8]
    starts = ["shared prefix of 256 keys", "decode from key 256", "prefill from key 256"]
    for number, (line, start) in enumerate(zip(lines, [*starts, "merge of 2 parts"], strict=True)):
        assert line.startswith(f"  {number + 1}. {start}"), line


@pytest.mark.parametrize("case", matrix()[::12])
def test_every_option_is_explained_briefly_and_nothing_runs(case):
    batch, options = batch_of(case)
    before = batch.key_cache.clone().view(torch.uint8)
    with recorded() as launches:
        for backend in ("triton", "torch", "reference"):
            text = explain(**batch.arguments(**options, backend=backend))
            assert f"backend: {backend}, as asked" in text and "flops: " in text
            assert len(text.splitlines()) <= 15
    assert launches == []
    assert torch.equal(batch.key_cache.view(torch.uint8), before)


def test_the_arguments_are_those_of_paged_attention():
    assert inspect.signature(explain).parameters == inspect.signature(paged_attention).parameters
    batch = make_batch([5])
    for wrong in ({"sliding_window": 0}, {"backend": "cuda"}, {"num_splits": 2, "split_size": 16}):
        with pytest.raises(ValueError) as expected:
            batch.attend(**wrong)
        with pytest.raises(ValueError) as got:
            explain(**batch.arguments(**wrong))
        assert str(got.value) == str(expected.value)
    with pytest.raises(TypeError, match="softcapp"):
        explain(**batch.arguments(), softcapp=1.0)


def test_an_empty_call_launches_nothing():
    for batch in (make_batch([]), make_batch([], [], padding_rows=3), make_batch([5], [0])):
        assert explain(**batch.arguments()).endswith("nothing to attend to: no launch")


def test_a_head_that_fits_no_tile_is_no_matter_to_torch():
    batch = make_batch([5], num_heads=256, num_kv_heads=1, head_dim=256, dtype=torch.float16)
    assert "nothing: head_dim 256" in explain(**batch.arguments())
    with pytest.raises(ValueError, match="shared memory"):
        explain(**batch.arguments(backend="triton"))


def test_without_triton_torch_is_explained_alone(monkeypatch):
    monkeypatch.setattr(_explain, "has_triton", lambda: False)
    text = explain(**make_batch([5]).arguments())
    assert "Triton" not in text and "flops" in text


def gpu_arguments(**options):
    """Tensors whose values cannot be read, as if each read were a wait for the GPU."""
    batch = make_batch([5, 20], dtype=torch.bfloat16, **options)
    return {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in batch.arguments().items()
    }


def test_a_gpu_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    table = torch.empty(2, 1000, dtype=torch.int32, device="meta")
    text = explain(**gpu_arguments() | {"block_table": table}, max_seq_len=4096)
    assert "backend: triton, the default for GPU tensors" in text
    assert f"at {PEAKS['NVIDIA B200'].bytes / 1e12:.4g} TB/s" in text
    assert f"K and V {2 * 4096 * 2 * 32 * 2 / 1e6:.4g} MB" in text
    assert text.endswith("lengths: the bounds given, as reading them would wait for the GPU")
    assert "merge of" in text  # 4 programs alone would not fill it
    prefill = explain(**gpu_arguments(query_lens=[3, 20]), max_query_len=20, max_seq_len=64)
    assert "prefill" in prefill and "not a measurement" not in prefill


def test_no_time_is_made_up_for_an_unknown_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Voodoo 2")
    text = explain(**gpu_arguments())
    assert "time: unknown, as the peak rates of Voodoo 2 are" in text and " us" not in text


def test_time_is_the_longer_of_moving_and_computing():
    peaks = PEAKS["NVIDIA H200"]
    cost = Costs(cache=4_800_000, query=0, out=0, parts=0, block_ids=0, flops=67 * 10**6)
    assert cost.seconds(peaks, torch.bfloat16) == pytest.approx((1e-6, 67e6 / 989e12))
    assert cost.seconds(peaks, torch.float32) == pytest.approx((1e-6, 1e-6))
