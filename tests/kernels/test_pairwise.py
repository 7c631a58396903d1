"""The case generator covers what it says, with few cases, and the same ones each time."""

import itertools

from pairwise import pairwise

FACTORS = {"a": (0, 1, 2), "b": "xyz", "c": (False, True), "d": (None, 5)}


def test_every_pair_occurs():
    cases = pairwise(FACTORS)
    for first, second in itertools.combinations(FACTORS, 2):
        want = set(itertools.product(FACTORS[first], FACTORS[second]))
        assert {(case[first], case[second]) for case in cases} == want
    assert len(cases) <= 12  # of 36


def test_triples_occur_when_asked_for():
    cases = pairwise(FACTORS, triples=[("a", "c", "d")])
    want = set(itertools.product(FACTORS["a"], FACTORS["c"], FACTORS["d"]))
    assert {(case["a"], case["c"], case["d"]) for case in cases} == want


def test_what_is_not_allowed_does_not_occur_and_costs_no_other_pair():
    def allowed(case):
        return not (case.get("a") == 0 and case.get("b") == "x")

    cases = pairwise(FACTORS, allowed=allowed)
    assert all(allowed(case) for case in cases)
    assert {(case["a"], case["b"]) for case in cases} == set(
        itertools.product(FACTORS["a"], FACTORS["b"])
    ) - {(0, "x")}


def test_the_seed_decides():
    assert pairwise(FACTORS, seed=3) == pairwise(FACTORS, seed=3)
