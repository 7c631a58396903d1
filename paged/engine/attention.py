"""Attention over pages for transformers models, under the name "paged".

A model's layers call the function that its config names, with Q, K and V and whatever keywords the
model's `forward` got. Ours finds the step it belongs to in the keyword `paged_step`, so nothing is
global. The mask function makes no mask: it says which keys the layer may see, and refuses what
pages cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from paged.errors import PagedError, UnsupportedModelError

NAME = "paged"
_BENIGN = frozenset({"position_ids", "cache_position", "text_position_ids"})
_replaced: dict[int, tuple[Any, str]] = {}  # id(config) -> config and what it named before


class NoPagesError(PagedError):
    """A model attends over pages in a forward pass that brings none."""


@dataclass(slots=True)
class Visible:
    """Which keys a layer sees: those up to the query, within the window, except padding.

    sliding_window  tokens, the query included; None: all
    attention_mask  bool [batch_size, num_tokens_so_far], False for padding; None: no padding
    """

    sliding_window: int | None
    attention_mask: Tensor | None


@dataclass(slots=True)
class LayerCall:
    """One layer's attention.

    query       [batch_size, num_heads, num_tokens, head_dim]
    key, value  [batch_size, num_kv_heads, num_tokens, head_dim], the new tokens alone
    scale       factor of q . k; None: head_dim ** -0.5
    softcap     None: off
    sinks       float32 [num_heads]; None: off
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Visible
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class Step(Protocol):
    """What answers the attention calls of one forward pass."""

    def attend(self, call: LayerCall) -> Tensor:
        """The output, [batch_size, num_tokens, num_heads, head_dim_v]."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,  # the mask says it, also where a model forgets this
    paged_step: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    if paged_step is None:
        raise NoPagesError(
            f'attention implementation "{NAME}" reads K and V from pages, and none came: pass a '
            'PagedCache of this model, or call model.set_attn_implementation("sdpa")'
        )
    name = type(module).__name__
    visible = getattr(attention_mask, "paged_visible", None)
    if visible is None:
        raise UnsupportedModelError(
            f"{name} got a 4-D attention mask, of the caller's or the model's own making"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal: its queries see later tokens")
    for argument, given in others.items():
        if isinstance(given, Tensor) and argument not in _BENIGN:
            raise UnsupportedModelError(f"{name} passes {argument!r} to its attention")
    if dropout:
        raise ValueError(f"dropout is {dropout}; call model.eval() first")
    sinks = None if s_aux is None else s_aux.detach().float()
    call = LayerCall(module, query, key, value, visible, scaling, softcap, sinks)
    return paged_step.attend(call), None


def mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """The mask function that transformers calls: zeros of one element that carry a `Visible`."""
    if _form(mask_function) not in _SUPPORTED_FORMS:
        raise UnsupportedModelError(
            "the model's mask is neither causal nor a causal sliding window: chunked, "
            "bidirectional and block-wise masks are not supported"
        )
    carrier = torch.zeros((), device=device).expand(batch_size, 1, 1, kv_length)
    carrier.paged_visible = Visible(local_size, attention_mask)  # type: ignore[attr-defined]
    return carrier


def attention_configs(model: nn.Module) -> list[Any]:
    """The configs in which the parts of a model look up their attention function."""
    configs = (getattr(module, "config", None) for module in model.modules())
    named = {id(c): c for c in configs if hasattr(c, "_attn_implementation_internal")}
    return list(named.values())


@contextmanager
def paged_attention_in(configs: list[Any]) -> Iterator[None]:
    """Within the block these configs name our functions; after it, what they named before."""
    _restore(configs)
    before = {id(config): (config, config._attn_implementation_internal) for config in configs}
    _replaced.update(before)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:  # which may come late, when the next block has begun
        _restore([config for config, _ in before.values() if _is_current(config, before)])


def restore_attention(model: nn.Module) -> None:
    """End a `paged_attention_in` that an interrupt has kept from its end."""
    if _replaced:
        _restore(attention_configs(model))


def _is_current(config: Any, before: dict[int, tuple[Any, str]]) -> bool:
    return _replaced.get(id(config)) is before[id(config)]


def _restore(configs: list[Any]) -> None:
    for config in configs:
        if id(config) in _replaced:
            _, config._attn_implementation_internal = _replaced.pop(id(config))


def _form(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The code of a mask function and of the functions that it combines."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]
    code = getattr(function, "__code__", function)
    return (code, *(_form(part) for part in parts if callable(part)))


_SUPPORTED_FORMS = (_form(causal_mask_function), _form(sliding_window_causal_mask_function(1)))

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask)
