"""Who owns each physical block: over time, or at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import TYPE_CHECKING, Any

from .style import (
    CACHED,
    DARK,
    EDGE,
    FREE,
    OWNER_COLOURS,
    SHARED,
    STATE_COLOURS,
    STATE_LABELS,
    FilePath,
    new_figure,
    saved,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from paged.block_manager import BlockSpaceManager

MOST_NAMED_BLOCKS = 128  # of a pool whose cells have room for words
MOST_NAMED_OWNERS = 8  # in a legend


def owners(manager: BlockSpaceManager, numbers: dict[Any, int]) -> list[int]:
    """For each GPU block the number of its sequence, or a state.

    `numbers` keeps the number of each seq_id from picture to picture; new ones are added. It trusts
    nothing but the tables, so that it can also show a broken manager.
    """
    frame = [FREE] * manager.gpu.num_blocks
    if manager.cache:
        for block in manager.cache.cached_blocks():
            frame[block] = CACHED
    for table in manager.tables.values():
        number = numbers.setdefault(table.seq_id, len(numbers))
        for block in table.held():
            if 0 <= block < len(frame):
                taken = frame[block] not in (FREE, CACHED, number)
                frame[block] = SHARED if taken else number
    return frame


def block_map(
    frames: NDArray[Any],
    *,
    steps: Sequence[int] | None = None,
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """Who owns each physical block, frame by frame: time to the right, block ids upwards.

    frames: int [num_frames, num_blocks]: the owner's number (>= 0), or FREE, CACHED or SHARED.
        Owner colours repeat: neighbouring numbers differ.
    steps: the step each frame was taken at; None: 0, 1, 2, ...
    Raises ValueError for frames of any other kind or steps of another length.
    """
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    frames = np.asarray(frames)
    if frames.ndim != 2 or not frames.size or frames.dtype.kind not in "iu":
        raise ValueError(
            "frames must be integers of shape [num_frames, num_blocks],"
            f" got {frames.dtype} {list(frames.shape)}"
        )
    if frames.min() < SHARED:
        raise ValueError(f"frames must hold owners >= 0, -1, -2 or -3, got {frames.min()}")
    if steps is not None and len(steps) != len(frames):
        raise ValueError(f"steps must have one entry per frame ({len(frames)}), got {len(steps)}")

    colours = [to_rgb(c) for c in (*STATE_COLOURS.values(), *OWNER_COLOURS)]
    palette = np.round(np.array(colours) * 255).astype(np.uint8)
    states = len(STATE_COLOURS)
    image = palette[np.where(frames < 0, frames + states, states + frames % len(OWNER_COLOURS))]

    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    axes.imshow(image.transpose(1, 0, 2), aspect="auto", origin="lower", interpolation="nearest")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if steps is not None:
        last = len(steps) - 1
        axes.xaxis.set_major_formatter(
            lambda x, _: str(steps[round(x)]) if 0 <= round(x) <= last else ""
        )
    axes.set(xlabel="step", ylabel="physical block", title=title or "")
    _add_legend(figure, {})
    return saved(figure, path)


def block_map_of(
    manager: BlockSpaceManager, *, title: str | None = None, path: FilePath | None = None
) -> Figure:
    """Who owns each block of a manager's GPU pool now: a cell per block, row by row.

    Up to 128 blocks each cell says its block id, the seq_id of its owner and, where slots are empty,
    how many hold a token. The axes hold one PolyCollection of cells for each state and owner that
    there is.
    """
    from matplotlib.collections import PolyCollection

    numbers: dict[Any, int] = {}
    frame = owners(manager, numbers)
    num_blocks = len(frame)
    columns = 1 << ceil(log2(2 * num_blocks) / 2)
    rows = ceil(num_blocks / columns)
    named = num_blocks <= MOST_NAMED_BLOCKS

    figure = new_figure(8, 1.2 + (0.5 if named else 7 / columns) * rows)
    axes = figure.add_subplot()
    for state in sorted(set(frame)):
        corners = [divmod(block, columns)[::-1] for block, s in enumerate(frame) if s == state]
        cells = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in corners]
        axes.add_collection(
            PolyCollection(
                cells,
                facecolor=_colour(state),
                edgecolor=EDGE if named else "none",
                linewidth=0.8 if named else 0,
                clip_on=not named,  # the outermost edges lie half outside
                label=str(state),
            )
        )
    if named:
        _name_cells(axes, manager, frame, columns)
        axes.set_axis_off()
    else:
        axes.set(xlabel="physical block = number at the left + number below")
        axes.set_xticks(range(0, columns + 1, columns // 8))
        axes.set_yticks(range(0, rows, ceil(rows / 8)))
        axes.yaxis.set_major_formatter(lambda y, _: str(round(y * columns)))
        axes.patch.set(hatch="///", edgecolor=EDGE)  # shows where no block is
        borders = [divmod(b, columns) for b in range(1, num_blocks) if frame[b] != frame[b - 1]]
        tops = [y for y, _ in borders]
        axes.vlines([x for _, x in borders], tops, [y + 1 for y in tops], "white", linewidth=0.8)
    axes.set(xlim=(0, columns), ylim=(rows, 0), title=title or "")
    _add_legend(figure, numbers)
    return saved(figure, path)


def _colour(state: int) -> str:
    return STATE_COLOURS[state] if state < 0 else OWNER_COLOURS[state % len(OWNER_COLOURS)]


def _name_cells(axes: Axes, manager: BlockSpaceManager, frame: list[int], columns: int) -> None:
    """Write into each cell its block id, who holds it, and how full it is when it is not full."""
    block_size = manager.config.block_size
    holders: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for table in manager.tables.values():
        for block in table.held():
            holders.setdefault(block, []).append(str(table.seq_id))
        for index, block in enumerate(table.blocks):
            filled[block] = max(filled.get(block, 0), table.num_tokens - index * block_size)
    room = 110 // columns  # letters
    for block, state in enumerate(frame):
        y, x = divmod(block, columns)
        colour = "white" if _colour(state) in DARK else "black"
        axes.text(x + 0.06, y + 0.1, str(block), fontsize=6, color=colour, va="top")
        names = holders.get(block, [])
        text = "cached" if state == CACHED else ", ".join(names)
        if len(text) > room:
            text = f"x{len(names)}" if len(names) > 1 else "…" + text[1 - room :]
        axes.text(x + 0.5, y + 0.62, text, fontsize=8, color=colour, ha="center", va="center")
    for block, tokens in filled.items():
        if tokens < block_size and 0 <= block < len(frame):
            y, x = divmod(block, columns)
            colour = "white" if _colour(frame[block]) in DARK else "black"
            fill = f"{tokens}/{block_size}"
            axes.text(x + 0.94, y + 0.1, fill, fontsize=6, color=colour, ha="right", va="top")


def _add_legend(figure: Figure, numbers: dict[Any, int]) -> None:
    """States, and owners by name where these are few enough."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[Any, str]] = []
    if 0 < len(numbers) <= MOST_NAMED_OWNERS:
        entries = [(Patch(color=_colour(number)), str(name)) for name, number in numbers.items()]
    else:
        patches = tuple(Patch(facecolor=colour) for colour in OWNER_COLOURS[:3])
        entries = [(patches, "one sequence (colours repeat)")]
    entries += [
        (Patch(facecolor=colour, edgecolor=EDGE), STATE_LABELS[state])
        for state, colour in STATE_COLOURS.items()
    ]
    handles, labels = zip(*entries, strict=True)
    figure.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
