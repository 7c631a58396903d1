"""The benchmarks' command: records, files, comparisons, errors in one line."""

import json
import sys
from argparse import Namespace
from itertools import count
from types import SimpleNamespace

import pytest

from bench import __main__ as command
from bench import compare, records, report
from bench.__main__ import BAD_INPUT, NOT_MEASURED, WRONG, Benchmark, main
from bench.records import (
    BenchError,
    NotMeasuredError,
    WrongResultError,
    exact_record,
    rate_record,
    ratio_record,
    text_table,
    time_in_turns,
    time_record,
)


def test_times_become_quartiles_and_rates_items_per_second():
    time = time_record("t", [4.0, 1.0, 3.0, 2.0, 5.0])
    assert [time[key] for key in ("kind", "unit", "lower", "value", "upper", "repeats")] == [
        "time", "ms", 2.0, 3.0, 4.0, 5,
    ]  # fmt: skip
    rate = rate_record("r", [1.0, 2.0, 4.0], items=4_000)
    assert (rate["lower"], rate["value"], rate["upper"]) == (1.5, 2.0, 3.0)


def test_a_ratio_is_of_lower_quartiles_and_its_spread_of_groups_of_rounds():
    # Ten rounds are five groups of two, whose lower quartile is the lesser.
    subject = [2.0, 9.0, 3.0, 9.0, 4.0, 9.0, 5.0, 9.0, 6.0, 9.0]
    ratio = ratio_record("x", subject, [2.0] * 10, "x dense")
    assert (ratio["value"], ratio["lower"], ratio["upper"]) == (2.0, 1.0, 3.0)
    assert ratio["repeats"] == 10
    with pytest.raises(ValueError, match="5 rounds"):
        ratio_record("x", [1.0] * 4, [1.0] * 4, "x dense")


def test_works_take_turns_in_changing_order_and_are_prepared_outside_the_clock():
    now, order = [0.0], []

    def work(name, seconds):
        for number in count():
            now[0] += 100.0  # preparation

            def call(number=number):
                now[0] += seconds
                order.append((name, number))

            yield call

    works = {"a": work("a", 0.001), "b": work("b", 0.002)}
    times = time_in_turns(works, rounds=40, clock=lambda: now[0])
    assert times["a"] == pytest.approx([1.0] * 40) and times["b"] == pytest.approx([2.0] * 40)
    rounds = [order[i : i + 2] for i in range(0, 82, 2)]
    assert all({name for name, _ in pair} == {"a", "b"} for pair in rounds)
    assert len({pair[0][0] for pair in rounds}) == 2


def test_tables_align_their_columns():
    assert text_table(["", "n"], [["long", 1], ["x", 222]]).splitlines() == [
        "        n", "---------", "long    1", "x     222",
    ]  # fmt: skip


def result_with(*measured, name="fake", **more):
    options = Namespace(quick=True, seed=3, threads=1, out=None)
    return report.envelope(name, options) | {"records": list(measured)} | more


def one_of_each():
    return [
        time_record("time", [1.0, 2.0, 3.0]),
        ratio_record("ratio", [2.0, 2.2, 2.1, 2.0, 2.4], [1.0] * 5, "x dense"),
        exact_record("bytes", 100, "bytes"),
        exact_record("memory", 100, "bytes", tolerance=0.1),
    ]


def changed(factors):
    new = []
    for record in one_of_each():
        factor = factors.get(record["name"], 1.0)
        figures = {key: record[key] * factor for key in ("value", "lower", "upper")}
        new.append(record | figures)
    return new


def verdicts(first, second, **options):
    return {v.name: v.verdict for v in compare.compare(first, second, **options)}


@pytest.mark.parametrize(
    "factors",
    [{}, {"ratio": 1.3}, {"ratio": 0.8}, {"memory": 1.1}, {"time": 1.4}],
    ids=str,
)
def test_noise_within_the_spread_is_the_same(factors):
    first, second = result_with(*one_of_each()), result_with(*changed(factors))
    assert set(verdicts(first, second).values()) == {"same"}


@pytest.mark.parametrize(
    ("factors", "off"),
    [
        ({"ratio": 2.5}, "ratio"),
        ({"ratio": 0.4}, "ratio"),
        ({"bytes": 1.001}, "bytes"),
        ({"memory": 1.2}, "memory"),
    ],
    ids=str,
)
def test_a_planted_change_is_off(factors, off):
    first, second = result_with(*one_of_each()), result_with(*changed(factors))
    found = verdicts(first, second)
    assert found.pop(off) == "off"
    assert set(found.values()) == {"same"}


