"""How large a pool a replayed traffic asks for, in words."""

from __future__ import annotations

from collections.abc import Iterator

from paged.config import block_bytes
from paged.sizing import ModelShape

from .replay_report import ReplayReport
from .replay_setup import blocks_for


def clock_line(report: ReplayReport, load: float, *, at_once: bool) -> str:
    """When the requests of a replay arrived. at_once: the trace gives all of them one time."""
    if at_once:
        return "all requests arrive at once, as the trace has one time for all"
    limits = report.scheduler_config
    return (
        f"arrivals keep their order and relative spacing; the clock is scaled to a load of"
        f" {load:g} x what {limits.max_num_seqs:,} sequences and"
        f" {limits.max_num_batched_tokens:,} tokens a step allow"
    )


def was_short(report: ReplayReport) -> bool:
    """Whether the pool kept anyone waiting or out, so that its peak does not tell what is wanted."""
    return bool(report.load.steps_short_of_blocks or report.rejected)


def pool_sentence(
    report: ReplayReport, roomy: ReplayReport, load: float, shape: ModelShape | None
) -> str:
    """The pool to take. roomy: the same replay in a pool with room for all; `report` may be it."""
    num_blocks, peak = report.load.num_blocks, roomy.peak_blocks
    limits = report.scheduler_config
    wanted = blocks_for(peak, roomy.config.watermark)
    at = (
        f"at a load of {load:g} of {limits.max_num_seqs:,} sequences and"
        f" {limits.max_num_batched_tokens:,} tokens a step the peak was"
        f" {_blocks(peak, roomy, shape)}"
    )
    take = (
        f"Take a pool of {_blocks(wanted, roomy, shape)} or more, the peak and the"
        f" {roomy.config.watermark:.0%} that admission leaves free"
    )
    if roomy.config.enable_prefix_caching:
        take += ". More keeps prefixes that no running request holds"
    short = " and ".join(_shortages(report))
    if not was_short(report):
        only = ", only for their turn in a step" if report.load.steps_short_of_seats else ""
        return f"Pool: {at}, and no request waited for blocks{only}. {take}"
    if wanted <= num_blocks:
        return f"Pool: {at} with room for all; the pool of {num_blocks:,} was {short}. {take}"
    return (
        f"Pool: {_blocks(num_blocks, report, shape)} are too few: {short}. With room for all, {at},"
        f" so {wanted / num_blocks:,.1f} times as many are wanted. {take}"
    )


def _shortages(report: ReplayReport) -> Iterator[str]:
    if steps := report.load.steps_short_of_blocks:
        yield f"short of blocks in {steps:,} of {report.steps:,} steps"
    if report.rejected:
        requests = "request" if report.rejected == 1 else "requests"
        yield f"too small for {report.rejected:,} {requests} at all"


def gib(number: float) -> str:
    """Bytes in GiB, or in MiB below one."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def pool_bytes(num_blocks: int, block_size: int, shape: ModelShape) -> int:
    """Bytes of so many blocks, all layers."""
    return num_blocks * block_bytes(
        block_size, shape.kv_heads, shape.head_dim, shape.dtype, shape.layers
    )


def _blocks(number: int, report: ReplayReport, shape: ModelShape | None) -> str:
    size = report.config.block_size
    weight = "" if shape is None else f" ({gib(pool_bytes(number, size, shape))})"
    return f"{number:,} blocks{weight}"
