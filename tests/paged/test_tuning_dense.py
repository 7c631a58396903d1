"""Paged beside dense: the same numbers, compared before they are timed, in one call."""

import json

import pytest
import torch

from paged.trace import Request
from paged.tuning import AttentionShape, TuningError, compare_with_dense
from paged.tuning.attention import Problem, typical_lengths
from paged.tuning.dense_report import DECODE, DENSE, GATHERED, IN_ORDER, PREFILL, SHUFFLED

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
SMALL = {"shape": SHAPE, "batch": 3, "longest": 80, "chunk": 9, "seconds": 0.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_agrees_with_float64_and_an_error_is_seen(dtype):
    shape = AttentionShape(4, 2, 16, dtype)
    problem = Problem((33, 7, 16), (5, 7, 1), shape, seed=1)
    exact = 1e-2 if dtype == "bfloat16" else 1e-5
    for shuffled in (True, False):
        blocks = problem.in_blocks(4, shuffled=shuffled)
        assert problem.error(problem.paged(blocks)) < exact
        assert problem.error(problem.gathered(blocks)) < exact
    out = problem.dense()
    assert problem.error(out) < exact
    out[4] += 1  # the last query of the first sequence
    assert problem.error(out) > 0.2


def test_shuffled_and_in_order_hold_the_same_tokens_elsewhere():
    problem = Problem((40, 40), (1, 1), SHAPE)
    in_order = problem.in_blocks(8, shuffled=False)
    shuffled = problem.in_blocks(8, shuffled=True)
    assert in_order.block_table.flatten().tolist() == list(range(10))
    assert sorted(shuffled.block_table.flatten().tolist()) == list(range(10))
    assert shuffled.block_table.tolist() != in_order.block_table.tolist()
    for blocks in (in_order, shuffled):
        assert torch.equal(blocks.key_cache.flatten(0, 1)[blocks.slots], problem.key)


def test_the_batch_has_the_lengths_of_the_traffic():
    requests = [Request(0.0, length, 0) for length in range(1, 101)]
    assert typical_lengths(requests, 4, 1000) == [13, 38, 63, 88]
    assert typical_lengths(requests, 4, 50) == [13, 38, 50, 50]
    assert typical_lengths(requests[:1], 3, 50) == [1, 1, 1]


def test_one_call_answers_for_time_error_and_memory(tmp_path):
    comparison = compare_with_dense(
        [(20, 5), (60, 30), (10, 2)], layers=2, memory=100 * 2 * 2 * 2 * 16 * 4, **SMALL
    )
    assert [(row.phase, row.name) for row in comparison.times] == [
        (phase, name)
        for phase in (DECODE, PREFILL)
        for name in (DENSE, SHUFFLED, IN_ORDER, GATHERED)
    ]
    assert all(0 < row.error < 1e-5 for row in comparison.times)
    assert all(row.milliseconds > 0 for row in comparison.times)
    assert comparison.time(DECODE, DENSE).ratio.value == 1
    assert comparison.seq_lens == {DECODE: (11, 24, 80), PREFILL: (24,)}
    assert comparison.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert comparison.scheme("longest").average == 89
    assert comparison.scheme("longest").sequences == 1
    assert comparison.scheme("pages").average < 89
    figures = json.loads(json.dumps(comparison.to_dict()))
    assert figures["verdict"] == comparison.verdict
    assert figures["memory"][2]["scheme"] == "pages"
    text = str(comparison)
    assert comparison.verdict in text
    assert "4 heads on 2 of 16, float32" in text

    path = tmp_path / "dense.png"
    memory, times = comparison.plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in memory.get_yticklabels()] == [
        row.scheme for row in comparison.memory
    ]
    assert len(times.get_yticks()) == 6


def test_torch_gets_its_threads_back():
    before = torch.get_num_threads()
    compare_with_dense([30], threads=1, **SMALL)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch is 0"),
        ({"longest": 0}, ValueError, "longest is 0"),
        ({"chunk": 1.5}, TypeError, "chunk is 1.5"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
        ({"layers": 0}, ValueError, "layers is 0"),
        ({"threads": 0}, ValueError, "threads is 0"),
        ({"threads": 10**6}, ValueError, "threads is 1000000; this machine has"),
        ({"seconds": "3"}, TypeError, "seconds is '3'"),
        ({"seconds": float("inf")}, ValueError, "seconds is inf"),
        ({"memory": 0}, ValueError, "memory is 0"),
        ({"device": "nowhere"}, ValueError, "nowhere"),
        ({"lengths_or_trace": []}, TuningError, "is empty"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        compare_with_dense(**{"lengths_or_trace": [9]} | SMALL | arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
    ids=["ratio", "width", "dtype"],
)
def test_a_shape_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionShape(**fields)