def test_the_rule_for_ratios_is_the_gap_between_their_spreads():
    first = result_with(ratio_record("r", [2.0, 2.2, 2.1, 2.0, 2.4], [1.0] * 5, "x"))  # up to 2.4
    for factor, verdict in ((1.19, "same"), (1.21, "off")):
        second = result_with(
            ratio_record("r", [2.4 * factor] * 5, [1.0] * 5, "x")
        )  # from 2.4 * factor
        assert verdicts(first, second, slack=1.2) == {"r": verdict}
        assert verdicts(second, first, slack=1.2) == {"r": verdict}


def test_times_may_differ_and_missing_ratios_may_not():
    first = result_with(*one_of_each())
    assert verdicts(first, result_with(*changed({"time": 9.0})))["time"] == "differs"
    missing = compare.compare(first, result_with(one_of_each()[0]))
    assert [(v.verdict, v.is_off) for v in missing] == [("same", False)] + [("missing", True)] * 3


def test_exact_figures_are_compared_between_equal_versions_only():
    first, second = (
        result_with(exact_record("registers", n, ""), exact_for=["triton"]) for n in (200, 210)
    )
    assert verdicts(first, second) == {"registers": "off"}
    second["versions"] = second["versions"] | {"triton": "99"}
    assert verdicts(first, second) == {"registers": "other versions"}
    assert any("triton" in note for note in compare.notes(first, second))


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A benchmark that measures nothing."""
    module = SimpleNamespace(
        run=lambda options: {"records": one_of_each()},
        table=lambda result: f"{len(result['records'])} records",
        plot=lambda result, path: path.write_text(result["records"][0]["name"]),
    )
    monkeypatch.setitem(sys.modules, "bench_fake", module)
    monkeypatch.setattr(command, "BENCHMARKS", {"fake": Benchmark("bench_fake", "nothing")})
    monkeypatch.chdir(tmp_path)
    return module


def test_a_run_leaves_json_with_its_origin_and_a_picture_drawn_from_it(fake, tmp_path, capsys):
    assert main(["fake", "--quick", "--seed", "5", "--out", "results"]) == 0
    result = json.loads((tmp_path / "results" / "fake-quick.json").read_text())
    assert result["records"] == one_of_each()
    assert result["seed"] == result["options"]["seed"] == 5 and result["threads"] == 1
    assert {"cpu", "cores", "memory_gib", "load", "load_after"} <= set(result["machine"])
    assert {"python", "torch", "triton", "numpy"} <= set(result["versions"])
    assert {"commit", "time", "seconds"} <= set(result)
    assert (tmp_path / "results" / "fake-quick.png").read_text() == "time"
    printed = capsys.readouterr().out
    assert "4 records" in printed and result["machine"]["cpu"] in printed


def test_a_picture_is_drawn_again_from_the_json_alone(fake, tmp_path):
    path = report.write_result(result_with(*one_of_each()), tmp_path)
    fake.run = None
    assert main(["plot", str(path)]) == 0
    assert path.with_suffix(".png").read_text() == "time"
    assert main(["plot", str(path), "--png", "other.png"]) == 0
    assert (tmp_path / "other.png").exists()


def test_results_go_to_a_folder_of_their_own_by_default(fake, tmp_path):
    assert main(["fake"]) == 0
    assert sorted(path.name for path in (tmp_path / "bench-results").iterdir()) == [
        "fake.json", "fake.png",
    ]  # fmt: skip


def test_failures_and_missing_devices_have_exit_codes(fake, capsys):
    fake.run = lambda options: {"records": one_of_each(), "failures": ["budget broken"]}
    assert main(["fake"]) == WRONG
    assert "budget broken" in capsys.readouterr().out

    def absent(options):
        raise NotMeasuredError("needs a GPU")

    fake.run = absent
    assert main(["fake"]) == NOT_MEASURED
    assert capsys.readouterr().err == "bench fake: not measured: needs a GPU\n"

    def wrong(options):
        raise WrongResultError("off by one")

    fake.run = wrong
    assert main(["fake"]) == WRONG
    assert capsys.readouterr().err == "bench fake: off by one\n"


@pytest.mark.parametrize(
    ("codes", "code"), [([0, NOT_MEASURED], 0), ([WRONG, 0], WRONG), ([-9, 0], -9)], ids=str
)
def test_all_runs_each_in_a_process_of_its_own(monkeypatch, capsys, codes, code):
    names = {name: Benchmark("none", name) for name in ("one", "two")}
    monkeypatch.setattr(command, "BENCHMARKS", names)
    commands, codes = [], iter(codes)

    def call(arguments):
        commands.append(arguments[3:])
        return next(codes)

    monkeypatch.setattr(command.subprocess, "call", call)
    assert main(["all", "--quick", "--out", "there"]) == code
    common = ["--out", "there", "--seed", "0", "--threads", "1", "--quick"]
    assert commands == [["one", *common], ["two", *common]]
    assert "one" in capsys.readouterr().out


def test_compare_tells_by_its_exit_code(tmp_path, capsys):
    files = {}
    for name, factors in (("a", {}), ("b", {"time": 1.2}), ("c", {"ratio": 3.0})):
        files[name] = report.write_result(result_with(*changed(factors)), tmp_path / name)
    assert main(["compare", str(files["a"]), str(files["b"])]) == 0
    assert "0 of 4 records are off" in capsys.readouterr().out
    assert main(["compare", str(files["a"]), str(files["c"])]) == WRONG
    assert "1 of 4 records are off\n  ratio" in capsys.readouterr().out
    assert main(["compare", str(files["a"]), str(files["c"]), "--slack", "3"]) == 0
    report.write_result(result_with(*one_of_each(), name="other"), tmp_path / "a")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == WRONG  # folders
    assert f"only in {tmp_path / 'a'}: other-quick.json\nA " in capsys.readouterr().out


BROKEN = {
    "text": "nonsense",
    "list": "[]",
    "other": '{"rows": []}',
    "infinite": json.dumps(
        result_with(time_record("t", [1.0, 2.0, 3.0]) | {"value": float("inf")})
    ),
    "kind": json.dumps(result_with(time_record("t", [1.0, 2.0, 3.0]) | {"kind": "guess"})),
    "unknown": json.dumps(result_with(time_record("t", [1.0, 2.0, 3.0]), name="unknown")),
}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nonsense"], "must be one of fake"),
        (["fake", "--seed", "-1"], "--seed"),
        (["fake", "--seed", "x"], "--seed"),
        (["fake", "--threads", "0"], "--threads"),
        (["fake", "--nonsense"], "--nonsense"),
        (["plot"], "FILE.json"),
        (["plot", "missing.json"], "missing.json"),
        (["plot", "."], "cannot be read"),
        *((["plot", f"{name}.json"], f"{name}.json") for name in BROKEN),
        (["compare", "missing.json", "missing.json"], "missing.json"),
        (["compare", ".", "missing"], "cannot be read"),
        (["compare", "empty", "empty"], "no results of the same name"),
        (["plot", "text.json", "--png", "picture.nonsense"], "--png"),
        (["compare", "text.json", "text.json", "--slack", "0.5"], "--slack"),
        (["compare", "text.json", "text.json", "--slack", "nan"], "--slack"),
        (["fake", "--out", "text.json"], "text.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_a_user_can_put_right_is_one_line(fake, tmp_path, capsys, arguments, what):
    (tmp_path / "empty").mkdir()
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.json").write_text(text)
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == BAD_INPUT
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and what in error, error


def test_results_of_two_benchmarks_are_not_compared():
    with pytest.raises(BenchError, match="one and two"):
        compare.compare(result_with(name="one"), result_with(name="two"))


def test_results_without_a_record_in_common_are_not_compared():
    first, second = (result_with(exact_record(name, 1, "")) for name in ("quick", "full"))
    with pytest.raises(BenchError, match="no record in common"):
        compare.compare(first, second)


def test_another_unit_or_kind_is_off():
    first = result_with(exact_record("a", 3, "bytes"), ratio_record("b", [1.0] * 5, [1.0] * 5, "x"))
    second = result_with(exact_record("a", 3, "lines"), exact_record("b", 1, "x"))
    assert verdicts(first, second) == {"a": "off", "b": "off"}


def test_without_a_name_the_benchmarks_are_listed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*command.BENCHMARKS, *command.COMMANDS))


def test_options_that_are_paths_are_recorded_by_name(tmp_path):
    options = Namespace(
        quick=False, seed=0, threads=1, out=tmp_path, trace=tmp_path / "trace.jsonl",
        peers=[tmp_path / "peers", tmp_path / "tool.py"],
    )  # fmt: skip
    text = json.dumps(report.envelope("fake", options))
    assert "trace.jsonl" in text and "tool.py" in text
    assert str(tmp_path) not in text


def test_argument_types_name_what_they_want(tmp_path):
    assert records.at_least(2)("2") == 2 and records.positive("0.5") == 0.5
    for convert, text in (
        (records.at_least(2), "1"), (records.at_least(0), "1.5"), (records.positive, "0"),
        (records.positive, "inf"), (records.positive, "x"),
        (records.existing_file, str(tmp_path / "missing")), (records.existing_file, str(tmp_path)),
    ):  # fmt: skip
        with pytest.raises(records.ArgumentTypeError):
            convert(text)
