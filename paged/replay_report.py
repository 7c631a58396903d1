"""What a replay found, as plain values and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paged.replay_config import TOLERANCES, ReplayConfig
from paged.replay_memory import MemoryLog


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of a replay; lengths in tokens.

    seconds          by part: manager, write, attention, dense (the same attention without pages)
    max_error        largest absolute difference of paged attention from dense in float64
    max_error_dense  that of dense attention in the dtype of the cache, over the same rows
    """

    config: ReplayConfig
    backend: str
    requests: int
    requests_clipped: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    recomputed_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_blocks: int
    bytes_per_token: int  # K and V of all layers
    memory: MemoryLog
    seconds: dict[str, float]
    max_error: float
    max_error_dense: float
    rows_checked: int
    versions: dict[str, str | None]
    commit: str | None

    @property
    def agrees(self) -> bool:
        """Whether every sampled row differs by rounding alone."""
        return self.max_error <= TOLERANCES[self.config.dtype]

    @property
    def attention_over_dense(self) -> float:
        """Time of paged attention over that of dense attention."""
        return self.seconds["attention"] / self.seconds["dense"]

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON. Shares in 0..1, memory in blocks and tokens."""
        memory, block_size = self.memory, self.config.block_size
        return {
            "requests": self.requests,
            "requests_clipped": self.requests_clipped,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "prefix_queried_tokens": self.prefix_queried_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "bytes_per_token": self.bytes_per_token,
            "blocks_total": self.num_blocks,
            "blocks_peak": memory.paged.peak // block_size,
            "blocks_average": memory.paged.average / block_size,
            "tokens_reserved_peak_contiguous_max": memory.contiguous_max.peak,
            "tokens_reserved_average_contiguous_max": memory.contiguous_max.average,
            "tokens_reserved_peak_contiguous_pow2": memory.contiguous_pow2.peak,
            "tokens_reserved_average_contiguous_pow2": memory.contiguous_pow2.average,
            "waste_paged": memory.paged.waste,
            "waste_contiguous_max": memory.contiguous_max.waste,
            "waste_contiguous_pow2": memory.contiguous_pow2.waste,
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
            "attention_over_dense": self.attention_over_dense,
            "max_error": self.max_error,
            "max_error_dense": self.max_error_dense,
            "rows_checked": self.rows_checked,
            "backend": self.backend,
            "device": self.config.device,
            "config": asdict(self.config),
            "versions": self.versions,
            "commit": self.commit,
        }

    def __str__(self) -> str:
        return "\n\n".join("\n".join(part) for part in self._parts())

    def _parts(self) -> tuple[list[str], ...]:
        return self._work(), self._memory(), self._time(), self._check()

    def _work(self) -> list[str]:
        longest = self.config.max_length
        hit_share = self.prefix_hit_tokens / max(self.prefix_queried_tokens, 1)
        notes = {
            "requests": f"{self.requests_clipped:,} of them clipped to {longest:,} tokens",
            "prefix_hit_tokens": f"{hit_share:.1%} of the prompt tokens asked for",
            "preemptions": f"{self.recomputed_tokens:,} tokens computed again",
        }
        names = ("requests", "steps", "prompt_tokens", "generated_tokens")
        return [
            f"{name.replace('_', ' '):20}{getattr(self, name):>12,}   {notes.get(name, '')}".rstrip()
            for name in (*names, "prefix_hit_tokens", "preemptions")
        ]

    def _memory(self) -> list[str]:
        mib, size, memory = self.bytes_per_token / 2**20, self.config.block_size, self.memory
        rows = (
            (f"in blocks of {size} tokens", memory.paged),
            (f"contiguous, {memory.longest:,} tokens each", memory.contiguous_max),
            ("contiguous, next power of two", memory.contiguous_pow2),
        )
        return [
            f"{'KV memory, all layers':34}{'peak':>14}{'average':>14}{'without a token':>18}",
            *(
                f"{name:34}{use.peak * mib:>10,.1f} MiB{use.average * mib:>10,.1f} MiB"
                f"{use.waste:>18.1%}"
                for name, use in rows
            ),
            f"blocks: {memory.paged.peak // size:,} at peak, {memory.paged.average / size:,.1f} on"
            f" average, {self.num_blocks:,} in the pool",
        ]

    def _time(self) -> list[str]:
        names = {
            "manager": "block manager",
            "write": "writing K and V",
            "attention": "paged attention",
            "dense": "the same attention, dense",
        }
        return [
            f"{'time':34}{'in all':>14}{'per step':>14}",
            *(
                f"{name:34}{self.seconds[part]:>12.3f} s{self.seconds[part] * 1e3 / self.steps:>11.3f} ms"
                for part, name in names.items()
            ),
            f"paged attention took {self.attention_over_dense:.2f} times as long as dense",
        ]

    def _check(self) -> list[str]:
        dtype = self.config.dtype
        verdict = "" if self.agrees else f": MORE THAN ROUNDING, which is {TOLERANCES[dtype]:g}"
        versions = ", ".join(f"{name} {version or '-'}" for name, version in self.versions.items())
        return [
            f"largest error {self.max_error:.1e} against dense float64, over {self.rows_checked:,}"
            f" sampled rows (dense {dtype}: {self.max_error_dense:.1e}){verdict}",
            f"backend {self.backend} on {self.config.device}, {dtype}, threads"
            f" {self.config.threads}; {versions}; commit {self.commit[:12] if self.commit else '-'}",
        ]
