"""Runs a transformers model on ragged batches over pages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from paged_kernels import KVCache
from paged_kernels._backends import resolve_backend
from torch import Tensor

from paged.batch import Batch
from paged.block_manager import BlockSpaceManager
from paged.config import CacheConfig, block_bytes, check_kind

from .attention import paged_attention_in
from .layers import ModelLayers, read_layers
from .paged_step import PagedStep

CPU_POOL_BYTES = 2**30
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class ModelRunner:
    """A model, the blocks of its KV cache, and one forward pass over a ragged batch.

    Any transformers decoder whose layers attend through `AttentionInterface`, with the same shape of
    K and V in every layer, runs. The model is left as it is: outside `forward` it attends as before.

    Args:
        model: a causal language model in eval mode.
        cache_config: default `CacheConfig()`. With `num_gpu_blocks=None` the pool takes what fits
            (`CacheConfig.sized`) on a GPU and 1 GiB on a CPU, which is touched only as it is used.
            `sliding_window` is set here: the widest, when every layer has one, so that blocks are
            given back only when no layer needs them.
        dtype: of the cache; default that of the model's K. float8_e4m3fn, float8_e5m2 and int8
            quantise.
        backend: of the kernels: "triton", "torch" or "reference"; default by device.

    Attributes:
        cache_config, manager, cache: the settings, the block tables and the pools.
        layers: what was found out about the model.
        vocab_size: logits per token.
        max_model_len: tokens that a sequence may have; None: no limit is known. For rotary
            embeddings that change with the longest sequence of a batch (dynamic, longrope) it ends
            where they begin to change.
        eos_token_ids: of the generation config, a tuple that may be empty.
        device: of the cache, and of the batches.

    Raises:
        UnsupportedModelError: the model does something that pages cannot do; it says what.
        TypeError, ValueError: a wrong argument; a model in training mode; no block fits.
    """

    def __init__(
        self,
        model: Any,
        cache_config: CacheConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        check_kind("cache_config", cache_config, CacheConfig, optional=True)
        self.model = model
        self.backend = backend
        self.layers = read_layers(model)
        self.device = self.layers.device
        resolve_backend(backend, self.device)  # ValueError now, not at the first step
        self.vocab_size = self.layers.vocab_size
        self.max_model_len = self.layers.max_model_len
        self.eos_token_ids = _eos_token_ids(model)
        dtype = _cache_dtype(dtype, self.layers.dtype)
        self.cache_config = _sized(cache_config or CacheConfig(), self.layers, dtype)
        self.cache = _kv_cache(self.cache_config, self.layers, dtype)
        self.manager = BlockSpaceManager(self.cache_config)
        self._can_select = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def forward(
        self,
        input_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        batch: Batch,
        rows: Sequence[int] | Tensor,
    ) -> Tensor:
        """Write K and V of the batch's new tokens, and say what comes after some of them.

        Args:
            input_ids: `[num_tokens]`, the new tokens of all sequences, one after the other.
            positions: `[num_tokens]`, of each token in its sequence.
            batch: of `manager.build_batch`, on `device`.
            rows: indices into `input_ids` of the tokens whose logits are wanted.

        Returns:
            `[len(rows), vocab_size]` in the dtype of the model.
        """
        ids, places, kept = (
            torch.as_tensor(x, dtype=torch.long, device=self.device)
            for x in (input_ids, positions, rows)
        )
        num_tokens = len(batch.slot_mapping)
        if not ids.shape == places.shape == (num_tokens,):
            raise ValueError(
                f"input_ids and positions have shapes {tuple(ids.shape)} and "
                f"{tuple(places.shape)}; the batch has {num_tokens} new tokens"
            )
        with paged_attention_in(self.layers.configs):
            output = self.model(
                input_ids=ids[None],
                position_ids=places[None],
                attention_mask=torch.ones_like(ids)[None],
                use_cache=False,
                paged_step=PagedStep(self.cache, self.layers.layers, batch, self.backend),
                **({"logits_to_keep": kept} if self._can_select else {}),
            )
        logits: Tensor = output.logits[0]
        return logits if self._can_select else logits[kept]

    def __repr__(self) -> str:
        return f"ModelRunner({type(self.model).__name__}, {self.cache})"


def _cache_dtype(dtype: torch.dtype | None, model_dtype: torch.dtype) -> torch.dtype:
    """The model's own, or one that quantises."""
    if dtype is None or dtype == model_dtype or dtype in QUANTISED_DTYPES:
        return model_dtype if dtype is None else dtype
    raise TypeError(
        f"dtype is {dtype!r}; it must be {model_dtype}, as K of this model, or one of "
        + ", ".join(map(str, QUANTISED_DTYPES))
    )


def _sized(config: CacheConfig, layers: ModelLayers, dtype: torch.dtype) -> CacheConfig:
    """The config with the model's window, and with the number of blocks that fit."""
    if config.sliding_window not in (None, layers.sliding_window):
        raise ValueError(
            f"sliding_window is {config.sliding_window}; this model's is {layers.sliding_window}, "
            "and None takes it from the model"
        )
    config = replace(config, sliding_window=layers.sliding_window)
    if config.num_gpu_blocks is not None:
        return config
    num_bytes = block_bytes(
        config.block_size,
        layers.num_kv_heads,
        layers.head_dim,
        dtype,
        layers.num_layers,
        layers.head_dim_v,
    )
    if layers.device.type == "cuda":
        return config.sized(*torch.cuda.mem_get_info(layers.device), num_bytes)
    return replace(config, num_gpu_blocks=max(CPU_POOL_BYTES // num_bytes, 1))


def _kv_cache(config: CacheConfig, layers: ModelLayers, dtype: torch.dtype) -> KVCache:
    assert config.num_gpu_blocks is not None
    return KVCache(
        layers.num_layers,
        config.num_gpu_blocks,
        config.block_size,
        layers.num_kv_heads,
        layers.head_dim,
        head_dim_v=layers.head_dim_v,
        num_cpu_blocks=config.num_cpu_blocks,
        dtype=dtype,
        device=layers.device,
    )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """From the generation config, which a saved model may have changed, else from the config."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
