"""Token sequences as the manager sees them, and groups of sequences that share a prompt."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable
from contextlib import suppress
from numbers import Real
from operator import index
from reprlib import repr as shortened
from typing import Any, Protocol


class SequenceLike(Protocol):
    """What the manager needs of a sequence; any object with these serves.

    Tokens change only through `append_token` and through the manager (`step`, `trim`): the
    manager keeps digests of what it has seen.
    """

    seq_id: Any
    token_ids: list[int]

    def append_token(self, token: int) -> None: ...
    def __len__(self) -> int: ...


class Sequence:
    """The tokens of one request, prompt and generated alike.

    seq_id            hashable name, unique among live sequences
    prompt_token_ids  ints (numpy ones too) in [-2**31, 2**31)
    salt, extra_key   None, int, float, str, bytes or a tuple of these: sequences share cached
                      blocks only when both are equal (a tenant's secret; an adapter, an image)
    """

    __slots__ = ("digests", "extra_key", "salt", "seq_id", "token_ids")

    def __init__(
        self,
        seq_id: Hashable,
        prompt_token_ids: Iterable[int],
        *,
        salt: Any = None,
        extra_key: Any = None,
    ) -> None:
        check_hashable("seq_id", seq_id)
        self.seq_id = seq_id
        self.token_ids = checked_tokens(prompt_token_ids, "prompt_token_ids")
        self.salt = salt
        self.extra_key = extra_key
        self.digests: Any = None  # the manager's place for block digests: computed once, kept here

    def append_token(self, token: int) -> None:
        """Add one generated token."""
        if type(token) is not int or not -0x80000000 <= token <= 0x7FFFFFFF:
            (token,) = checked_tokens((token,))
        self.token_ids.append(token)

    def fork(self, seq_id: Hashable) -> Sequence:
        """A new sequence with equal tokens, to be passed to `BlockSpaceManager.fork`."""
        child = Sequence(seq_id, (), salt=self.salt, extra_key=self.extra_key)
        child.token_ids = self.token_ids.copy()
        return child

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.token_ids[:8]))
        more = f", ... {len(self)} tokens" if len(self) > 8 else ""
        keys = "".join(
            f", {name}={value!r}"
            for name, value in (("salt", self.salt), ("extra_key", self.extra_key))
            if value is not None
        )
        return f"Sequence({self.seq_id!r}, [{shown}{more}]{keys})"


class SequenceGroup:
    """One request: sequences that start from the same prompt and are admitted together.

    arrival_time in seconds on any clock; a lower priority number is more urgent. Both are finite.
    """

    __slots__ = ("arrival_time", "priority", "request_id", "seqs")

    def __init__(
        self,
        request_id: Hashable,
        seqs: Iterable[SequenceLike],
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
    ) -> None:
        check_hashable("request_id", request_id)
        self.request_id = request_id
        self.seqs = sequence_list("seqs", seqs)
        self.arrival_time = _finite("arrival_time", arrival_time)
        self.priority = _finite("priority", priority)
        if not self.seqs:
            raise ValueError(f"seqs of group {request_id!r} is empty; it must hold a sequence")
        ids = [seq.seq_id for seq in self.seqs]
        if len(set(ids)) != len(ids):
            raise ValueError(f"seqs of group {request_id!r} repeats a seq_id: {ids}")

    def __repr__(self) -> str:
        ids = [seq.seq_id for seq in self.seqs]
        return f"SequenceGroup({self.request_id!r}, seq_ids={ids}, priority={self.priority})"


def members(seq_or_group: SequenceLike | SequenceGroup) -> list[SequenceLike]:
    """The sequences of a group, or the one sequence itself, checked."""
    if isinstance(seq_or_group, SequenceGroup):
        return sequence_list("seqs", seq_or_group.seqs)
    check_sequence("seq_or_group", seq_or_group)
    return [seq_or_group]


def sequence_list(name: str, seqs: Iterable[SequenceLike]) -> list[SequenceLike]:
    """`seqs` as a list; TypeError names the first that is no sequence."""
    seqs = as_list(name, seqs, "sequences")
    for position, seq in enumerate(seqs):
        if type(seq) is not Sequence:
            check_sequence(f"{name}[{position}]", seq)
    return seqs


def check_sequence(name: str, seq: Any) -> None:
    """TypeError unless `seq` is what the manager needs of a sequence."""
    if type(seq) is not Sequence and not all(
        hasattr(seq, member) for member in ("seq_id", "token_ids", "append_token", "__len__")
    ):
        raise TypeError(
            f"{name} is {shortened(seq)}; it must be a Sequence, or an object with seq_id, "
            f"token_ids, append_token and len()"
        )
    check_hashable("seq_id", seq.seq_id)


def check_hashable(name: str, value: Any) -> None:
    """TypeError, naming the argument, unless `value` can be a key."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} is {shortened(value)}; it must be hashable") from None


def cut_tokens(seq: SequenceLike, num_tokens: int) -> None:
    """Forget all tokens after the first ones; TypeError when `token_ids` is no list to cut."""
    with suppress(TypeError, ValueError):
        del seq.token_ids[num_tokens:]
    if len(seq) != num_tokens:
        raise TypeError(
            f"token_ids of sequence {seq.seq_id!r} is {shortened(seq.token_ids)}; to be trimmed it "
            f"must be one list, not a copy on each access or another kind"
        )


def as_list(name: str, values: Iterable[Any], content: str) -> list[Any]:
    """`values` as a list; TypeError says that it must be one of `content`."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {shortened(values)}; it must be a list of {content}") from None


def as_count(name: str, value: Any) -> int:
    """`value`, an int >= 0 of any kind but bool, as an int; errors name the argument."""
    count = value if type(value) is int else _as_int(value)
    if count is None:
        raise TypeError(f"{name} is {shortened(value)}; it must be an int >= 0")
    if count < 0:
        raise ValueError(f"{name} is {value}; it must be an int >= 0")
    return count


def checked_tokens(tokens: Iterable[int], name: str = "tokens") -> list[int]:
    """Tokens as a list of plain ints; TypeError or ValueError names the first that is none."""
    tokens = as_list(name, tokens.tolist() if hasattr(tokens, "tolist") else tokens, "ints")
    kinds = set(map(type, tokens))
    with suppress(TypeError, OverflowError):
        packed = array("i", tokens)
        if kinds <= {int}:
            return tokens
    for position, token in enumerate(tokens):
        _check_token(token, position)
    return packed.tolist()


def _check_token(token: Any, position: int) -> None:
    wanted = "tokens must be ints in [-2**31, 2**31)"
    number = _as_int(token)
    if number is None:
        raise TypeError(f"token {token!r} at position {position} is no int; {wanted}")
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"token {token!r} at position {position} is out of range; {wanted}")


def _finite(name: str, value: Any) -> Any:
    """`value`, a number of any kind but bool, neither infinite nor NaN; errors name the argument."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name} is {shortened(value)}; it must be a number")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def _as_int(value: Any) -> int | None:
    """An int of any kind but bool, numpy's and torch's included, as a plain one; else None."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return index(value)
    except TypeError:
        return None
