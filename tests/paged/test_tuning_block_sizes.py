"""The sweep: each column exact where it can be, and no claim where nothing was measured."""

import json

import pytest

from paged.trace import Request
from paged.tuning import TuningError, slots_over_life, sweep_block_sizes
from paged.tuning.side_by_side import first_within

SHAPE_OPTIONS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_seventeen_tokens_by_hand():
    sweep = sweep_block_sizes([17], (8, 16, 32), replayed=False, memory_tokens=100, num_seqs=10)
    assert [row.block_size for row in sweep.rows] == [8, 16, 32]
    assert [round(100 * row.waste_at_end) for row in sweep.rows] == [29, 47, 47]
    assert [row.waste for row in sweep.rows] == [row.waste_at_end for row in sweep.rows]
    assert [row.table_bytes for row in sweep.rows] == [10 * 3 * 4, 10 * 2 * 4, 10 * 1 * 4]
    assert [row.sequences for row in sweep.rows] == [4, 3, 3]
    assert {row.host_time for row in sweep.rows} == {None}
    assert {row.hit_tokens for row in sweep.rows} == {row.kernel_time for row in sweep.rows}
    assert "kernel time: not measured" in sweep.notes
    assert sweep.row(16).block_size == 16
    with pytest.raises(KeyError):
        sweep.row(64)


def test_replayed_waste_is_the_closed_form_without_sharing():
    requests = [(30 + index % 7, 90) for index in range(40)]
    sweep = sweep_block_sizes(requests, (4, 16, 32))
    assert sweep.replayed_requests == 40
    for row in sweep.rows:
        assert row.waste_replayed == pytest.approx(row.waste)
        assert row.host_time.lower <= row.host_time.value <= row.host_time.upper
    assert sweep.row(16).host_time.value == 1


def test_a_replay_too_short_for_a_spread_has_no_say():
    sweep = sweep_block_sizes([3] * 4, (8, 16, 32))
    assert [row.host_time for row in sweep.rows] == [None] * 3
    assert sweep.row(8).waste_replayed == 5 / 8
    assert sweep.recommendation.block_size == 8


def test_sharing_shows_in_the_replay_and_in_the_hits():
    requests = [Request(0.0, 1100, 4, (1, 2, 10 + index)) for index in range(6)]
    sweep = sweep_block_sizes(requests, (1, 16, 64, 1024, 2048))
    assert [row.hit_tokens for row in sweep.rows] == [5 * 1024] * 4 + [0]
    losses = [row.hit_loss for row in sweep.rows]
    assert losses[0] == 0
    assert losses == sorted(losses)
    # Up to 75 more tokens may be shared: 1,024 up to 1,099, each as likely.
    assert losses[1] == pytest.approx(5 * sum(n % 16 for n in range(76)) / 76 / (6 * 1100))
    # Six prompts share 16 of their 18 blocks of 64 tokens, so empty slots weigh more than alone.
    assert sweep.row(64).waste_replayed > slots_over_life(requests, 64).waste
    assert any("512" in note for note in sweep.notes)
    assert "hits" in str(sweep)


def test_kernels_are_timed_when_asked():
    from paged.tuning import AttentionShape

    sweep = sweep_block_sizes(
        [60, 30], (8, 16), replayed=False, measure_kernels=True, shape=AttentionShape(**SHAPE_OPTIONS)
    )  # fmt: skip
    assert sweep.row(16).kernel_time.value == 1
    assert sweep.row(8).kernel_time.rounds >= 5
    assert "kernel time: 4 heads on 2 of 16, float32 on cpu" in sweep.notes


def test_results_are_plain_and_drawn(tmp_path):
    sweep = sweep_block_sizes([(100, 10)] * 9, (8, 16, 32), replayed=False)
    figures = json.loads(json.dumps(sweep.to_dict()))
    assert figures["rows"][1]["waste"] == sweep.row(16).waste
    assert figures["recommendation"]["block_size"] == sweep.recommendation.block_size
    path = tmp_path / "waste.png"
    (axes,) = sweep.plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [line.get_label() for line in axes.lines][:2] == ["at full length", "over life"]
    assert str(sweep).splitlines()[-1].startswith("Take block size")


def test_only_the_first_requests_are_replayed():
    requests = [Request(0.0, 100, 10)] * 50
    assert len(first_within(requests, 1000)) == 5
    assert len(first_within(requests, 1)) == 1
    assert len(first_within(requests, 10**9)) == 50


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_sizes": ()}, TuningError, "block_sizes is"),
        ({"block_sizes": (16, 16)}, TuningError, "different sizes"),
        ({"block_sizes": (0,)}, ValueError, "block_sizes is 0"),
        ({"block_sizes": (16.0,)}, TypeError, "block_sizes is 16.0"),
        ({"num_seqs": 0}, ValueError, "num_seqs is 0"),
        ({"memory_tokens": 0}, ValueError, "memory_tokens is 0"),
        ({"device": "nowhere", "measure_kernels": True}, ValueError, "nowhere"),
        ({"lengths_or_trace": []}, TuningError, "is empty"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        sweep_block_sizes(**{"lengths_or_trace": [9], "replayed": False} | arguments)
