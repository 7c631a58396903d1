"""`bench serving`: small loads that can be followed by hand, and random ones against a list schedule."""

import heapq
import json
import random
from argparse import ArgumentParser

import pytest

from bench import serving
from bench.__main__ import main
from bench.compare import compare
from bench.records import BenchError
from bench.report import read_result
from bench.serving_loads import Load, text_loads, trace_load
from bench.serving_replay import replay
from bench.serving_table import telling_budget
from bench.serving_ways import (
    ABORT,
    GROW,
    LONGEST,
    ORACLE,
    PAGES,
    POWER_OF_TWO,
    WAYS,
    Pieces,
)
from paged.replay_config import final_length
from paged.trace import Request

SEATS = 64
CONTIGUOUS = [way for way in WAYS if way.places]


def a_load(*lengths, longest=32):
    return Load("a load", [Request(0.0, *pair) for pair in lengths], longest)


def by_name(way):
    return way.name


def test_one_piece_means_one_after_the_other():
    # 8 + 8 written tokens each: one step for the prompt and the first token, eight more.
    load = a_load((8, 9), (8, 9), longest=16)
    outcome = replay(load, LONGEST, 16, SEATS)
    assert (outcome.steps, outcome.tokens, outcome.requests) == (18, 18, 2)
    assert outcome.sequences == 1
    # The second waits while the first holds 8, 9, ..., 16 tokens in 16 slots.
    share = sum(range(8, 17)) / (9 * 16)
    assert outcome.memory == pytest.approx(
        {"tokens": share, "reserved": 1 - share, "internal": 0, "external": 0}
    )


def test_a_rounded_piece_wastes_inside_and_between():
    # Each needs 9 slots and gets 16; of 40 slots 8 are left, where nothing fits.
    load = a_load((9, 1), (9, 1), (9, 1), longest=16)
    outcome = replay(load, POWER_OF_TWO, 40, SEATS)
    assert (outcome.steps, outcome.sequences) == (2, 2)
    assert outcome.memory == {
        "tokens": 18 / 40,
        "reserved": 0,
        "internal": 14 / 40,
        "external": 8 / 40,
    }
    packed = replay(load, ORACLE, 40, SEATS)
    assert (packed.steps, packed.sequences, packed.memory) == (1, 3, None)


def test_pages_take_blocks_as_they_are_needed():
    # Longest pieces: one at a time, 32 steps. Pages: 1 and 1 blocks, then 2 and 2, which is all.
    load = a_load((16, 16), (16, 16))
    assert replay(load, LONGEST, 64, SEATS).steps == 16
    assert replay(load, LONGEST, 32, SEATS).steps == 32
    outcome = replay(load, PAGES, 64, SEATS)
    assert (outcome.steps, outcome.preemptions, outcome.memory) == (16, 0, None)


def test_pages_preempt_the_youngest():
    load = a_load((16, 17), (16, 17))
    outcome = replay(load, PAGES, 48, SEATS)
    assert outcome.preemptions == 1
    assert (outcome.requests, outcome.tokens) == (2, 34)
    assert outcome.steps < replay(load, LONGEST, 48, SEATS).steps == 34


def test_a_small_piece_is_outgrown():
    load = a_load((4, 5), (4, 5), (4, 21))  # 8, 8, 24 tokens
    assert load.typical == 8
    aborted = replay(load, ABORT, 64, SEATS)
    assert (aborted.requests, aborted.aborted, aborted.tokens) == (2, 1, 10)
    grown = replay(load, GROW, 64, SEATS)
    assert (grown.requests, grown.copied, grown.preemptions) == (3, 8 + 16, 0)
    assert grown.steps == 21


def test_a_prompt_longer_than_the_piece():
    load = a_load((4, 5), (4, 5), (20, 2))
    assert replay(load, ABORT, 64, SEATS).aborted == 1
    assert replay(load, GROW, 64, SEATS).copied == 0


