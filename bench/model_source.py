"""Which model runs, and what plain transformers says of the tokens that others generate with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import BenchError, NotMeasuredError

VARIABLE, DEFAULT_FOLDER = "PAGED_SMOLLM2", "~/.cache/paged/smollm2"
NAME = "SmolLM2-135M-Instruct"
# The best logit may exceed that of the chosen token by so much: rounding differs between kernels.
# Logits are near 20: bfloat16 holds them in steps of 0.125.
EXCUSED = {"float32": 1e-4, "bfloat16": 0.5}
MOST_EXCUSED = {"float32": 0.01, "bfloat16": 0.1}  # share of the tokens


def folder() -> Path | None:
    """Where the converted model is; None where it is not."""
    path = Path(os.environ.get(VARIABLE, DEFAULT_FOLDER)).expanduser()
    return path if (path / "config.json").is_file() else None


def load_smollm2(dtype: str = "float32") -> Any:
    """The model, in eval mode. NotMeasuredError where it or transformers is missing."""
    path = folder()
    if path is None:
        raise NotMeasuredError(
            f"{NAME} is not at hand: run tests/fetch_smollm2.py, or set {VARIABLE} to its folder"
        )
    import torch

    transformers = _transformers()
    dtype = getattr(torch, dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def tiny_llama(dtype: str = "float32") -> Any:
    """Two layers with random weights, always the same."""
    import torch

    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def check_tokens(
    model: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]], who: str
) -> int:
    """How many greedy tokens are not plain transformers' first choice, by rounding alone.

    One pass over prompt and output gives the logits of every token. BenchError when a token is
    further below the best than rounding explains, or when too many are below it at all.
    """
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    num_excused = 0
    with torch.no_grad():
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            gaps = logits.max(dim=1).values - chosen
            for place in (~(gaps <= EXCUSED[dtype])).nonzero().flatten().tolist():
                raise BenchError(
                    f"{who}: prompt {number}, token {place} is not that of plain transformers: "
                    f"its logit is {float(gaps[place]):.3g} below the best"
                )
            num_excused += int((gaps > 0).sum())
    total = sum(map(len, outputs))
    if num_excused > max(1, MOST_EXCUSED[dtype] * total):
        raise BenchError(f"{who}: {num_excused} of {total} tokens are not the best by rounding")
    return num_excused


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise NotMeasuredError("transformers is not installed (the extra `models`)") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers
