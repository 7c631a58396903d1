"""A cache for transformers' `generate` that keeps K and V in pages."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from paged.config import CacheConfig, check_kind
from paged.errors import NoFreeBlocksError, PagedError
from paged.sequence import Sequence

from .attention import LayerCall, paged_attention_in, restore_attention
from .paged_step import PagedStep
from .runner import ModelRunner


@dataclass(slots=True)
class _Forward:
    """A forward pass that is running, `length` tokens into the cache."""

    length: int
    step: PagedStep | None = None  # once the first layer has called
    attention: ExitStack = field(default_factory=ExitStack)


class PagedCache(Cache):
    """K and V of a batch in pages: `model.generate(**inputs, cache=PagedCache(model))`.

    (`past_key_values=` where transformers calls it so.) Padding, on either side, takes no memory and
    is never attended to. Attention answers 0 for it, so the logits there mean nothing and are not
    those of the default cache: a prompt to be continued must not end in padding.

    Beams share blocks, which are copied when they are written. Within a forward pass that gets such
    a cache the model attends over pages; otherwise it attends as before.

    A cache holds one batch. A second `generate` goes on from it, so its inputs must begin with all
    that is held, as in a conversation; for others `reset` first. That gives the blocks back, which
    `manager.stats()` counts. A window is counted in tokens, without padding.

    Args:
        model: a causal language model in eval mode, the very one that is called.
        cache_config: as for `ModelRunner`. There is no prefix caching: a cache sees no token ids.
        dtype, backend: as for `ModelRunner`.

    Raises:
        As `ModelRunner`. In a forward pass: NoFreeBlocksError when the pool is full, after which the
        cache holds what it held before; ValueError for a batch of another size, or one without a
        new token.
    """

    def __init__(
        self,
        model: Any,
        cache_config: CacheConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(layers=[])
        check_kind("cache_config", cache_config, CacheConfig, optional=True)
        config = replace(cache_config or CacheConfig(), enable_prefix_caching=False)
        self.runner = ModelRunner(model, config, dtype=dtype, backend=backend)
        self.manager = self.runner.manager
        self._seqs: list[Sequence] = []
        self._seq_ids = count()
        self._real = torch.ones(0, 0, dtype=torch.bool)  # [batch_size, length], False for padding
        self._forward: _Forward | None = None
        if _enter not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_enter, with_kwargs=True)
            model.register_forward_hook(_leave, with_kwargs=True, always_call=True)

    # What a model calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The same tensors: the attention function stores them, for it knows which are padding."""
        if self._forward is None:
            name = type(self.runner.model).__name__
            raise PagedError(f"this PagedCache works in calls of the {name} it was made for")
        return key_states, value_states

    def attend(self, call: LayerCall) -> Tensor:
        """Make room for the new tokens when the first layer calls; attend as `PagedStep` does."""
        assert self._forward is not None
        if self._forward.step is None:
            self._forward.step = self._begin(call)
        return self._forward.step.attend(call)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row so far, padding included."""
        return self._real.shape[1]

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover, were there one."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots in the pool, which the rows of a batch share."""
        return self.runner.cache.num_blocks * self.runner.cache.block_size

    # What `generate` calls

    def reset(self) -> None:
        """Forget all tokens and give every block back."""
        for seq in self._seqs:
            self.manager.free(seq)
        self._seqs = []
        self._real = torch.ones(0, 0, dtype=torch.bool)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row beam_idx[i], whose blocks it shares until either writes."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        rows = torch.arange(len(self._seqs))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, in this order; a row named again shares its blocks."""
        rows = torch.arange(len(self._seqs))[indices.cpu()]
        before, used = self._seqs, set()
        after = []
        for row in rows.tolist():
            seq = before[row]
            if row in used:
                child = seq.fork(next(self._seq_ids))
                self.manager.fork(seq, child)
                seq = child
            used.add(row)
            after.append(seq)
        for row, seq in enumerate(before):
            if row not in used:
                self.manager.free(seq)
        self._seqs, self._real = after, self._real[rows]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of each row.

        A positive number is what it was in earlier releases of transformers: the length to keep.
        """
        length = self.get_seq_length()
        kept = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if not 0 <= kept <= length:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; the cache holds {length} tokens"
            )
        for seq, num_tokens in zip(self._seqs, self._real[:, kept:].sum(1).tolist(), strict=True):
            self.manager.trim(seq, len(seq) - num_tokens)
        self._real = self._real[:, :kept]

    def activate_past_recording(self) -> None:
        """Nothing to do: what may be cropped after a forward pass is kept until the next."""

    # What both ask

    @property
    def batch_size(self) -> int:
        return len(self._seqs) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._seqs)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return len(self.runner.layers.layers)

    def __repr__(self) -> str:
        rows = f"{len(self._seqs)} rows of {self.get_seq_length()} tokens"
        return f"PagedCache({rows}, {self.runner.cache})"

    # How it is done

    def _begin(self, call: LayerCall) -> PagedStep:
        batch_size, _, num_new, _ = call.query.shape
        real = self._new_tokens(call.visible.attention_mask, batch_size, num_new)
        counts = real.sum(1).tolist()
        if self.get_seq_length() == 0:
            self.reset()
            self._seqs = [Sequence(next(self._seq_ids), ()) for _ in range(batch_size)]
            for seq in self._seqs:
                self.manager.allocate(seq)
            self._real = real[:, :0]
        self._grow(counts)
        self._real = torch.cat([self._real, real], 1)
        runner = self.runner
        batch = self.manager.build_batch(self._seqs, counts, device=runner.device)
        rows = None if real.all() else real.flatten().nonzero().squeeze(1).to(runner.device)
        return PagedStep(runner.cache, runner.layers.layers, batch, runner.backend, rows)

    def _new_tokens(self, mask: Tensor | None, batch_size: int, num_new: int) -> Tensor:
        """bool [batch_size, num_new] on the CPU: which of the new tokens are no padding."""
        length = self.get_seq_length()
        if length and batch_size != len(self._seqs):
            raise ValueError(
                f"the batch has {batch_size} rows, this cache holds {len(self._seqs)}; reset() "
                "makes room for another batch"
            )
        if mask is None:
            return torch.ones(batch_size, num_new, dtype=torch.bool)
        if mask.shape != (batch_size, length + num_new):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; it must cover the {length} tokens "
                f"in the cache and {num_new} new ones of {batch_size} rows; reset() empties it"
            )
        return mask[:, length:].cpu()

    def _grow(self, counts: list[int]) -> None:
        """Give each row slots for so many more tokens: all or nothing."""
        lengths = [len(seq) for seq in self._seqs]
        pairs: list[tuple[int, int]] = []
        try:
            for seq, num_tokens in zip(self._seqs, counts, strict=True):
                self.manager.mark_computed(seq, len(seq))  # now, for until here crop may come
                seq.token_ids.extend([0] * num_tokens)
                pairs += self.manager.append_slots(seq)
        except NoFreeBlocksError:
            for seq, length in zip(self._seqs, lengths, strict=True):
                self.manager.trim(seq, length)
            raise
        finally:
            self.runner.cache.copy_blocks(pairs)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a forward pass with a PagedCache: attend over its pages."""
    cache = _cache_in(args, kwargs)
    if "paged_step" not in kwargs:  # else an engine has made this call
        restore_attention(model)
    if cache is None:
        return None
    if cache.runner.model is not model:
        raise PagedError(f"this PagedCache was made for another {type(model).__name__}")
    if cache._forward is not None and cache.get_seq_length():
        raise PagedError("a forward pass of this PagedCache was interrupted; reset() it first")
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, Tensor) and not ids.numel():
        raise ValueError(
            f"input_ids has no new token after the {cache.get_seq_length()} in the cache; for another "
            "batch, reset() it first"
        )
    cache._forward = _Forward(cache.get_seq_length())
    cache._forward.attention.enter_context(paged_attention_in(cache.runner.layers.configs))
    return args, kwargs | {"paged_step": cache}


def _leave(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After it: attend as before. When it failed, forget its tokens."""
    cache = _cache_in(args, kwargs)
    if cache is None or cache._forward is None:
        return
    cache._forward.attention.close()
    if output is None:
        cache.crop(cache._forward.length - cache.get_seq_length())
    cache._forward = None


def _cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedCache | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, PagedCache)), None)
