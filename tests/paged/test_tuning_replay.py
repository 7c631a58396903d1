"""The replay without a model: by hand, against the closed form, and nothing lost under pressure."""

import json
import random
from pathlib import Path

import pytest

from paged import CacheConfig, SchedulerConfig
from paged.trace import Request
from paged.tuning import Replay, TuningError, as_requests, replay, slots_over_life
from paged.tuning.recorder import MAX_ENTRIES
from paged.tuning.replay_setup import arrival_steps

AZURE = Path(__file__).parents[3] / "shared" / "traces" / "AzureLLMInferenceTrace_code.csv"


def test_one_request_by_hand():
    """A prompt of 5 and 3 new tokens in blocks of 4: 5, 6 and 7 tokens in 2 blocks, 3 steps."""
    report = replay([(5, 3)], CacheConfig(block_size=4, num_gpu_blocks=8))
    assert (report.requests, report.finished, report.steps) == (1, 1, 3)
    assert (report.prompt_tokens, report.generated_tokens, report.computed_tokens) == (5, 3, 7)
    assert (report.tokens_per_step, report.peak_blocks) == (7 / 3, 2)
    assert report.series["step"] == [0, 1, 2]
    assert report.series["used"] == [2, 2, 2]
    assert report.series["internal_fragmentation"] == [3 / 8, 2 / 8, 1 / 8]
    assert report.waste == (3 + 2 + 1) / 24
    assert (report.wait_median, report.wait_max) == (0, 0)
    assert report.advice == []


def test_requests_without_output_end_with_their_prompt():
    report = replay([(4, 0), (4, 1), 4], CacheConfig(num_gpu_blocks=9), load=None)
    assert (report.finished, report.steps, report.generated_tokens) == (3, 1, 1)


def test_a_prompt_beyond_the_budget_takes_several_steps():
    report = replay([(100, 2)], scheduler_config=SchedulerConfig(max_num_batched_tokens=32))
    assert report.steps == 4 + 1
    assert report.computed_tokens == 101


@pytest.mark.parametrize("block_size", [1, 4, 16, 50])
def test_waste_is_that_of_the_closed_form(block_size):
    rng = random.Random(block_size)
    requests = as_requests([(rng.randint(1, 90), rng.randint(0, 40)) for _ in range(30)])
    report = replay(requests, CacheConfig(block_size=block_size), load=None)
    assert report.steps <= MAX_ENTRIES
    assert report.waste == pytest.approx(slots_over_life(requests, block_size).waste)


@pytest.mark.parametrize("cpu_blocks", [0, 200], ids=["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_nothing_is_lost_when_the_pool_is_too_small(cpu_blocks, caching):
    rng = random.Random(3)
    requests = as_requests([(rng.randint(1, 60), rng.randint(20, 80)) for _ in range(60)])
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=60,
        num_cpu_blocks=cpu_blocks,
        enable_prefix_caching=caching,
        watermark=0.0,
    )
    run = Replay(requests, config, load=None)
    left = 0
    while run.unfinished:
        left += run.step()
        run.manager.check_invariants()
    report = run.report()
    assert left == report.finished == 60
    assert report.generated_tokens == sum(request.output_len for request in requests)
    assert report.prompt_tokens == sum(request.prompt_len for request in requests)
    kind = "swap" if cpu_blocks else "recompute"
    assert report.preemptions[kind] > 0
    assert report.series[f"preempted_{kind}"][-1] <= report.preemptions[kind]
    assert report.peak_blocks <= 60
    assert run.manager.gpu.num_used == 0
    assert any("num_gpu_blocks" in sentence for sentence in report.advice)


def test_requests_that_can_never_run_are_rejected_with_the_reason():
    report = replay([(10, 2), (500, 2), (10, 2)], CacheConfig(block_size=4, num_gpu_blocks=20))
    assert (report.finished, report.rejected) == (2, 1)
    assert "125 blocks" in report.first_rejection
    assert "1 requests can never run" in report.advice[0]


def test_prefixes_are_shared_as_the_hash_ids_say():
    requests = [Request(float(i), 600, 2, (1, 2)) for i in range(5)]
    report = replay(requests, load=0.01)
    assert report.config.enable_prefix_caching
    assert report.prefix_hit_tokens == 4 * 592
    assert report.series["prefix_hit_tokens"][-1] == 4 * 592
    assert report.load.alike == report.load.hits == 4
    off = replay(requests, CacheConfig(enable_prefix_caching=False), load=0.01)
    assert off.prefix_hit_tokens == 0
    assert any("enable_prefix_caching" in sentence for sentence in off.advice)


def test_all_series_have_one_length_and_blocks_add_up():
    requests = [(40, 700), (30, 900)] + [(20, 5)] * 50
    report = replay(requests, CacheConfig(num_gpu_blocks=300), load=0.5)
    lengths = set(map(len, report.series.values()))
    assert report.steps > MAX_ENTRIES
    assert len(lengths) == 1
    assert MAX_ENTRIES // 2 <= lengths.pop() <= MAX_ENTRIES
    steps = report.series["step"]
    assert steps == sorted(set(steps))
    blocks = zip(*(report.series[name] for name in ("used", "cached", "free")), strict=True)
    assert set(map(sum, blocks)) == {300}
    assert max(report.series["used"]) <= report.peak_blocks
    assert len(report.plot().axes) == 3
    assert json.loads(json.dumps(report.to_dict()))["steps"] == report.steps
    assert "tokens each" in str(report)


def test_the_queue_counts_those_outside_the_scheduler():
    report = replay(
        [(8, 8)] * 300, CacheConfig(num_gpu_blocks=4), load=None,
        scheduler_config=SchedulerConfig(max_num_seqs=2),
    )  # fmt: skip
    assert report.series["waiting"][0] == 298
    assert report.finished == 300
    assert report.wait_max > report.wait_median > 0


def test_without_a_size_the_pool_never_lacks_a_block():
    rng = random.Random(1)
    requests = [(rng.randint(1, 500), rng.randint(1, 50)) for _ in range(100)]
    report = replay(requests, load=None, scheduler_config=SchedulerConfig(max_num_seqs=10))
    assert report.preemptions == {"swap": 0, "recompute": 0}
    assert report.load.steps_short_of_blocks == 0
    assert report.peak_blocks <= report.load.num_blocks


def test_the_clock_of_the_trace_is_scaled_to_the_load():
    requests = [Request(float(second), 90, 10) for second in (0, 1, 4)]
    config = SchedulerConfig(max_num_batched_tokens=10)
    assert arrival_steps(requests, config, 1.0) == [0, 7, 30]
    assert arrival_steps(requests, config, 0.5) == [0, 15, 60]
    assert arrival_steps(requests, config, None) == [0, 0, 0]
    seats = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1000)
    assert arrival_steps(requests, seats, 1.0) == [0, 7, 30]
    assert arrival_steps(requests[:1], config, 1.0) == [0]


@pytest.mark.parametrize("load", [0, -1, True, "all", float("nan")])
def test_a_load_must_be_a_number_above_zero(load):
    with pytest.raises(TuningError, match="load is"):
        replay([5], load=load)


@pytest.mark.run_early
@pytest.mark.skipif(not AZURE.exists(), reason="the Azure trace is not beside the repository")
def test_a_production_trace_runs_to_its_end():
    report = replay(AZURE)
    assert report.finished == report.requests == 8819
    assert report.generated_tokens == 245_896
    assert report.computed_tokens == 18_059_974 + 245_896 - 8819
    assert round(100 * report.waste, 1) == 0.3