def test_growth_without_room_preempts_the_youngest():
    # 16, 16, 8, 8 tokens in pieces of 8. The first outgrows its piece beside the second, which gives
    # way; then, since its old piece is in the way of the new one, it gives way itself.
    load = a_load((4, 13), (4, 13), (4, 5), (4, 5), longest=16)
    outcome = replay(load, GROW, 16, SEATS)
    assert (outcome.requests, outcome.copied) == (4, 0)
    assert (outcome.preemptions, outcome.recomputed) == (2, 2 * 8)
    assert outcome.steps == 5 + 8 + 8 + 5


@pytest.mark.parametrize("seed", range(5))
def test_longest_pieces_are_a_list_schedule(seed):
    rng = random.Random(seed)
    load = a_load(*((rng.randint(1, 20), rng.randint(1, 30)) for _ in range(20)), longest=50)
    for pieces in (1, 3, 8):
        ends = [0] * pieces
        for request in load.requests:
            heapq.heappush(ends, heapq.heappop(ends) + request.output_len)
        assert replay(load, LONGEST, 50 * pieces, SEATS).steps == max(ends)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS, ids=by_name)
def test_every_request_is_accounted_for(way, seed):
    load = text_loads(12, seed)[0]
    generated = sum(request.output_len for request in load.requests)
    for budget in load.budgets(SEATS):
        outcome = replay(load, way, budget * load.unit, SEATS)
        assert outcome.requests + outcome.aborted == 12
        assert (outcome.aborted > 0) == (way is ABORT)
        assert outcome.tokens == generated or way is ABORT
        assert (outcome.copied > 0) <= (way is GROW)
        if outcome.memory:
            assert sum(outcome.memory.values()) == pytest.approx(1)
            assert min(outcome.memory.values()) >= 0
    assert outcome.memory is None  # the largest budget has room for all


@pytest.mark.parametrize("way", CONTIGUOUS, ids=by_name)
def test_pieces_are_given_back(way):
    load = a_load((4, 5), (4, 21))
    pieces = Pieces(way, load, 64)
    while pieces.take(len(pieces.held), 4, 8):
        pass
    assert sum(pieces.held.values()) <= 64
    for key in list(pieces.held):
        pieces.give_back(key)
    assert pieces.places.num_free == 64


def test_seats_limit_what_runs():
    load = a_load(*[(4, 8)] * 6)
    assert replay(load, PAGES, 1024, 2).steps == 24
    assert replay(load, LONGEST, 1024, 2).steps == 24


def test_budgets_reach_from_one_to_all():
    load = a_load(*[(4, 8)] * 6, longest=20)
    assert load.unit == 32
    assert load.budgets(256) == [1, 2, 4, 8]
    assert load.budgets(4) == [1, 2, 4]
    assert a_load((4, 8)).budgets(256) == [1]


def test_a_request_longer_than_the_longest_is_refused():
    with pytest.raises(ValueError, match="longest is 32; a request of a load has 33"):
        a_load((1, 33))


def test_texts_follow_the_rule():
    short, long, mixed = text_loads(64, 0)
    assert (short.longest, long.longest, mixed.longest) == (128, 2048, 2048)
    for load in (short, long, mixed):
        assert len(load.requests) == 64
        assert all(request.prompt_len >= 1 <= request.output_len for request in load.requests)
        assert max(map(final_length, load.requests)) < load.longest
    assert max(map(final_length, short.requests)) > 100
    assert list(mixed.requests[:2]) == [short.requests[0], long.requests[0]]
    assert text_loads(64, 0) == [short, long, mixed]
    assert text_loads(64, 1)[0].requests != short.requests


