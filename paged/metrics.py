"""What Prometheus reads of a manager, a scheduler or an engine. Off unless a `Metrics` is made.

The live objects are read at each scrape; while tokens are generated nothing is done but to note two
durations. A scrape runs in a thread of its own, so its figures may lie a moment apart.
Needs prometheus_client: pip install 'paged[metrics]'.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeAlias

from .block_manager import BlockSpaceManager
from .sequence import as_count
from .stats import CacheStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from .engine import Engine
    from .scheduler import Scheduler

Value: TypeAlias = "float | Histogram | tuple[str, Mapping[str, float]]"  # a label and its values
Read: TypeAlias = "Callable[[Metrics, CacheStats], dict[str, Value]]"

SECONDS = tuple(float(f"{digits}e{power}") for power in range(-3, 3) for digits in (1, 2.5, 5))
HELP = {
    "paged_cache_used_ratio": "Share of the blocks that sequences hold.",
    "paged_cache_cached_ratio": "Share of the blocks without a holder whose content can be found.",
    "paged_internal_fragmentation_ratio": "Share of the slots in used GPU blocks without a token.",
    "paged_prefix_queried_tokens_total": "Tokens looked for in the prefix cache.",
    "paged_prefix_hit_tokens_total": "Tokens found in the prefix cache.",
    "paged_sequences_running": "Sequences that are being computed.",
    "paged_sequences_waiting": "Sequences that wait to be admitted, or to be computed again.",
    "paged_sequences_swapped": "Sequences whose blocks are in CPU memory.",
    "paged_sequences_waiting_for_blocks": "Sequences kept out by a lack of blocks.",
    "paged_preemptions_total": "Requests that had to give way, by what became of their blocks.",
    "paged_prompt_tokens_total": "Prompt tokens of admitted requests, cached ones included.",
    "paged_generation_tokens_total": "Generated tokens.",
    "paged_time_to_first_token_seconds": "Time from the arrival of a request to its first token.",
    "paged_time_per_output_token_seconds": "Time per later token: a sequence's mean, once per token.",
    "vllm:gpu_cache_usage_perc": "Share of the GPU blocks that requests hold, 0 to 1.",
    "vllm:gpu_cache_usage_percent": "Percentage of the GPU blocks that requests hold, 0 to 100.",
    "vllm:cpu_cache_usage_perc": "Share of the CPU blocks that requests hold, 0 to 1.",
    "vllm:num_requests_running": "Requests that are being computed.",
    "vllm:num_requests_waiting": "Requests that wait to be admitted, or to be computed again.",
    "vllm:num_requests_swapped": "Requests whose blocks are in CPU memory.",
    "vllm:num_preemptions_total": "How often a request had to give way.",
}
SAME = {  # vLLM's name -> another with the same value
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total": "paged_prefix_queried_tokens_total",
    "vllm:prefix_cache_hits_total": "paged_prefix_hit_tokens_total",
    "vllm:num_blocks_waiting": "paged_sequences_waiting_for_blocks",
    "vllm:prompt_tokens_total": "paged_prompt_tokens_total",
    "vllm:generation_tokens_total": "paged_generation_tokens_total",
    "vllm:time_to_first_token_seconds": "paged_time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds": "paged_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds": "paged_time_per_output_token_seconds",
}


class Histogram:
    """How often a duration occurred, by upper bounds in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """The same duration `count` times."""
        self.counts[bisect_left(SECONDS, seconds)] += count
        self.sum += seconds * count


class Metrics:
    """The figures of one engine, scheduler or manager, under our names and under vLLM's.

    source    what to read; an Engine made with metrics=... gives itself
    labels    put on every sample, for instance {"model_name": "smollm2"}

    >>> metrics = Metrics(BlockSpaceManager(CacheConfig(num_gpu_blocks=8)))
    >>> metrics.serve(8000)
    8000
    """

    def __init__(
        self,
        source: Engine | Scheduler | BlockSpaceManager | None = None,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            message = "metrics need prometheus_client: pip install 'paged[metrics]'"
            raise ImportError(message) from error
        self.labels = _checked_labels(labels or {})
        self.time_to_first_token = Histogram()
        self.time_per_output_token = Histogram()
        self.manager: BlockSpaceManager | None = None  # None until there is a source
        self.scheduler: Scheduler | None = None
        self._registries = {
            name: CollectorRegistry(auto_describe=True) for name in ("paged", "vllm")
        }
        self._servers: list[tuple[Any, Any]] = []
        if source is not None:
            self.watch(source)

    def watch(self, source: Engine | Scheduler | BlockSpaceManager) -> None:
        """Read `source` from now on. ValueError when there is a source already."""
        scheduler: Any = getattr(source, "scheduler", source)
        manager = getattr(scheduler, "manager", scheduler)
        if not isinstance(manager, BlockSpaceManager):
            raise TypeError(
                f"source is {shortened(source)}; it must be an Engine, Scheduler or "
                f"BlockSpaceManager"
            )
        if self.manager:
            raise ValueError(f"source is {shortened(source)}; these metrics read another already")
        self.manager = manager
        self.scheduler = None if scheduler is manager else scheduler
        for names, read in (("paged", _paged), ("vllm", _vllm)):
            self._registries[names].register(_Collector(self, manager, read))

    # What an engine calls

    def on_first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it came."""
        self.time_to_first_token.observe(seconds)

    def on_finish(self, seconds: float, num_tokens: int) -> None:
        """A sequence has the last of its `num_tokens` new tokens, so long after the first."""
        if num_tokens > 1:
            self.time_per_output_token.observe(seconds / (num_tokens - 1), num_tokens - 1)

    # What a reader calls

    def registry(self, names: str = "paged") -> CollectorRegistry:
        """prometheus_client's registry of our names, "paged", or of vLLM's, "vllm"."""
        if names not in self._registries:
            raise ValueError(f"names is {shortened(names)}; it must be 'paged' or 'vllm'")
        return self._registries[names]

    def text(self, names: str = "paged") -> str:
        """All figures as they are now, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry(names)).decode()

    def serve(self, port: int, *, address: str = "127.0.0.1", names: str = "paged") -> int:
        """Answer http://address:port/metrics from a thread until `close`; returns the port.

        Port 0 is any free one; the address "0.0.0.0" lets other machines ask.
        OSError when the port cannot be had.
        """
        from prometheus_client import start_http_server

        if as_count("port", port) > 65535:
            raise ValueError(f"port is {port}; it must be at most 65535")
        try:
            server, thread = start_http_server(port, address, self.registry(names))
        except OSError as error:
            message = f"port is {port}, address {address!r}: {error.strerror}"
            raise OSError(error.errno, message) from error
        server.set_app(_as_text(server.get_app()))
        self._servers.append((server, thread))
        return int(server.server_port)

    def close(self) -> None:
        """End every `serve`."""
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            thread.join()
            server.server_close()


