"""Draws docs/block-table.png: two sequences, their block tables and the pool, as a manager has them.

Run from the top of the repository: python docs/draw_block_table.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paged import BlockSpaceManager, CacheConfig, Sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 8
TEXTS = {
    "A": ["the", "cat", "sat", "on", "the", "mat", "and", "slept", "all", "day"],
    "B": ["the", "cat", "sat", "on", "the", "roof"],
}
COLOURS = {"A": "#9CCBE8", "B": "#F5C97A", "both": "#8FD3BC"}
CELL, ROW = 1.0, 0.8  # size of one token slot
TABLE_X, POOL_X = 5.6, 10.4


def manage() -> dict[str, list[int]]:
    """Block tables of the two texts after other sequences have come and gone."""
    manager = BlockSpaceManager(
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, watermark=0.0)
    )
    earlier = [Sequence(number, range(100 * number, 100 * number + 9)) for number in (1, 2)]
    for sequence in earlier:
        manager.allocate(sequence)
    manager.free(earlier[1])
    manager.free(earlier[0])
    words = sorted({word for text in TEXTS.values() for word in text})
    tables = {}
    for name, text in TEXTS.items():
        sequence = Sequence(name, [words.index(word) for word in text])
        manager.allocate(sequence)
        manager.mark_computed(sequence, len(sequence))
        tables[name] = manager.block_table(sequence)
    return tables


def draw_block(axes: Axes, x: float, y: float, tokens: list[str], colour: str) -> None:
    """One block: a row of slots, the filled ones coloured."""
    for slot in range(BLOCK_SIZE):
        filled = slot < len(tokens)
        axes.add_patch(
            Rectangle(
                (x + slot * CELL, y),
                CELL,
                ROW,
                facecolor=colour if filled else "white",
                edgecolor="#444444",
                linewidth=0.8,
            )
        )
        if filled:
            axes.text(x + (slot + 0.5) * CELL, y + ROW / 2, tokens[slot], ha="center", va="center")


def draw() -> Figure:
    """The whole picture."""
    tables = manage()
    shared = set(tables["A"]) & set(tables["B"])
    figure = Figure(figsize=(10, 4.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    content: dict[int, tuple[list[str], str]] = {}
    y = 7.35
    for x, title in (
        (2 * CELL, "sequences"),
        (TABLE_X + CELL / 2, "block table"),
        (POOL_X + 2 * CELL, "pool of physical blocks"),
    ):
        axes.text(x, y + 1.35, title, ha="center", va="center", weight="bold")
    for name, text in TEXTS.items():
        for logical, block in enumerate(tables[name]):
            tokens = text[logical * BLOCK_SIZE : (logical + 1) * BLOCK_SIZE]
            colour = COLOURS["both" if block in shared else name]
            content[block] = tokens, colour
            draw_block(axes, 0, y, tokens, colour)
            axes.add_patch(
                Rectangle((TABLE_X, y), CELL, ROW, facecolor=colour, edgecolor="#444444")
            )
            axes.text(TABLE_X + CELL / 2, y + ROW / 2, str(block), ha="center", va="center")
            target = (NUM_BLOCKS - 1 - block) * 1.05 + ROW / 2
            axes.annotate(
                "",
                (POOL_X - 0.5, target),
                (TABLE_X + CELL, y + ROW / 2),
                arrowprops={"arrowstyle": "->", "color": "#444444"},
            )
            y -= ROW
        axes.text(-0.4, y + ROW * (len(tables[name]) / 2 + 0.5), name, ha="center", weight="bold")
        y -= 1.3
    for block in range(NUM_BLOCKS):
        y = (NUM_BLOCKS - 1 - block) * 1.05
        tokens, colour = content.get(block, ([], "white"))
        draw_block(axes, POOL_X, y, tokens, colour)
        axes.text(POOL_X - 0.25, y + ROW / 2, str(block), ha="center", va="center")
    axes.set(xlim=(-0.8, POOL_X + 4.2), ylim=(-0.2, 9.1))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).parent / "block-table.png")