def test_a_trace_gives_its_lengths(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,7,3\n")
    load = trace_load(path, 10, 0)
    assert (load.name, load.longest, load.unit) == ("two", 9, 16)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,7,0\n")
    with pytest.raises(BenchError, match="two: no request generates"):
        trace_load(path, 10, 0)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(serving, "QUICK_TEXTS", 3)
    monkeypatch.setattr(serving, "QUICK_OF_TRACE", 3)


def test_two_runs_agree_exactly(small, tmp_path, capsys):
    results = []
    for name in ("a", "b"):
        assert main(["serving", "--quick", "--out", str(tmp_path / name)]) == 0
        results.append(read_result(tmp_path / name / "serving-quick.json"))
    verdicts = compare(*results)
    assert {verdict.verdict for verdict in verdicts} == {"same"}
    assert {record["kind"] for record in results[0]["records"]} == {"exact"}
    assert "not measured with --quick" in capsys.readouterr().out
    for picture in ("serving-quick.png", "serving-quick-memory.png"):
        assert (tmp_path / "a" / picture).stat().st_size > 10_000


def test_the_budget_that_is_shown():
    load = {"name": "x", "budgets": [1, 2, 4]}
    record = {"load": "x", "way": "pages", "figure": "memory with tokens"}
    records = [record | {"budget": budget} for budget in (1, 2)]
    assert telling_budget({"records": records}, load) == 2
    assert telling_budget({"records": []}, load) == 1


def test_without_a_model_the_replays_stand(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PAGED_SMOLLM2", str(tmp_path / "nothing"))
    monkeypatch.setattr(serving, "TEXTS", 3)
    command = ["serving", "--requests", "3", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "with a model: not measured: SmolLM2" in capsys.readouterr().out
    assert json.loads((tmp_path / "serving.json").read_text())["records"]


def test_several_traces_have_a_row_each(small, tmp_path):
    paths = [tmp_path / name for name in ("one.csv", "two.csv")]
    for path in paths:
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,70,3\n")
    command = ["serving", "--quick", "--out", str(tmp_path), "--trace", *map(str, paths)]
    assert main(command) == 0
    result = read_result(tmp_path / "serving-quick.json")
    assert [load["name"] for load in result["loads"]][3:] == ["one", "two"]


def test_options_have_defaults():
    parser = ArgumentParser()
    serving.add_arguments(parser)
    assert vars(parser.parse_args([])) == {"trace": [], "requests": None}


def test_a_model_serves_the_same_tokens_by_every_way():
    pytest.importorskip("transformers")
    from bench.model_source import check_tokens, tiny_llama
    from bench.serving_engine import serve

    model = tiny_llama()
    load = a_load((9, 5), (3, 20), (20, 8), (1, 2))
    prompts = [
        [7 * number + n for n in range(r.prompt_len)] for number, r in enumerate(load.requests)
    ]
    outputs = [
        serve(model, load, way, 64, prompts) for way in (LONGEST, POWER_OF_TWO, ORACLE, PAGES)
    ]
    assert [len(output) for output in outputs[0]] == [5, 20, 8, 2]
    assert all(output == outputs[0] for output in outputs)
    assert check_tokens(model, prompts, outputs[0], "ours") == 0
    outputs[0][1][3] += 1
    with pytest.raises(BenchError, match="ours: prompt 1, token 3 is not that of plain"):
        check_tokens(model, prompts, outputs[0], "ours")


def test_the_model_part_gives_times_and_gains(monkeypatch):
    pytest.importorskip("transformers")
    from bench import serving_engine
    from bench.model_source import tiny_llama
    from bench.serving_table import show

    monkeypatch.setattr(serving_engine, "BUDGETS", (1,))
    load = serving_engine.shortened(a_load((9, 5), (3, 40), longest=64))
    assert load.requests[1].output_len == serving_engine.NEW_TOKENS
    records = serving_engine.measure(tiny_llama(), load, seed=0)
    assert [record["kind"] for record in records] == ["time", "ratio"] * 3 + ["time"]
    options = {"model": "a tiny one", "loads": [load.to_dict() | {"budgets": [1]}]}
    replays = [
        record
        for way in WAYS
        for record in serving.replay_records(load, 1, way.name, replay(load, way, 64, SEATS))
    ]
    assert "1 x, power of two" in show({**options, "records": replays + records})
