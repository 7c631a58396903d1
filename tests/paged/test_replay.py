"""The replay: exact on small cases, right under preemption and sharing, able to notice an error."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_kernels import KVCache
from paged_kernels._launch import recorded

from paged import BlockSpaceManager, CacheConfig, Scheduler, SchedulerConfig, Sequence
from paged.plots import CACHED, FREE, SHARED
from paged.replay import replay_trace
from paged.replay_config import ReplayConfig, ReplayError, pool_size
from paged.replay_load import ReplayLoad, arrival_steps
from paged.replay_memory import MAX_FRAMES, BlockMap, next_power_of_two
from paged.synthetic import _larger, exact_row
from paged.trace import Request, sample_requests


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(**changes):
    settings = {"block_size": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "max_length": 64}
    return ReplayConfig(**(settings | changes))


def requests_of(*lengths):
    return [Request(float(i), prompt, output) for i, (prompt, output) in enumerate(lengths)]


def test_one_request_by_hand():
    """A prompt of 5 and 3 new tokens in blocks of 4: 5, 6 and 7 tokens in 2 blocks, 3 steps."""
    report = replay_trace(requests_of((5, 3)), small(num_blocks=8))
    figures = report.to_dict()
    assert (figures["requests"], figures["steps"]) == (1, 3)
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (5, 3)
    assert (figures["blocks_peak"], figures["blocks_average"]) == (2, 2.0)
    assert figures["waste_paged"] == pytest.approx((3 + 2 + 1) / 24)
    assert figures["waste_contiguous_max"] == pytest.approx((2 + 1 + 0) / 21)
    assert figures["waste_contiguous_pow2"] == pytest.approx((3 + 2 + 1) / 24)
    assert figures["rows_checked"] == 2 * 3
    assert figures["preemptions"] == figures["prefix_hit_tokens"] == 0
    assert figures["advice"] == []
    assert report.agrees


def test_requests_that_generate_nothing_or_one_token_end_with_their_prompt():
    report = replay_trace(requests_of((4, 0), (4, 1)), small())
    assert report.generated_tokens == 1
    assert report.steps == 2


def test_two_layers_cost_twice_the_memory_and_are_both_checked():
    one, two = (
        replay_trace(requests_of((9, 4), (3, 2)), small(layers=layers)) for layers in (1, 2)
    )
    assert two.bytes_per_token == 2 * one.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert two.rows_checked == 2 * one.rows_checked
    assert two.agrees


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_full_pool_preempts_and_every_request_still_ends_right(dtype):
    requests = [Request(0.0, 12, 20) for _ in range(6)]
    report = replay_trace(requests, small(num_blocks=14, max_num_seqs=6, dtype=dtype))
    assert report.preemptions["recompute"] > 0 == report.preemptions["swap"]
    assert report.recomputed_tokens > 0
    assert report.generated_tokens == 6 * 20
    assert report.memory.paged.peak <= 14 * 4
    assert report.agrees
    assert "requests waited for blocks" in str(report)


@pytest.mark.parametrize("num_cpu_blocks", [6, 100])
def test_with_cpu_blocks_sequences_are_moved_there_and_back(num_cpu_blocks):
    requests = [Request(0.0, 12, 20) for _ in range(6)]
    settings = {"num_blocks": 14, "max_num_seqs": 6, "num_cpu_blocks": num_cpu_blocks}
    report = replay_trace(requests, small(**settings, layers=2))
    assert report.preemptions["swap"] > 0
    assert (report.preemptions["recompute"] == 0) == (num_cpu_blocks == 100)
    assert report.generated_tokens == 6 * 20
    assert report.agrees
    figures = report.to_dict()
    assert figures["preemptions"] == sum(report.preemptions.values())
    assert figures["preemptions_by_swap"] == report.preemptions["swap"]
    assert figures["steps_short_of_blocks"] > 0


def test_a_long_prompt_is_computed_in_parts():
    report = replay_trace(requests_of((30, 3), (9, 4)), small(max_num_batched_tokens=8))
    assert report.steps > 6
    assert report.agrees


def test_a_pool_for_the_longest_request_alone_is_enough():
    requests = [Request(0.0, 8, 9), Request(0.0, 3, 14), Request(0.0, 8, 9)]
    report = replay_trace(requests, small(num_blocks=4, prefix_cache=False))
    assert report.generated_tokens == 32
    assert report.agrees


def test_shared_prefixes_are_found_in_the_cache_and_do_not_change_the_result():
    requests = [Request(0.0, 600, 4, (1, 2)), Request(9.0, 520, 4, (1, 3))]
    shared, alone = (
        replay_trace(requests, small(max_length=1000, prefix_cache=on)) for on in (True, False)
    )
    assert shared.prefix_hit_tokens == 512
    assert shared.prefix_queried_tokens == 1120
    assert alone.prefix_hit_tokens == 0
    assert shared.agrees
    assert alone.agrees


def test_longer_requests_are_clipped_and_counted():
    report = replay_trace(requests_of((100, 2), (5, 2)), small(max_length=20))
    assert (report.requests_clipped, report.prompt_tokens) == (1, 18 + 5)
    assert "1 of them clipped to 20 tokens" in str(report)


def test_the_result_depends_on_the_seed_alone():
    def figures(seed):
        report = replay_trace(sample_requests(6, seed=1), small(seed=seed))
        return {k: v for k, v in report.to_dict().items() if "seconds" not in k and "over" not in k}

    assert figures(3) == figures(3)
    assert figures(3)["max_error"] != figures(4)["max_error"]


@pytest.mark.parametrize("fault", ["slot", "scale", "nan"])
def test_wrong_attention_is_noticed(monkeypatch, fault):
    write, attend = KVCache.write, KVCache.attend

    def wrong_write(self, layer, key, value, batch, **options):
        write(self, layer, key, value.roll(1, 0) if fault == "slot" else value, batch, **options)

    def wrong_attend(self, layer, query, batch, **options):
        out = attend(self, layer, query, batch, **options)
        return {"scale": out * 1.01, "nan": out * float("nan")}.get(fault, out)

    monkeypatch.setattr(KVCache, "write", wrong_write)
    monkeypatch.setattr(KVCache, "attend", wrong_attend)
    report = replay_trace(requests_of((9, 4), (5, 3)), small())
    assert not report.agrees
    assert "MORE THAN ROUNDING" in str(report)


def test_triton_kernels_run_and_agree_with_torch(monkeypatch):
    """Every attention of the Triton run is a kernel launch; none falls back to torch's own."""
    attend = KVCache.attend
    outputs = {"triton": [], "torch": []}

    def refuse(*args, **kwargs):
        raise AssertionError("scaled_dot_product_attention was called")

    def noted_attend(self, layer, query, batch, *, backend):
        with monkeypatch.context() as patch:
            if backend == "triton":
                patch.setattr(F, "scaled_dot_product_attention", refuse)
                patch.setattr(torch._C._nn, "scaled_dot_product_attention", refuse)
            outputs[backend].append(attend(self, layer, query, batch, backend=backend))
        return outputs[backend][-1]

    monkeypatch.setattr(KVCache, "attend", noted_attend)
    requests = sample_requests(4, seed=0)
    launches = {}
    for backend in outputs:
        with recorded() as launches[backend]:
            report = replay_trace(requests, ReplayConfig(max_length=64, backend=backend))
        assert report.agrees
    assert launches["torch"] == []
    assert len(launches["triton"]) >= 2 * report.steps  # at least one to write, one to attend
    assert len(outputs["triton"]) == report.steps
    for triton_out, torch_out in zip(outputs["triton"], outputs["torch"], strict=True):
        torch.testing.assert_close(triton_out, torch_out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_blocks": 2}, ReplayError, r"request 1 \(9 prompt tokens.*needs 3 blocks.*into 2"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
        ({"num_blocks": 0}, ValueError, "num_blocks is 0"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0"),
        ({"heads": 3}, ValueError, "heads is 3; it must be a multiple of kv_heads, which is 2"),
        ({"max_length": 1}, ValueError, "max_length is 1"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"dtype": "int4"}, ValueError, "dtype is 'int4'"),
        ({"backend": "cuda"}, ValueError, "backend"),
        ({"device": "cuda:99"}, ReplayError, "device 'cuda:99' is not at hand"),
        ({"device": "abacus"}, ReplayError, "device 'abacus' is not at hand"),
        ({"num_blocks": 2**50}, ReplayError, "no memory for .* GiB.*lower num_blocks"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        replay_trace(requests_of((2, 2), (9, 4)), small(**changes))


def test_no_requests_are_refused():
    with pytest.raises(ReplayError, match="requests is empty"):
        replay_trace([], small())


def test_the_default_pool_is_half_of_contiguous_reservation():
    requests = requests_of((30, 3), (9, 4))
    assert pool_size(requests, small(max_num_seqs=6)) == 3 * 8
    assert pool_size(requests, small(max_num_seqs=1)) == 8


def test_arrivals_keep_their_rhythm_at_one_a_step():
    requests = [Request(arrival, 1, 1) for arrival in (0.0, 2.0, 2.0, 8.0)]
    assert arrival_steps(requests) == [0, 0, 0, 3]
    assert arrival_steps([Request(5.0, 1, 1)] * 3) == [0, 0, 0]
    assert arrival_steps(requests[:1]) == [0]


def test_every_request_arrives_generates_its_tokens_and_ends():
    """The load by itself, on a pool small enough to preempt: no token skipped, none twice."""
    requests = [Request(float(i // 3), 3 + 5 * i % 17, 7 * i % 19) for i in range(12)]
    manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=12))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=5), manager)
    load = ReplayLoad(requests, scheduler, seed=0)
    finished = 0
    for _ in range(1000):
        if not load.unfinished:
            break
        load.arrive()
        output = scheduler.schedule()
        running = load.running()
        assert {owner.sequence for owner in running} >= set(output.seqs)
        for owner in running:
            assert owner.request is requests[owner.index]
            assert owner.sequence.token_ids == owner.tokens[: len(owner.sequence)]
            assert len(owner.tokens) == owner.request.prompt_len + owner.request.output_len
        finished += load.answer(output)
        manager.check_invariants()
    assert finished == 12
    assert scheduler.num_preemptions["recompute"] > 0
    assert scheduler.num_generated_tokens == sum(request.output_len for request in requests)
    assert manager.stats().gpu.num_used == 0


def test_the_block_map_tells_owners_from_shared_cached_and_free_blocks():
    manager = BlockSpaceManager(CacheConfig(block_size=2, num_gpu_blocks=6, watermark=0.0))

    class Owner:
        def __init__(self, index, tokens):
            self.index, self.sequence = index, Sequence(index, tokens)
            manager.allocate(self.sequence)
            manager.mark_computed(self.sequence, len(tokens))

    first, second, gone = Owner(0, [1, 2, 3]), Owner(7, [1, 2, 4]), Owner(8, [9, 9])
    (cached,) = manager.block_table(gone.sequence)
    manager.free(gone.sequence)
    block_map = BlockMap(6)
    block_map.add(0, manager, [first, second])
    (frame,) = block_map.frames()
    (common, tail), (also_common, other_tail) = (
        manager.block_table(owner.sequence) for owner in (first, second)
    )
    assert common == also_common
    assert frame[[common, tail, other_tail, cached]].tolist() == [SHARED, 0, 7, CACHED]
    assert sorted(frame.tolist()).count(FREE) == 2


def test_a_long_block_map_is_thinned_evenly():
    manager = BlockSpaceManager(CacheConfig(num_gpu_blocks=1))
    block_map = BlockMap(1)
    for step in range(3 * MAX_FRAMES):
        block_map.add(step, manager, [])
    assert len(block_map.frames()) == len(block_map.steps) <= MAX_FRAMES
    assert block_map.steps == list(range(0, 3 * MAX_FRAMES, 4))
    assert BlockMap(10**6).max_frames == 4


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [
        1,
        2,
        4,
        4,
        8,
        1024,
        2048,
    ]


def test_the_float64_reference_by_hand():
    """Equal scores average the values of the query's own KV head."""
    value = torch.arange(12.0).reshape(3, 2, 2)  # three tokens, two KV heads
    out = exact_row(torch.zeros(4, 2), torch.randn(3, 2, 2), value)
    assert out.dtype == torch.float64
    np.testing.assert_allclose(out, [[4, 5], [4, 5], [6, 7], [6, 7]])
    one_key = torch.tensor([[[8.0, 0.0]], [[0.0, 0.0]]])
    weight = 1 / (1 + np.exp(-8 * 3 / np.sqrt(2)))
    out = exact_row(torch.tensor([[3.0, 5.0]]), one_key, torch.tensor([[[1.0, 0]], [[0.0, 1]]]))
    np.testing.assert_allclose(out, [[weight, 1 - weight]], rtol=1e-6)


def test_a_nan_error_is_never_forgotten():
    nan = float("nan")
    assert np.isnan(_larger(nan, torch.tensor([1.0])))
    assert np.isnan(_larger(1.0, torch.tensor([nan, 2.0])))
    assert _larger(1.0, torch.tensor([-3.0])) == 3.0
