"""Who generates with the model, each as a function that returns the tokens of every prompt."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from paged import CacheConfig

BLOCK_SIZE = 16
NO_TOKEN = -1  # as the end of a text: generation goes on to the last token
Prompts = Sequence[list[int]]
Generate = Callable[[], list[list[int]]]


class Ours:
    """Our engine, and how long its scheduler and manager took in each run."""

    def __init__(self, model: Any, prompts: Prompts, max_tokens: int) -> None:
        from paged.engine import Engine, SamplingParams

        num_blocks = sum(-(-(len(p) + max_tokens) // BLOCK_SIZE) for p in prompts) + len(prompts)
        config = CacheConfig(BLOCK_SIZE, num_blocks, enable_prefix_caching=False)
        self.engine = Engine(model, cache_config=config)
        self.prompts = list(prompts)
        self.params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.bookkeeping: list[float] = []  # seconds of each run
        self._seconds = 0.0
        for owner, name in (
            (self.engine.scheduler, "schedule"),
            (self.engine.scheduler, "update"),
            (self.engine.manager, "build_batch"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def __call__(self) -> list[list[int]]:
        self._seconds = 0.0
        outputs = self.engine.generate(self.prompts, self.params)
        self.bookkeeping.append(self._seconds)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return call


def padded(model: Any, prompts: Prompts, max_tokens: int) -> Generate:
    """transformers' `generate` on one left-padded batch."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    config = _greedy(max_tokens)

    def run() -> list[list[int]]:
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        tokens: list[list[int]] = out[:, longest:].tolist()
        return tokens

    return run


def continuous_batching(model: Any, prompts: Prompts, max_tokens: int) -> Generate:
    """transformers' own continuous batching, its pool sized and its manager kept between runs."""
    from transformers import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    num_blocks = sum(-(-(len(p) + max_tokens) // BLOCK_SIZE) for p in prompts) + len(prompts)
    config = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE,
        num_blocks=2 * num_blocks,
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )

    def run() -> list[list[int]]:
        outputs = model.generate_batch(
            list(prompts),
            generation_config=_greedy(max_tokens),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    return run


def matrix_products(model: Any, prompts: Prompts, max_tokens: int) -> Callable[[], None]:
    """Only the model's linear layers, on as many rows as our engine gives them."""
    import torch
    from torch import nn

    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    num_tokens, num_seqs = sum(map(len, prompts)), len(prompts)
    widths = {layer.in_features for layer in [*layers, head]}
    rows = {width: torch.randn(num_tokens, width, dtype=model.dtype) for width in widths}

    @torch.no_grad()
    def run() -> None:
        for step in range(max_tokens):
            num_rows = num_seqs if step else num_tokens
            for layer in layers:
                layer(rows[layer.in_features][:num_rows])
            head(rows[head.in_features][:num_seqs])

    return run


def _greedy(max_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0
    )
