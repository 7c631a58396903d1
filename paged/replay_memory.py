"""Who held which KV memory over the steps of a replay: in pages, and reserved in one piece each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged.block_manager import BlockSpaceManager
from paged.plots import CACHED, FREE, SHARED
from paged.replay_config import final_length
from paged.replay_load import Arrival

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FRAMES = 1024  # of a block map
MAX_CELLS = 2**22  # frames x blocks: a large pool gets fewer frames


@dataclass
class MemoryUse:
    """Token slots that one way of reserving holds, step by step."""

    peak: int = 0
    total: int = 0  # summed over steps
    empty: float = 0.0  # those of `total` that carry no token
    steps: int = 0

    def add(self, held: int, empty: float) -> None:
        """One more step: `held` slots, `empty` of them without a token."""
        self.peak = max(self.peak, held)
        self.total += held
        self.empty += empty
        self.steps += 1

    @property
    def average(self) -> float:
        """Slots held per step."""
        return self.total / max(self.steps, 1)

    @property
    def waste(self) -> float:
        """Share of the slots held, over all steps, that carries no token."""
        return self.empty / max(self.total, 1)


class BlockMap:
    """The owner of each block at steps spread evenly over the run.

    Frames past `max_frames` make room by dropping every second one, earlier and later alike.
    """

    def __init__(self, num_blocks: int) -> None:
        self.steps: list[int] = []
        self._num_blocks = num_blocks
        self._frames: list[NDArray[Any]] = []
        self._stride = 1
        self.max_frames = min(MAX_FRAMES, max(2, MAX_CELLS // num_blocks))

    def add(self, step: int, manager: BlockSpaceManager, running: Iterable[Arrival]) -> None:
        """The blocks as they are at `step`, counted from 0 and without a gap."""
        import numpy as np

        if step % self._stride:
            return
        frame = np.full(self._num_blocks, FREE, dtype=np.int32)
        if manager.cache is not None:
            frame[manager.cache.cached_blocks()] = CACHED
        for owner in running:
            table = manager.block_table(owner.sequence)
            frame[table] = np.where(frame[table] == FREE, owner.index, SHARED)
        self._frames.append(frame)
        self.steps.append(step)
        if len(self._frames) > self.max_frames:
            self._stride *= 2
            self._frames, self.steps = self._frames[::2], self.steps[::2]

    def frames(self) -> NDArray[Any]:
        """int32 [num_frames, num_blocks], as `paged.plots.block_map` takes them."""
        import numpy as np

        return np.stack(self._frames)


class MemoryLog:
    """Notes a step's memory in pages and, for the same sequences, in contiguous pieces.

    A contiguous sequence reserves once, when it is admitted: room for the longest sequence of the
    trace, or the next power of two of its own final length (as if that were known).
    """

    def __init__(self, block_size: int, num_blocks: int, longest: int) -> None:
        self.block_size, self.longest = block_size, longest
        self.paged, self.contiguous_max, self.contiguous_pow2 = (MemoryUse() for _ in range(3))
        self.block_map = BlockMap(num_blocks)

    def note(self, manager: BlockSpaceManager, running: list[Arrival]) -> None:
        """One more step, and who holds blocks in it."""
        self.block_map.add(self.paged.steps, manager, running)
        stats = manager.stats()
        held = stats.gpu.num_used * self.block_size
        self.paged.add(held, held * stats.internal_fragmentation)
        num_tokens = sum(len(owner.sequence) for owner in running)
        held = self.longest * len(running)
        self.contiguous_max.add(held, held - num_tokens)
        held = sum(next_power_of_two(final_length(owner.request)) for owner in running)
        self.contiguous_pow2.add(held, held - num_tokens)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()
