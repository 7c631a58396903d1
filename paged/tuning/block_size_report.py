"""What each block size costs, as plain values, as a table and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .choice import Recommendation
from .tables import text_table
from .timing import Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paged.plots.style import FilePath


@dataclass(frozen=True)
class BlockSizeRow:
    """What one block size costs. Shares in 0..1; None: not measured, or unknown to the trace.

    waste_at_end    slots without a token when every sequence has its full length (closed form)
    waste           the same over all steps of all sequences (closed form)
    waste_replayed  the same in the real manager, over the first requests, sharing included
    table_bytes     block table of `num_seqs` sequences as long as the longest
    host_time       scheduler, manager and arrays of a step, over size 16 (or the next to it)
    hit_tokens      prompt tokens found in a cache with room for all, as the trace shows them
    hit_loss        share of the prompt tokens expected to be missed against blocks of one token
    kernel_time     attention of a decode step, over size 16
    sequences       running sequences that fit into the memory, on average over their lives
    """

    block_size: int
    waste_at_end: float
    waste: float
    table_bytes: int
    waste_replayed: float | None = None
    host_time: Ratio | None = None
    hit_tokens: int | None = None
    hit_loss: float | None = None
    kernel_time: Ratio | None = None
    sequences: int | None = None

    @property
    def cost(self) -> float:
        """What the recommendation goes by: empty slots plus expected misses."""
        return self.waste + (self.hit_loss or 0.0)


@dataclass(frozen=True)
class BlockSizeSweep:
    """The answer of `sweep_block_sizes`."""

    requests: int
    replayed_requests: int
    prompt_tokens: int
    longest: int  # tokens of a sequence
    num_seqs: int  # of the block table that is counted
    rows: tuple[BlockSizeRow, ...]
    recommendation: Recommendation
    notes: tuple[str, ...]
    versions: dict[str, str | None]
    commit: str | None

    def row(self, block_size: int) -> BlockSizeRow:
        """The row of one size; KeyError when it was not asked for."""
        return {row.block_size: row for row in self.rows}[block_size]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def plot(self, path: FilePath | None = None) -> Figure:
        """Waste against block size, the recommended one marked."""
        from paged.plots import waste_against_block_size

        return waste_against_block_size(
            [
                {
                    "block_size": row.block_size,
                    "at full length": row.waste_at_end,
                    "over life": row.waste,
                    "over life, replayed": row.waste_replayed,
                    "missed hits": row.hit_loss,
                }
                for row in self.rows
            ],
            recommended=self.recommendation.block_size,
            ylabel="slots without a token, missed prompt tokens, %",
            path=path,
        )

    def __str__(self) -> str:
        columns: dict[str, list[Any]] = {
            "empty at end": [f"{row.waste_at_end:.2%}" for row in self.rows],
            "over life": [f"{row.waste:.2%}" for row in self.rows],
            "replayed": [_share(row.waste_replayed) for row in self.rows],
            "table, KiB": [f"{row.table_bytes / 1024:,.0f}" for row in self.rows],
            "host time": [row.host_time for row in self.rows],
            "hits": [
                None if row.hit_tokens is None else f"{row.hit_tokens / self.prompt_tokens:.1%}"
                for row in self.rows
            ],
            "missed hits": [_share(row.hit_loss) for row in self.rows],
            "kernel time": [row.kernel_time for row in self.rows],
            "fit": [row.sequences for row in self.rows],
        }
        columns = {
            name: ["-" if cell is None else cell for cell in cells]
            for name, cells in columns.items()
            if any(cell is not None for cell in cells)
        }
        sizes = [row.block_size for row in self.rows]
        table = text_table(["block", *columns], list(zip(sizes, *columns.values(), strict=True)))
        return "\n".join([table, *self.notes, f"Take {self.recommendation}"])


def _share(number: float | None) -> str | None:
    return None if number is None else f"{number:.2%}"
