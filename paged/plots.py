"""Pictures. Each function returns a matplotlib Figure; none needs a display.

Colours are Okabe and Ito's, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/),
and what is not an owner differs from owners in lightness, so that it survives a print in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FREE, CACHED, SHARED = -1, -2, -3  # what a frame of `block_map` says of a block without one owner

OWNER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STATE_COLOURS = {SHARED: "#000000", CACHED: "#DDDDDD", FREE: "#FFFFFF"}
STATE_LABELS = {
    SHARED: "shared by several sequences",
    CACHED: "cached, no owner",
    FREE: "free",
}


def block_map(
    frames: NDArray[Any], *, steps: Sequence[int] | None = None, title: str | None = None
) -> Figure:
    """Who owns each physical block, frame by frame: time to the right, block ids upwards.

    frames: int [num_frames, num_blocks]: the owner's number (>= 0), or FREE, CACHED or SHARED.
        Owner colours repeat: neighbouring numbers differ.
    steps: the step each frame was taken at; None: 0, 1, 2, ...
    Raises ValueError for frames of any other kind or steps of another length.
    """
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch
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

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
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

    owners: Any = tuple(Patch(facecolor=colour) for colour in OWNER_COLOURS[:3])
    state_patches = [Patch(facecolor=c, edgecolor="#888888") for c in STATE_COLOURS.values()]
    figure.legend(
        [owners, *state_patches],
        ["one sequence (colours repeat)", *(STATE_LABELS[state] for state in STATE_COLOURS)],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
    return figure
