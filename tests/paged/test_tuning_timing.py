"""Times in turns, by a clock that does not run by itself."""

import pytest

from paged.tuning import lower_quartile, ratio, time_in_turns
from paged.tuning.timing import GROUPS


def test_a_ratio_and_its_spread_by_hand():
    """Groups of two rounds; medians 3 and 1.5 in all, and 2, 2, 2, 2 and 4 by group."""
    subject = [2, 2, 2, 2, 4, 4, 4, 4, 4, 4]
    baseline = [1, 1, 1, 1, 2, 2, 2, 2, 1, 1]
    found = ratio(subject, baseline)
    assert (found.value, found.lower, found.upper, found.rounds) == (4.0, 2.0, 4.0, 10)
    assert str(found) == "4.00 (2.00-4.00)"
    assert str(ratio(subject, subject)) == "1.00"
    assert ratio(subject, baseline, lower_quartile).value == 2.0


@pytest.mark.parametrize("lengths", [(4, 4), (9, 8)], ids=["few", "unequal"])
def test_too_few_or_unequal_rounds_are_refused(lengths):
    with pytest.raises(ValueError, match="rounds"):
        ratio([1.0] * lengths[0], [1.0] * lengths[1])


def test_the_lower_quartile_is_one_of_the_values():
    assert [lower_quartile(range(n)) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_every_call_runs_once_a_round_in_changing_order():
    now, ran = [0.0], []

    def call(name, cost):
        ran.append(name)
        now[0] += cost

    series = time_in_turns(
        {"a": lambda: call("a", 1.0), "b": lambda: call("b", 3.0)},
        seconds=0,
        seed=0,
        clock=lambda: now[0],
        least_rounds=GROUPS * 4,
    )
    assert series == {"a": [1.0] * 20, "b": [3.0] * 20}
    warm_up, rounds = ran[:2], [ran[i : i + 2] for i in range(2, len(ran), 2)]
    assert warm_up == ["a", "b"]
    assert {tuple(sorted(pair)) for pair in rounds} == {("a", "b")}
    assert {pair[0] for pair in rounds} == {"a", "b"}
