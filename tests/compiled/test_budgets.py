"""The budgets of bench/static.py hold: registers, pipeline, instructions per byte."""

from argparse import Namespace

import pytest

from bench import static
from bench.report import envelope
from bench.static import broken_budgets, cases, name_of, report

CASES = list(cases())


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=[f"{name_of(case[-1])}-{case[0]}-{case[1]}-{case[2]}-{case[3]}" for case in CASES],
)
def test_machine_code_stays_within_its_budget(case):
    assert broken_budgets([report(*case)]) == []


def test_figures_become_records_a_table_and_a_picture(monkeypatch, tmp_path):
    decode = next(case for case in CASES if (name_of(case[-1]), case[0]) == ("decode", "sm_90"))
    monkeypatch.setattr(static, "cases", lambda quick: [decode])
    options = Namespace(quick=True, seed=0, threads=1, out=None)
    result = envelope("static", options) | static.run(options)
    figures = {record["name"].split(": ")[1]: record for record in result["records"]}
    assert set(figures) == {figure.replace("_", " ") for figure in static.FIGURES}
    assert figures["load bytes"]["value"] == 16 and figures["spilled"]["value"] == 0
    assert all(record["kind"] == "exact" for record in figures.values())
    assert result["exact_for"] == ["triton"] and result["failures"] == []
    assert "decode on sm_90, 32/8 x 128" in static.table(result)
    static.plot(result, tmp_path / "static.png")
    assert (tmp_path / "static.png").read_bytes().startswith(b"\x89PNG")
