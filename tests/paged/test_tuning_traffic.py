"""A traffic in every form it may have, and stand-in tokens that share what the trace shares."""

import numpy as np
import pytest

from paged.trace import Request, TraceError
from paged.tuning import TuningError, as_requests
from paged.tuning.traffic import StandIns, life


def test_lengths_pairs_and_requests_are_read():
    assert as_requests([17, 3]) == [Request(0.0, 17, 0), Request(1.0, 3, 0)]
    assert as_requests([(17, 4)]) == [Request(0.0, 17, 4)]
    assert as_requests(np.array([5, 6])) == [Request(0.0, 5, 0), Request(1.0, 6, 0)]
    late, early = Request(9.0, 1, 1), Request(2.0, 2, 2)
    assert as_requests([late, early]) == [early, late]
    assert as_requests(iter([1, 2, 3]), limit=2) == [Request(0.0, 1, 0), Request(1.0, 2, 0)]


def test_a_path_is_a_trace_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,30,4\n"
        "2023-11-16 18:17:05,31,5\n"
    )
    assert as_requests(path) == [Request(0.0, 30, 4), Request(2.0, 31, 5)]
    assert as_requests(str(path), limit=1) == [Request(0.0, 30, 4)]
    with pytest.raises(TraceError, match="nowhere"):
        as_requests(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("traffic", "error", "message"),
    [
        ([], TuningError, "is empty"),
        (5, TypeError, "lengths_or_trace is 5"),
        ([3, 0], TuningError, r"lengths_or_trace\[1\] is 0"),
        ([-1], ValueError, r"lengths_or_trace\[0\]"),
        ([True], TypeError, r"lengths_or_trace\[0\] is True"),
        ([2.5], TypeError, r"lengths_or_trace\[0\] is 2.5"),
        ([(1, 2, 3)], TuningError, "a pair must be"),
        ([(1, -2)], ValueError, r"lengths_or_trace\[0\]"),
        ([Request(0.0, 9, 1), Request(0.0, 9, 1, (4,))], TuningError, "hash_ids"),
        (b"trace.csv", TypeError, "it must be a path, or a list"),
        ([Request(float("nan"), 9, 1)], TuningError, r"\[0\].arrival is nan"),
        ([Request(None, 9, 1)], TuningError, r"\[0\].arrival is None"),
        ([Request(0.0, 2.5, 1)], TypeError, r"\[0\].prompt_len is 2.5"),
        ([Request(0.0, 0, 1)], TuningError, r"\[0\].prompt_len is 0"),
        ([Request(0.0, 9, -3)], ValueError, r"\[0\].output_len is -3"),
        ([Request(0.0, 1025, 3, (1,))], TuningError, r"\[0\].hash_ids is \(1,\); .* a tuple of 3"),
        ([Request(0.0, 9, 1, 5)], TuningError, r"\[0\].hash_ids is 5"),
    ],
    ids=range(17),
)
def test_what_is_no_traffic_is_refused_by_name(traffic, error, message):
    with pytest.raises(error, match=message):
        as_requests(traffic)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_checked(limit):
    with pytest.raises((TypeError, ValueError), match=f"limit is {limit}; it must be an int >= 1"):
        as_requests([3], limit=limit)


def test_a_request_lives_from_its_prompt_to_its_last_written_token():
    assert list(life(Request(0.0, 5, 3))) == [5, 6, 7]
    assert list(life(Request(0.0, 5, 1))) == list(life(Request(0.0, 5, 0))) == [5]


def test_stand_ins_are_equal_exactly_where_hash_ids_are():
    stand_ins = StandIns()
    first = stand_ins.prompt(Request(0.0, 1300, 1, (900, 7, 8)), 0)
    second = stand_ins.prompt(Request(1.0, 1100, 1, (900, 9, 8)), 1)
    assert (len(first), len(second)) == (1300, 1100)
    assert first[:512] == second[:512]
    assert not set(first[512:1024]) & set(second[512:1024])
    assert first[1024:1100] == second[1024:1100]
    assert len(set(first)) == 1300
    alone = [stand_ins.prompt(Request(0.0, 4, 1), index) for index in (2, 3)]
    assert alone[0] != alone[1]
    assert {*alone[0], stand_ins.output(2)} == {stand_ins.output(2)}
