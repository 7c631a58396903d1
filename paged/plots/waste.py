"""What a block size costs: slots without a token, against tokens per block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .style import HEADROOM, OWNER_COLOURS, FilePath, curve_style, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def waste_against_block_size(
    rows: Sequence[Mapping[str, Any]],
    *,
    recommended: int | None = None,
    ylabel: str = "slots without a token, %",
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """Share of the slots in used blocks that holds no token, for each block size.

    rows: one mapping per block size: `block_size` in tokens, and under each other key, which names
        a curve ("closed form", "replayed", the name of a trace), a share in 0..1, or None where it
        was not measured.
    recommended: a block size to mark.
    ylabel: what the shares are of, should some be of something else.
    Raises ValueError without rows, without a curve, or for a share outside 0..1.
    """
    cells = [cell for row in rows for cell in row.items()]
    names = list(dict.fromkeys(k for k, share in cells if k != "block_size" and share is not None))
    if not names or any("block_size" not in row for row in rows):
        raise ValueError(
            "rows must hold a mapping per block size, with block_size and at least one curve;"
            f" got {list(rows)}"
        )
    figure = new_figure(8, 4.2)
    axes = figure.add_subplot()
    for position, name in enumerate(names):
        points = [
            (row["block_size"], row[name])
            for row in sorted(rows, key=lambda row: row["block_size"])
            if row.get(name) is not None
        ]
        for block_size, share in points:
            if not 0 <= share <= 1:
                raise ValueError(f"{name} of block size {block_size} is {share}; it must be 0..1")
        axes.plot(
            [block_size for block_size, _ in points],
            [100 * share for _, share in points],
            color=OWNER_COLOURS[position % len(OWNER_COLOURS)],
            **curve_style(position),
            label=name.replace("_", " "),
        )
    sizes = sorted({row["block_size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="block size, tokens", ylabel=ylabel, title=title or "")
    highest = max(row[name] for row in rows for name in names if row.get(name) is not None)
    axes.set_ylim(0, HEADROOM * 100 * highest or 1)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    if recommended is not None:
        axes.axvline(recommended, color="black", linewidth=1, label=f"recommended: {recommended}")
    axes.legend(frameon=False)
    return saved(figure, path)
