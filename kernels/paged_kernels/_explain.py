"""What a call of `paged_attention` would do, and the least time that it could take: in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from ._backends import has_triton
from ._checks import check_attention
from ._heuristics import H200, device_of, planned_for
from ._launch import Launch
from ._roofline import PEAKS, Costs, costs
from .api import paged_attention
from .options import AttentionCall

Arguments = ParamSpec("Arguments")

_WORK = {
    "torch": "blocks that lie in order are viewed, others gathered; dense attention per sequence",
    "reference": "each sequence is gathered and attended to densely in float64: slow, and right",
}


def _taking(
    function: Callable[Arguments, object],
) -> Callable[[Callable[..., str]], Callable[Arguments, str]]:
    """Give the decorated function the parameters of another."""

    def decorate(decorated: Callable[..., str]) -> Callable[Arguments, str]:
        signature = inspect.signature(function).replace(return_annotation="str")
        vars(decorated)["__signature__"] = signature
        return decorated

    return decorate


@_taking(paged_attention)
def explain(*args: object, **kwargs: object) -> str:
    """What `paged_attention` would do with the same arguments. Nothing is launched.

    Returns:
        Text: the backend and why; each launch with its grid and tile; the bytes that the call must
        move, its flops, and the least time that these take at the peak rates of the GPU. For CPU
        tensors, what Triton would launch on an H200. Lengths are read from CPU tensors only: on a
        GPU they are taken to be `max_query_len` and `max_seq_len`.

    Raises:
        TypeError, ValueError: as `paged_attention`.
    """
    bound = inspect.signature(paged_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    call, backend = check_attention(*bound.args, **bound.kwargs)
    on_cpu = call.query.device.type == "cpu"

    lines = [_summary(call), f"backend: {backend}, {_reason(bound.kwargs['backend'], on_cpu)}"]
    if backend in _WORK:
        lines.append(f"  {_WORK[backend]}")
    if len(call.query) == 0 or len(call.seq_lens) == 0 or call.max_query_len == 0:
        return "\n".join([*lines, "nothing to attend to: no launch"])
    launches: list[Launch] = []
    if backend == "triton" or (on_cpu and has_triton()):
        if on_cpu:
            lines.append("a plan for an H200, not a measurement: Triton would launch")
        try:
            launches = planned(call)
        except ValueError as error:  # no tile fits, which is no matter to other backends
            if backend == "triton":
                raise
            lines.append(f"  nothing: {error}")
    lines += [f"  {number}. {text}" for number, text in enumerate(_describe(launches), 1)]
    lines += _roofline(costs(call, launches), call)
    if not on_cpu:
        lines.append("lengths: the bounds given, as reading them would wait for the GPU")
    return "\n".join(lines)


def planned(call: AttentionCall) -> list[Launch]:
    """The launches of a call, planned over tensors without memory: not even a fill is launched."""
    from .triton_backend import plan

    device = call.query.device
    without_memory: Any = {
        name: x.to("meta") for name, x in call._asdict().items() if isinstance(x, Tensor)
    }
    call = call._replace(**without_memory)
    with planned_for(H200 if device.type == "cpu" else device_of(device)):
        return plan(call)


def _summary(call: AttentionCall) -> str:
    dims, dtype = call.dims, str(call.query.dtype).removeprefix("torch.")
    stored = str(call.key_cache.dtype).removeprefix("torch.")
    cache = "" if stored == dtype else f" over {stored}"
    value_width = "" if dims.head_dim == dims.head_dim_v else f"/{dims.head_dim_v}"
    return (
        f"sequences {len(call.seq_lens)}, query tokens {len(call.query)}, "
        f"heads {dims.num_heads}/{dims.num_kv_heads} of {dims.head_dim}{value_width}, "
        f"{dtype}{cache}, blocks of {dims.block_size}"
    )


def _reason(asked: str | None, on_cpu: bool) -> str:
    if asked is not None:
        interpreted = " (CPU tensors: in the interpreter)" if asked == "triton" and on_cpu else ""
        return "as asked" + interpreted
    if on_cpu:
        return "the default for CPU tensors"
    return "the default for GPU tensors" if has_triton() else "as triton is not installed"


def _describe(launches: list[Launch]) -> list[str]:
    """A line for each launch."""
    first_keys = [launch.args[-2] for launch in launches if "TILE" in launch.constants]
    prefix_len = max(first_keys, default=0)
    lines = []
    for launch in launches:
        grid = " x ".join(map(str, launch.grid))
        if "TILE" not in launch.constants:
            lines.append(f"merge of {launch.args[4]} parts: grid {grid}, {launch.num_warps} warp")
            continue
        *_, first_key, split_size = launch.args
        tile, splits = launch.constants["TILE"], launch.grid[2]
        phase = "prefill" if launch.constants["ROWS"].prefill else "decode"
        if first_key:
            phase += f" from key {first_key}"
        elif prefix_len:
            phase = f"shared prefix of {prefix_len} keys"
        parts = f"{splits} split" + "s" * (splits != 1)
        if split_size:
            parts += f" of {split_size} keys"
        lines.append(
            f"{phase}: grid {grid}, {parts}, tile {tile.m} rows x {tile.n} keys, "
            f"{launch.num_warps} warps, {launch.num_stages} stages"
        )
    return lines


def _roofline(cost: Costs, call: AttentionCall) -> list[str]:
    names = {"K and V": cost.cache, "queries": cost.query, "outputs": cost.out}
    names |= {"partial results": cost.parts, "block ids": cost.block_ids}
    terms = " + ".join(f"{name} {_amount(size)}B" for name, size in names.items() if size)
    lines = [
        f"bytes: {terms} = {_amount(cost.bytes)}B",
        f"flops: {_amount(cost.flops).strip()}, {cost.flops / max(1, cost.bytes):.1f} per byte",
    ]
    device = call.query.device
    name = "NVIDIA H200" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if name not in PEAKS:
        return [*lines, f"time: unknown, as the peak rates of {name} are"]
    moving, computing = cost.seconds(PEAKS[name], call.query.dtype)
    bound = "memory" if moving >= computing else "arithmetic"
    rates = f"{cost.bytes / moving / 1e12:.4g} TB/s"
    if cost.flops:
        rates += f" and {cost.flops / computing / 1e12:.4g} TFLOP/s"
    time = f"{max(moving, computing) * 1e6:.3g} us"
    return [*lines, f"time: at least {time} on {name} at {rates}, bound by {bound}"]


def _amount(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} T"
