"""What a replay without a model found, as plain values, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paged.advice import Load, advise
from paged.config import CacheConfig
from paged.scheduler_config import SchedulerConfig
from paged.trace import Request

from .recorder import Recorder, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paged.plots.style import FilePath

PLOTTED = (
    "step",
    "used",
    "cached",
    "free",
    "internal_fragmentation",
    "running",
    "waiting",
    "swapped",
)


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of `replay`.

    steps            that computed anything; span: with the idle ones between
    computed_tokens  in all steps, recomputed ones included, cached ones not
    wait_...         steps from the arrival of a request to its first
    peak_blocks      used at once
    host_seconds     CPU time of scheduler and manager
    series           lists of equal length, an entry per recorded step: step; used, cached and free
                     blocks; internal_fragmentation in 0..1; running, waiting and swapped sequences;
                     and, counted from the start, preempted_swap, preempted_recompute,
                     prefix_hit_tokens and prefix_queried_tokens
    """

    config: CacheConfig
    scheduler_config: SchedulerConfig
    requests: int
    finished: int
    rejected: int
    first_rejection: str | None
    steps: int
    span: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    prefix_hit_tokens: int
    preemptions: dict[str, int]
    recomputed_tokens: int
    wait_median: int
    wait_p90: int
    wait_max: int
    peak_blocks: int
    host_seconds: float
    series: Series
    load: Load

    @classmethod
    def of(
        cls, recorder: Recorder, requests: Sequence[Request], span: int, host_seconds: float
    ) -> ReplayReport:
        """What a recorder has seen so far."""
        scheduler, waits = recorder.scheduler, sorted(recorder.waits.values())
        return cls(
            config=scheduler.manager.config,
            scheduler_config=scheduler.config,
            requests=len(requests),
            finished=scheduler.num_finished,
            rejected=len(recorder.rejected),
            first_rejection=next(iter(recorder.rejected.values()), None),
            steps=recorder.steps,
            span=span,
            prompt_tokens=scheduler.num_prompt_tokens,
            generated_tokens=scheduler.num_generated_tokens,
            computed_tokens=recorder.computed_tokens,
            prefix_hit_tokens=scheduler.manager.prefix_counter.hit_tokens,
            preemptions=dict(scheduler.num_preemptions),
            recomputed_tokens=scheduler.recomputed_tokens,
            wait_median=_quantile(waits, 0.5),
            wait_p90=_quantile(waits, 0.9),
            wait_max=_quantile(waits, 1.0),
            peak_blocks=recorder.peak_blocks,
            host_seconds=host_seconds,
            series=recorder.series(),
            load=recorder.load(),
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens computed per step that ran."""
        return self.computed_tokens / max(self.steps, 1)

    @property
    def waste(self) -> float:
        """Share of the slots in used blocks that carries no token, over all recorded steps."""
        pairs = zip(self.series["used"], self.series["internal_fragmentation"], strict=True)
        return sum(used * empty for used, empty in pairs) / max(sum(self.series["used"]), 1)

    @property
    def advice(self) -> list[str]:
        """What to change; empty when all is well."""
        rejected = [f"{self.rejected:,} requests can never run: {self.first_rejection}"]
        return rejected[: self.rejected] + advise(self.load)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        config = asdict(self.config) | {"hash_fn": getattr(self.config.hash_fn, "__name__", None)}
        derived = {
            "tokens_per_step": self.tokens_per_step,
            "waste": self.waste,
            "advice": self.advice,
        }
        return asdict(self) | {"config": config} | derived

    def plot(self, path: FilePath | None = None) -> Figure:
        """Blocks, empty slots and queues over the steps."""
        from paged.plots import usage_over_time

        return usage_over_time({name: self.series[name] for name in PLOTTED}, path=path)

    def __str__(self) -> str:
        blocks = self.load.num_blocks
        hits = self.prefix_hit_tokens / max(self.prompt_tokens, 1)
        lines = {
            "requests": f"{self.finished:,} of {self.requests:,} finished, {self.rejected:,} rejected",
            "steps": f"{self.steps:,}, {self.tokens_per_step:,.0f} tokens each",
            "tokens": f"{self.prompt_tokens:,} of prompts, {self.generated_tokens:,} generated",
            "prefix hits": f"{hits:.1%} of the prompt tokens",
            "blocks": f"{self.peak_blocks:,} of {blocks:,} at peak, {self.waste:.1%} of slots empty",
            "waits, steps": f"median {self.wait_median:,.0f}, 90 % {self.wait_p90:,.0f}, longest"
            f" {self.wait_max:,.0f}",
            "preemptions": f"{self.preemptions['swap']:,} swapped, {self.preemptions['recompute']:,}"
            f" recomputed ({self.recomputed_tokens:,} tokens)",
            "host time": f"{1e3 * self.host_seconds / max(self.steps, 1):.2f} ms a step",
        }
        return "\n".join(
            [
                *(f"{name:14}{text}" for name, text in lines.items()),
                *(f"advice: {sentence}" for sentence in self.advice),
            ]
        )


def _quantile(ordered: Sequence[int], share: float) -> int:
    """The value at that share of a sorted list; 0 of an empty one."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0
