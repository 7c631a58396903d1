"""What a model needs of its KV cache, found by asking it: one token through all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged.errors import UnsupportedModelError

from .attention import LayerCall, NoPagesError, attention_configs, paged_attention_in

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_OTHER_STATELESS_LAYERS = {"moe", "mlp"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(slots=True)
class Layer:
    """Where an attention module keeps its K and V. Several may share one place; one writes it."""

    index: int
    writes: bool


@dataclass(slots=True)
class ModelLayers:
    """A model as the cache sees it.

    layers          per attention module
    num_layers      places of K and V: layers that reuse another's have none of their own
    sliding_window  the widest, when every layer has one, else None
    max_model_len   tokens; None: no limit is known
    dtype, device   of K and V
    """

    layers: dict[nn.Module, Layer]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    sliding_window: int | None
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int | None
    configs: list[Any]


@dataclass(slots=True)
class _Probe:
    """Notes each attention call and answers zeros."""

    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        batch_size, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(batch_size, num_tokens, num_heads, call.value.shape[-1])


def read_layers(model: Any) -> ModelLayers:
    """Run one token through the model and note what its layers ask for.

    Raises UnsupportedModelError, which says why; ValueError when the model is in training mode.
    """
    _check_kind(model)
    config = model.config.get_text_config(decoder=True)
    configs = attention_configs(model)
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    name = type(model).__name__
    try:
        with torch.no_grad(), paged_attention_in(configs):
            output = model(
                input_ids=token,
                position_ids=token,
                attention_mask=torch.ones_like(token),
                use_cache=False,
                paged_step=probe,
            )
    except NoPagesError:
        raise UnsupportedModelError(f"{name} passes no keywords on to its attention") from None
    calls = probe.calls
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * (
        config.num_hidden_layers
    )
    num_expected = sum(kind not in _OTHER_STATELESS_LAYERS for kind in layer_types)
    if len(calls) != num_expected:
        raise UnsupportedModelError(
            f"{name} has {num_expected} layers that attend and makes {len(calls)} calls through "
            "transformers' AttentionInterface"
        )
    layers = _assign(calls)
    own = [call for call in calls if layers[call.module].writes]
    shapes = {(c.key.shape[1], c.key.shape[3], c.value.shape[3]) for c in own}
    places = {(c.key.dtype, c.key.device) for c in own}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{name} has layers that differ in (KV heads, head_dim, head_dim of V): "
            f"{sorted(shapes)}; one cache has one shape"
        )
    if len(places) > 1:
        raise UnsupportedModelError(
            f"{name} has layers that differ in dtype or device: {sorted(map(str, places))}"
        )
    (shape,), ((dtype, device),) = shapes, places
    windows = [call.visible.sliding_window for call in calls]
    widest = None if None in windows else max(w for w in windows if w is not None)
    return ModelLayers(
        layers,
        len(own),
        *shape,
        sliding_window=widest,
        dtype=dtype,
        device=device,
        vocab_size=output.logits.shape[-1],
        max_model_len=_max_model_len(config),
        configs=configs,
    )


def _check_kind(model: Any) -> None:
    """Refuse what can be told without running the model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is {type(model).__name__}; it must be a transformers model")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder")
    if not type(model).can_generate():
        raise UnsupportedModelError(f"{name} has no language model head")
    config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    other = layer_types - _ATTENTION_LAYERS - _OTHER_STATELESS_LAYERS
    if other:
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(sorted(other))}")
    if getattr(model, "_is_stateful", False) and not layer_types:
        raise UnsupportedModelError(f"{name} keeps a state that is not K and V")
    if model.device.type == "meta":
        raise ValueError("the model is on device 'meta', without weights; load them first")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")


def _assign(calls: list[LayerCall]) -> dict[nn.Module, Layer]:
    """Number the layers that bring K of their own; one that brings another's K shares its place."""
    layers: dict[nn.Module, Layer] = {}
    indices: dict[int, int] = {}  # of K tensors, all of which are alive
    for call in calls:
        if call.module in layers:
            raise UnsupportedModelError(f"{type(call.module).__name__} is called twice in a step")
        if call.key.shape[2] != call.query.shape[2]:
            raise UnsupportedModelError(f"{type(call.module).__name__} attends to other tokens")
        index = indices.get(id(call.key))
        writes = index is None
        if index is None:
            index = indices[id(call.key)] = len(indices)
        layers[call.module] = Layer(index, writes)
    return layers


def _max_model_len(config: Any) -> int | None:
    """Tokens up to which each position's rotation depends on that position alone."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings") or limit
            limit = min(filter(None, (limit, original)), default=None)
    return limit
