"""What a replay found, as plain values and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from paged.advice import Load, advise
from paged.replay_config import TOLERANCES, ReplayConfig
from paged.replay_memory import MemoryLog


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of a replay; lengths in tokens.

    seconds          by part: manager (and scheduler), write (moves included), attention, dense (the
                     same attention without pages)
    preemptions      by kind: swap, recompute
    steps_short_of_blocks  in which somebody stayed out, or gave way, for want of blocks
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
    steps_short_of_blocks: int
    preemptions: dict[str, int]
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
            "steps_short_of_blocks": self.steps_short_of_blocks,
            "preemptions": sum(self.preemptions.values()),
            **{f"preemptions_by_{kind}": number for kind, number in self.preemptions.items()},
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
            "advice": self.advice(),
            "max_error": self.max_error,
            "max_error_dense": self.max_error_dense,
            "rows_checked": self.rows_checked,
            "backend": self.backend,
            "device": self.config.device,
            "config": asdict(self.config),
            "versions": self.versions,
            "commit": self.commit,
        }

    def advice(self) -> list[str]:
        """What the figures say about the settings."""
        prompt_tokens = self.prompt_tokens - self.prefix_hit_tokens
        return advise(
            Load(
                steps=self.steps,
                steps_short_of_blocks=self.steps_short_of_blocks,
                num_blocks=self.num_blocks,
                peak_blocks=self.memory.paged.peak // self.config.block_size,
                num_cpu_blocks=self.config.num_cpu_blocks,
                requests=self.requests,
                swapped=self.preemptions["swap"],
                recomputed=self.preemptions["recompute"],
                recomputed_tokens=self.recomputed_tokens,
                computed_tokens=prompt_tokens + self.generated_tokens + self.recomputed_tokens,
                has_prefix_cache=self.config.prefix_cache,
            )
        )

    def __str__(self) -> str:
        return "\n\n".join("\n".join(part) for part in self._parts())

    def _parts(self) -> tuple[list[str], ...]:
        advice = [line for text in self.advice() for line in wrap(text, 100)]
        parts = self._work(), self._memory(), self._time(), advice, self._check()
        return tuple(part for part in parts if part)

    def _work(self) -> list[str]:
        longest = self.config.max_length
        hit_share = self.prefix_hit_tokens / max(self.prefix_queried_tokens, 1)
        swaps, preemptions = self.preemptions["swap"], sum(self.preemptions.values())
        figures = {
            name: getattr(self, name)
            for name in ("requests", "steps", "prompt_tokens", "generated_tokens")
        }
        figures |= {"prefix_hit_tokens": self.prefix_hit_tokens, "preemptions": preemptions}
        notes = {
            "requests": f"{self.requests_clipped:,} of them clipped to {longest:,} tokens",
            "prefix_hit_tokens": f"{hit_share:.1%} of the prompt tokens asked for",
            "steps": f"{self.steps_short_of_blocks:,} of them short of blocks",
            "preemptions": f"{swaps:,} by swap; {self.recomputed_tokens:,} tokens computed again",
        }
        return [
            f"{name.replace('_', ' '):20}{figure:>12,}   {notes.get(name, '')}".rstrip()
            for name, figure in figures.items()
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
            "manager": "scheduler and block manager",
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