class _Collector:
    """What a registry asks at each scrape."""

    def __init__(self, metrics: Metrics, manager: BlockSpaceManager, read: Read) -> None:
        self.metrics, self.manager, self.read = metrics, manager, read

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import Metric

        for name, value in self.read(self.metrics, self.manager.stats()).items():
            kind = "counter" if name.endswith("_total") else "gauge"
            kind = "histogram" if isinstance(value, Histogram) else kind
            metric = Metric(name.removesuffix("_total"), HELP[SAME.get(name, name)], kind)
            for suffix, labels, number in _samples(value):
                metric.add_sample(name + suffix, {**self.metrics.labels, **labels}, number)
            yield metric


def _paged(metrics: Metrics, stats: CacheStats) -> dict[str, Value]:
    """Our names, by Prometheus' conventions."""
    scheduler = metrics.scheduler
    tiers = {"gpu": stats.gpu, "cpu": stats.cpu}
    cached = {tier: pool.num_cached / max(pool.num_total, 1) for tier, pool in tiers.items()}
    values: dict[str, Value] = {
        "paged_cache_used_ratio": ("tier", {tier: pool.usage for tier, pool in tiers.items()}),
        "paged_cache_cached_ratio": ("tier", cached),
        "paged_internal_fragmentation_ratio": min(stats.internal_fragmentation, 1.0),
        "paged_prefix_queried_tokens_total": stats.prefix_queried_tokens,
        "paged_prefix_hit_tokens_total": stats.prefix_hit_tokens,
    }
    if scheduler:
        for state, num_seqs in scheduler.num_sequences.items():
            values[f"paged_sequences_{state}"] = num_seqs
        values |= {
            "paged_sequences_waiting_for_blocks": scheduler.num_waiting_for_blocks,
            "paged_preemptions_total": ("kind", scheduler.num_preemptions),
            "paged_prompt_tokens_total": scheduler.num_prompt_tokens,
            "paged_generation_tokens_total": scheduler.num_generated_tokens,
            "paged_time_to_first_token_seconds": metrics.time_to_first_token,
            "paged_time_per_output_token_seconds": metrics.time_per_output_token,
        }
    return values


def _vllm(metrics: Metrics, stats: CacheStats) -> dict[str, Value]:
    """vLLM's names, where requests are counted, and two known from articles."""
    values, scheduler = _paged(metrics, stats), metrics.scheduler
    values |= {
        "vllm:gpu_cache_usage_perc": stats.gpu.usage,
        "vllm:gpu_cache_usage_percent": 100 * stats.gpu.usage,
        "vllm:cpu_cache_usage_perc": stats.cpu.usage,
    }
    if scheduler:
        for state in ("running", "waiting", "swapped"):
            values[f"vllm:num_requests_{state}"] = len(getattr(scheduler, state))
        values["vllm:num_preemptions_total"] = sum(scheduler.num_preemptions.values())
    values |= {name: values[other] for name, other in SAME.items() if other in values}
    return {name: value for name, value in values.items() if name.startswith("vllm:")}


def _samples(value: Value) -> Iterator[tuple[str, dict[str, str], float]]:
    """Suffix of the name, labels and number of each sample."""
    if isinstance(value, Histogram):
        counts = list(accumulate(value.counts))
        for bound, count in zip((*SECONDS, "+Inf"), counts, strict=True):
            yield "_bucket", {"le": str(bound)}, count
        yield "_count", {}, counts[-1]
        yield "_sum", {}, value.sum
    elif isinstance(value, tuple):
        label, numbers = value
        yield from (("", {label: key}, number) for key, number in numbers.items())
    else:
        yield "", {}, value


def _as_text(app: Any) -> Any:
    """Whatever is asked for: in OpenMetrics, prometheus_client 0.26 writes vllm_ for vllm:."""
    return lambda environ, start: app({**environ, "HTTP_ACCEPT": "text/plain"}, start)


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not re.fullmatch("(?!__|(kind|le|tier)$)[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(
                f"labels has {name!r}; a name is letters, digits and _, not kind, le or tier"
            )
        if not isinstance(value, str):
            raise TypeError(f"labels[{name!r}] is {shortened(value)}; it must be a str")
    return dict(labels)
