"""`python -m paged debug FILE`: replay a journal and stop where the bookkeeping breaks."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import check_int
from .errors import InvariantError
from .journal import Replay
from .plots import CACHED, FREE, SHARED, owners

if TYPE_CHECKING:
    from .block_manager import BlockSpaceManager

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijklmnopqrstuvwxyz"  # without c: cached
_LINE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="FILE", help="what manager.record(FILE) has written")
    parser.add_argument(
        "--picture", metavar="PNG", help="draw the block map over the calls to this file"
    )
    parser.add_argument(
        "--frames",
        type=int,
        default=200,
        help="calls before the end that the picture shows (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0 when every call went as recorded and all invariants held, else 1."""
    from tqdm import tqdm

    check_int("frames", args.frames, minimum=1)
    replay = Replay(args.journal)
    manager = replay.manager
    frames: deque[list[int]] = deque(maxlen=args.frames)
    numbers: deque[int] = deque(maxlen=args.frames)
    known: dict[Any, int] = {}
    where, problem = "no call", None
    for number, call, differs in tqdm(replay, total=len(replay), unit="call", file=sys.stderr):
        where = f"line {number}: {call}"
        numbers.append(number)
        frames.append(owners(manager, known))
        problem = differs and f"outcome {differs}"
        try:
            manager.check_invariants()
        except InvariantError as error:
            problem = f"invariant broken: {error}"
        if problem:
            break
    print(where)
    print(problem or f"{len(replay)} calls, every invariant held")
    print(manager)
    print(text_map(manager, known))
    if args.picture and frames:
        _draw(list(frames), list(numbers), problem, args.picture)
        print(f"block map: {args.picture}")
    return 1 if problem else 0


def text_map(manager: BlockSpaceManager, numbers: dict[Any, int]) -> str:
    """The GPU pool as text: one character per block, and who each letter is."""
    letters = dict(enumerate(_LETTERS)) | {FREE: ".", CACHED: "c", SHARED: "*"}
    marks = "".join(letters.get(owner, "+") for owner in owners(manager, numbers))
    lines = [f"{at:8} {marks[at : at + _LINE]}" for at in range(0, len(marks), _LINE)]
    names = [
        f"{letters.get(numbers[table.seq_id], '+')} {table.seq_id!r}: {table.num_tokens} tokens"
        f" in {table.blocks}"
        for table in manager.tables.values()
    ]
    return "\n".join([*lines, ". free, c cached, * shared, + further sequences", *names])


def _draw(frames: list[list[int]], numbers: list[int], problem: str | None, path: str) -> None:
    import numpy as np

    from .plots import block_map

    title = problem[:80] if problem else "every invariant held"
    width = max(map(len, frames))  # the pool may have been resized
    image = np.array([frame + [FREE] * (width - len(frame)) for frame in frames])
    figure = block_map(image, steps=numbers, title=title)
    figure.savefig(Path(path))
