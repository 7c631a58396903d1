"""The last operations on blocks, so that an error can say who had a block and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Operation(NamedTuple):
    name: str
    seq_id: Any
    blocks: Sequence[int]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.blocks[:4])) + (", ..." if len(self.blocks) > 4 else "")
        return f"{self.name} by sequence {self.seq_id!r} (blocks [{shown}])"


class History:
    """A ring of operations: constant cost per operation, searched only when an error is written."""

    def __init__(self, length: int = 4096) -> None:
        self._operations: deque[tuple[str, Any, Sequence[int]]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, name: str, seq_id: Any, blocks: Sequence[int]) -> None:
        self._operations.append((name, seq_id, blocks))

    def last_of_sequence(self, seq_id: Any) -> Operation | None:
        return self._last(lambda operation: bool(operation.seq_id == seq_id))

    def last_of_block(self, block: int) -> Operation | None:
        return self._last(lambda operation: block in operation.blocks)

    def _last(self, wanted: Callable[[Operation], bool]) -> Operation | None:
        return next(filter(wanted, map(Operation._make, reversed(self._operations))), None)
