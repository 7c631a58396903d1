"""Paged beside dense: what was found, as plain values, as text and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paged.config import block_bytes, is_cpu

from .attention import AttentionShape
from .reservation import LONGEST, PAGES, POWER_OF_TWO, Reservation
from .tables import text_table
from .timing import Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paged.plots.style import FilePath

DENSE = "dense"
SHUFFLED, IN_ORDER, GATHERED = "paged, shuffled", "paged, in order", "gathered, then dense"
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class AttentionTime:
    """One way of attending in one phase.

    milliseconds  lower quartile of a call
    ratio         to dense attention, measured in turns
    error         largest difference from float64 over the largest value
    """

    phase: str
    name: str
    milliseconds: float
    ratio: Ratio
    error: float


@dataclass(frozen=True)
class DenseComparison:
    """The answer of `compare_with_dense`."""

    requests: int
    seq_lens: dict[str, tuple[int, ...]]  # of the timed batch, by phase
    block_size: int
    shape: AttentionShape
    device: str
    threads: int
    times: tuple[AttentionTime, ...]
    memory: tuple[Reservation, ...]
    bytes_per_token: int  # K and V of all layers
    versions: dict[str, str | None]
    commit: str | None

    def time(self, phase: str, name: str = SHUFFLED) -> AttentionTime:
        """One row of `times`."""
        return next(row for row in self.times if (row.phase, row.name) == (phase, name))

    def scheme(self, name: str) -> Reservation:
        """One row of `memory`."""
        return next(row for row in self.memory if row.scheme == name)

    @property
    def layers(self) -> int:
        """Layers that the memory figures are of."""
        shape = self.shape
        return self.bytes_per_token // block_bytes(
            1, shape.num_kv_heads, shape.head_dim, shape.dtype
        )

    @property
    def verdict(self) -> str:
        """What paging costs and saves, in three sentences."""
        pages, longest, power = (
            self.scheme(name).average for name in (PAGES, LONGEST, POWER_OF_TWO)
        )
        place = "this CPU, which tells nothing of a GPU" if is_cpu(self.device) else self.device
        decode, prefill = self.time(DECODE), self.time(PREFILL)
        worst = max(row.error for row in self.times if row.name in (SHUFFLED, IN_ORDER))
        dense = max(row.error for row in self.times if row.name == DENSE)
        return (
            f"Memory: a running sequence holds {pages:,.0f} token slots in pages, {longest:,.0f}"
            f" when all reserve the longest length and {power:,.0f} as the next power of two: the"
            f" same memory carries {longest / pages:.1f} and {power / pages:.2f} times as many"
            f" sequences. Time on {place}: attention over shuffled pages takes {decode.ratio} times as long"
            f" as dense in decode, {prefill.ratio} in prefill. Error against float64: paged"
            f" {worst:.1e}, dense {dense:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self) | {"verdict": self.verdict}

    def plot(self, path: FilePath | None = None) -> Figure:
        """Memory by scheme, and times over dense with their spread."""
        from paged.plots.dense import memory_and_time

        return memory_and_time(
            [asdict(row) for row in self.memory],
            [
                {"name": f"{row.phase}: {row.name}", **asdict(row.ratio)}
                for row in self.times
                if row.name != DENSE
            ],
            path=path,
        )

    def __str__(self) -> str:
        memory = [
            [
                row.scheme,
                f"{row.average * self.bytes_per_token / 2**20:,.1f}",
                f"{row.use_at_end:.1%}",
                f"{row.use_over_life:.1%}",
                *([] if row.sequences is None else [f"{row.sequences:,}"]),
            ]
            for row in self.memory
        ]
        head = ["memory of a running sequence", "MiB", "used at end", "over life", "fit"]
        attention = [
            [
                f"{row.phase}, {row.name}",
                f"{row.milliseconds:.3g}",
                "1" if row.name == DENSE else row.ratio,
                f"{row.error:.1e}",
            ]
            for row in self.times
        ]
        layers = "1 layer" if self.layers == 1 else f"{self.layers:,} layers"
        weighed = (
            f"MiB of K and V in {layers} of {self.shape.num_kv_heads} KV heads of"
            f" {self.shape.head_dim}, {self.shape.dtype}. Used: share of what is reserved that"
            " holds a token, when a sequence ends and over its life. Oracle: reserves the length"
            " that a sequence will have"
        )
        if self.memory[0].sequences is not None:
            weighed += ". Fit: sequences that the memory holds"
        return "\n\n".join(
            [
                f"{text_table(head[: len(memory[0])], memory)}\n{weighed}",
                text_table(["attention of one layer", "ms", "x dense", "error"], attention),
                f"{self.shape}, blocks of {self.block_size}, {self.device}, threads {self.threads};"
                f" decode of {_sequences(self.seq_lens[DECODE])}",
                self.verdict,
            ]
        )


def _sequences(lens: tuple[int, ...]) -> str:
    if len(lens) == 1:
        return f"1 sequence of {lens[0]:,} tokens"
    return f"{len(lens)} sequences of {min(lens):,} to {max(lens):,} tokens"
