"""The budgets of bench/static.py hold: registers, pipeline, instructions per byte."""

import pytest

from bench.static import broken_budgets, cases, name_of, report

CASES = list(cases())


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=[f"{name_of(case[-1])}-{case[0]}-{case[1]}-{case[2]}-{case[3]}" for case in CASES],
)
def test_machine_code_stays_within_its_budget(case):
    assert broken_budgets([report(*case)]) == []
