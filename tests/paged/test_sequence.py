"""Tokens are checked once, when they enter a sequence."""

import numpy as np
import pytest

from paged import Sequence, SequenceGroup


def test_tokens_become_plain_ints():
    np = pytest.importorskip("numpy")
    seq = Sequence(1, np.arange(3))
    seq.append_token(np.int32(7))
    assert seq.token_ids == [0, 1, 2, 7]
    assert {type(token) for token in seq.token_ids} == {int}
    assert len(seq) == 4


def test_the_prompt_is_copied():
    prompt = [1, 2]
    seq = Sequence(1, prompt)
    seq.append_token(3)
    assert prompt == [1, 2]


@pytest.mark.parametrize("token", [-(2**31), -1, 0, 2**31 - 1])
def test_every_32_bit_token_is_taken(token):
    seq = Sequence(1, [token])
    seq.append_token(token)
    assert seq.token_ids == [token, token]


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (2**31, ValueError),
        (-(2**31) - 1, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_wrong_token_is_named_and_changes_nothing(token, error):
    with pytest.raises(error, match=f"token {token!r} at position 1"):
        Sequence(1, [0, token])
    seq = Sequence(1, [5])
    with pytest.raises(error, match=f"token {token!r}"):
        seq.append_token(token)
    assert seq.token_ids == [5]


def test_a_fork_has_equal_tokens_and_keys_of_its_own():
    parent = Sequence("p", [1, 2], salt="s", extra_key=3)
    child = parent.fork("c")
    child.append_token(9)
    assert (child.seq_id, child.salt, child.extra_key) == ("c", "s", 3)
    assert parent.token_ids == [1, 2]
    assert child.token_ids == [1, 2, 9]


def test_a_group_needs_sequences_of_different_names():
    with pytest.raises(ValueError, match="empty"):
        SequenceGroup("r", [])
    with pytest.raises(ValueError, match="repeats"):
        SequenceGroup("r", [Sequence(1, []), Sequence(1, [])])
    with pytest.raises(TypeError, match=r"request_id is \[1\]; it must be hashable"):
        SequenceGroup([1], [Sequence(1, [])])


@pytest.mark.parametrize("name", ["priority", "arrival_time"])
def test_a_group_is_ordered_by_finite_numbers(name):
    for value in (3, -2.5, 10**400, np.int64(7), np.float32(0.5)):
        assert getattr(SequenceGroup("r", [Sequence(1, [])], **{name: value}), name) == value
    for value, error in (
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (np.float32("-inf"), ValueError),
        (None, TypeError),
        ("1", TypeError),
        (True, TypeError),
        (1j, TypeError),
    ):
        with pytest.raises(error, match=f"{name} is "):
            SequenceGroup("r", [Sequence(1, [])], **{name: value})


def test_reprs_show_what_matters():
    assert repr(Sequence("a", [1, 2], salt="s")) == "Sequence('a', [1, 2], salt='s')"
    assert "... 100 tokens" in repr(Sequence("a", range(100)))
    assert "seq_ids=['a']" in repr(SequenceGroup("r", [Sequence("a", [])]))
