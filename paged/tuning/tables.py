"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:{widths[0]}}", *right]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
