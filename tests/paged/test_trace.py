"""Traces: both public formats read exactly, every broken file named with its line, seeded draws."""

import json

import numpy as np
import pytest

from paged.trace import (
    HASH_BLOCK_TOKENS,
    OUTPUT_QUANTILES,
    PERCENTAGES,
    PROMPT_QUANTILES,
    Request,
    TraceError,
    read_trace,
    sample_requests,
    token_ids,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def mooncake(**changes):
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
    return json.dumps(row | changes) + "\n"


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def test_azure_rows_become_requests(write):
    first, second = read_trace(write(AZURE))
    assert first == Request(0.0, 4808, 10)
    assert (second.prompt_len, second.output_len) == (3180, 8)
    assert second.arrival == pytest.approx(0.052, abs=1e-6)


def test_azure_columns_are_found_by_name(write):
    text = "\ufeffGeneratedTokens, TIMESTAMP,region,ContextTokens\r\n9,2024-05-10 00:00:00+00:00,eu,3\r\n\r\n"
    assert read_trace(write(text)) == [Request(0.0, 3, 9)]


def test_mooncake_rows_become_requests(write):
    text = mooncake() + "\n" + mooncake(timestamp=1500, input_length=512, hash_ids=[7])
    assert read_trace(write(text)) == [Request(0.0, 600, 5, (7, 8)), Request(1.5, 512, 5, (7,))]


def test_requests_come_in_order_of_arrival_and_the_first_arrives_at_zero(write):
    text = mooncake(timestamp=3000) + mooncake(timestamp=1000, output_length=1)
    arrivals = [(request.arrival, request.output_len) for request in read_trace(write(text))]
    assert arrivals == [(0.0, 1), (2.0, 5)]


def test_a_limit_reads_no_further_line(write):
    assert len(read_trace(write(AZURE + "broken\n"), limit=2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n", "line 1: wants a CSV header"),
        ("a,b,c\n1,2,3\n", "line 1: wants a CSV header .*got 'a,b,c'"),
        (AZURE.splitlines()[0], "holds no requests"),
        (AZURE + "2023-11-16 18:17:04.1,-3,8\n", "line 4: ContextTokens .* >= 1, got -3"),
        (AZURE + "2023-11-16 18:17:04.1,0,8\n", "line 4: ContextTokens .* >= 1, got 0"),
        (AZURE + "2023-11-16 18:17:04.1,3,-8\n", "line 4: GeneratedTokens .* >= 0, got -8"),
        (AZURE + "2023-11-16 18:17:04.1,3.5,8\n", "line 4: ContextTokens .* got '3.5'"),
        (AZURE + "2023-11-16 18:17:04.1,3\n", "line 4: wants 3 columns"),
        (AZURE + "yesterday,3,8\n", "line 4: TIMESTAMP must look like .* got 'yesterday'"),
        (AZURE + "2023-11-16 18:17:04.1.2,3,8\n", "line 4: TIMESTAMP must look like"),
        (mooncake() + "{broken\n", "line 2: wants one JSON object"),
        (mooncake() + "[1]\n", "line 2: wants a JSON object with timestamp"),
        ('{"timestamp": 0}\n', "line 1: wants a JSON object with timestamp"),
        (mooncake(timestamp="now"), "line 1: timestamp must be a number .* got 'now'"),
        (mooncake(timestamp=float("nan")), "line 1: timestamp must be a number .* got nan"),
        (mooncake(input_length=-600), "line 1: input_length .* >= 1, got -600"),
        (mooncake(input_length=True, hash_ids=[1]), "line 1: input_length .* got True"),
        (mooncake(output_length=-1), "line 1: output_length .* >= 0, got -1"),
        (mooncake(hash_ids=[7]), "line 1: hash_ids must be a list of 2 integers"),
        (mooncake(hash_ids=7), "line 1: hash_ids must be a list of 2 integers"),
        (mooncake(hash_ids=[7, -8]), "line 1: each of hash_ids .* got -8"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is not a text file"),
        (b"\x00\x01\x02" * 500, "line 1: wants a CSV header"),
        (AZURE.encode() + b"\x00,\x00\n", "line 4"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_line(write, content, message):
    path = write(content)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.csv cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_clipping_keeps_the_output_up_to_half_and_drops_the_prompts_tail():
    request = Request(0.0, 1500, 100, (1, 2, 3))
    assert request.clipped(1600) == request
    assert request.clipped(700) == Request(0.0, 600, 100, (1, 2))
    assert request.clipped(64) == Request(0.0, 32, 32, (1,))
    assert Request(0.0, 9, 0).clipped(2) == Request(0.0, 2, 0)


def test_sampled_lengths_follow_the_quantiles():
    requests = sample_requests(20_000, seed=0)
    for lengths, quantiles in (
        ([request.prompt_len for request in requests], PROMPT_QUANTILES),
        ([request.output_len for request in requests], OUTPUT_QUANTILES),
    ):
        sampled = np.percentile(lengths, PERCENTAGES[1:-1])
        np.testing.assert_allclose(sampled, quantiles[1:-1], rtol=0.1)
        assert quantiles[0] <= min(lengths)
        assert max(lengths) <= quantiles[-1]


def test_sampling_depends_on_the_seed_alone():
    assert sample_requests(50, seed=3) == sample_requests(50, seed=3)
    assert sample_requests(50, seed=3) != sample_requests(50, seed=4)


def test_equal_hash_ids_give_equal_prefixes_and_different_ones_do_not():
    first = token_ids(Request(0.0, 1100, 3, (5, 6, 7)), index=0, seed=1)
    second = token_ids(Request(9.0, 1030, 9, (5, 6, 8)), index=1, seed=1)
    assert len(first) == 1103
    shared = 2 * HASH_BLOCK_TOKENS
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 6] != second[shared : shared + 6]
    assert first[:HASH_BLOCK_TOKENS] != first[HASH_BLOCK_TOKENS:shared]


def test_tokens_are_deterministic_and_a_requests_own():
    request = Request(0.0, 40, 2)
    tokens = token_ids(request, index=4, seed=0)
    assert len(tokens) == 42
    assert all(type(token) is int for token in tokens)
    assert tokens == token_ids(request, index=4, seed=0)
    assert tokens[:16] != token_ids(request, index=5, seed=0)[:16]
    assert tokens[:16] != token_ids(request, index=4, seed=1)[:16]
