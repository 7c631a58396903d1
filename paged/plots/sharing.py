"""Which sequences share which blocks: their tables drawn as one tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import ceil
from typing import TYPE_CHECKING, Any

from paged.block_table import DROPPED

from .style import DARK, EDGE, OWNER_COLOURS, SHARED, STATE_COLOURS, FilePath, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paged.block_manager import BlockSpaceManager
    from paged.block_table import BlockTable
    from paged.sequence import SequenceLike

MOST_SEQUENCES = 200
LETTERS = 115  # of 7 points, in the width of the picture
HEIGHT = 0.62  # of a bar, in rows


@dataclass
class Run:
    """Neighbouring entries that the tables of the same sequences have in common.

    Their blocks are all shared, all held once, or all dropped behind a sliding window.
    """

    start: int  # index in the tables
    blocks: list[int]
    tables: list[BlockTable]
    is_shared: bool
    branches: list[float]  # y of each sequence that ends with it, and of each run behind it

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    @property
    def y(self) -> float:
        return (min(self.branches) + max(self.branches)) / 2


def prefix_sharing_tree(
    manager: BlockSpaceManager,
    sequences: Iterable[SequenceLike] | None = None,
    *,
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """The block tables of sequences on the GPU as one tree: tokens to the right, a row per sequence.

    A bar is a run of blocks, with their ids where these fit; it is black where several sequences
    hold it, and forks where their tables part.

    sequences: which; None: all that the manager has. Raises ValueError for none or more than 200,
    and what `manager.block_table` raises for one that has no table.
    """
    tables = list(manager.tables.values())
    if sequences is not None:
        chosen = list(sequences)
        for seq in chosen:
            manager.block_table(seq)  # the manager's error for one without a table
        tables = [manager.tables[seq.seq_id] for seq in chosen]
    if not 0 < len(tables) <= MOST_SEQUENCES:
        raise ValueError(f"sequences must be 1 to {MOST_SEQUENCES}, got {len(tables)}")

    rows: dict[Any, float] = {}  # seq_id -> y
    runs = list(grow_tree(tables, 0, manager.gpu.ref_counts, rows))
    longest = max([1, *(len(table.blocks) for table in tables)])
    block_size = manager.config.block_size
    colours = {
        table.seq_id: OWNER_COLOURS[number % len(OWNER_COLOURS)]
        for number, table in enumerate(manager.tables.values())
    }
    figure = new_figure(8, 0.8 + 0.36 * len(tables))
    axes = figure.add_subplot()
    for run in runs:
        colour = STATE_COLOURS[SHARED] if run.is_shared else colours[run.tables[0].seq_id]
        _draw(axes, run, colour, block_size, LETTERS / longest)
    right = 1.02 * longest * block_size
    for table in tables:
        y = rows.setdefault(table.seq_id, float(len(rows)))
        end = len(table.blocks) * block_size
        axes.hlines(y, end, right, color=EDGE, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{table.seq_id}: {table.num_tokens} tokens",
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    axes.set(xlim=(0, right), ylim=(len(tables) - 0.4, -0.6), yticks=[], title=title or "")
    axes.set_xticks(range(0, longest * block_size + 1, ceil(longest / 12) * block_size))
    axes.set_xlabel(f"tokens, in blocks of {block_size} with their ids; black: shared")
    axes.spines[["left", "top", "right"]].set_visible(False)
    return saved(figure, path)


def grow_tree(
    tables: list[BlockTable], start: int, ref_counts: list[int], rows: dict[Any, float]
) -> Iterator[Run]:
    """The runs from entry `start` on of tables that are equal before it, those behind first.

    `rows` receives the row of each sequence, where its last run ends.
    """

    def kind(block: int) -> tuple[bool, bool]:
        return block == DROPPED, block != DROPPED and ref_counts[block] > 1

    by_block: dict[int, list[BlockTable]] = {}
    for table in tables:
        if len(table.blocks) > start:
            by_block.setdefault(table.blocks[start], []).append(table)
    for holders in by_block.values():
        columns = map(set, zip(*(table.blocks[start:] for table in holders), strict=False))
        common = [column.pop() for column in takewhile(lambda c: len(c) == 1, columns)]
        (_, is_shared), blocks = next(groupby(common, kind))
        run = Run(start, list(blocks), holders, is_shared, branches=[])
        for table in holders:
            if len(table.blocks) == run.end:
                run.branches.append(rows.setdefault(table.seq_id, float(len(rows))))
        for child in grow_tree(holders, run.end, ref_counts, rows):
            yield child
            if child.start == run.end:
                run.branches.append(child.y)
        yield run


def _draw(axes: Axes, run: Run, colour: str, block_size: int, letters_per_block: float) -> None:
    """A bar, what it says, and the line from which its branches go on."""
    from matplotlib.patches import Rectangle

    dropped = run.blocks[0] == DROPPED
    left, right = run.start * block_size, run.end * block_size
    axes.add_patch(
        Rectangle(
            (left, run.y - HEIGHT / 2),
            right - left,
            HEIGHT,
            facecolor="white" if dropped else colour,
            edgecolor=EDGE,
            linestyle="--" if dropped else "-",
        )
    )
    axes.text(
        (left + right) / 2,
        run.y,
        _words(run, letters_per_block * len(run.blocks)),
        color="white" if colour in DARK and not dropped else "black",
        fontsize=7,
        ha="center",
        va="center",
    )
    if len(run.branches) > 1:
        ends = [min(run.branches), max(run.branches)]
        axes.plot([right, right], ends, color=EDGE, linewidth=1, zorder=0)


def _words(run: Run, room: float) -> str:
    """What a bar says of its blocks: their ids, else how many, else nothing."""
    if run.blocks[0] == DROPPED:
        options = ["behind the window", "dropped"]
    else:
        options = [block_ids(run.blocks), f"{len(run.blocks)} blocks"]
    return next((text for text in options if len(text) <= room), "")


def block_ids(blocks: list[int]) -> str:
    """Block ids with runs of neighbours written as one: 0-2, 7."""
    spans: list[list[int]] = []
    for block in blocks:
        if spans and block == spans[-1][1] + 1:
            spans[-1][1] = block
        else:
            spans.append([block, block])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
