"""Prompts as they come from users: text or token ids, one or many."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from paged.errors import PromptTooLongError
from paged.sequence import as_list, checked_tokens

from .detokenizer import Tokenizer
from .sampling import SamplingParams

Prompt = str | Iterable[int]


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """A prompt's tokens; TypeError or ValueError says what is wrong with it."""
    if not isinstance(prompt, str):
        token_ids = checked_tokens(prompt, "prompt")
    elif tokenizer is None:
        raise TypeError("prompt is text; without a tokenizer it must be token ids")
    else:
        token_ids = list(tokenizer.encode(prompt))
    if not token_ids:
        raise ValueError("prompt is empty; it must have a token")
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt has token {token} at position {position}; the model has {vocab_size}"
            )
    return token_ids


def most_new_tokens(token_ids: list[int], max_tokens: int, max_model_len: int | None) -> int:
    """`max_tokens`, or less where the model ends; PromptTooLongError when that leaves none."""
    if max_model_len is None:
        return max_tokens
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(
            f"prompt has {len(token_ids):,} tokens; the model takes {max_model_len:,}, and one must "
            f"be left to generate"
        )
    return min(max_tokens, max_model_len - len(token_ids))


def with_params(
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params; one prompt may come without a list around it."""
    if hasattr(prompts, "tolist"):  # a tensor
        prompts = prompts.tolist()
    several: list[Prompt] = (
        [prompts] if isinstance(prompts, str) else as_list("prompts", prompts, "prompts")
    )
    if several and isinstance(several[0], Integral):
        several = [several]  # type: ignore[list-item]
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * len(several)
    else:
        each = as_list("params", params, "SamplingParams")
    if len(each) != len(several):
        raise ValueError(f"params has {len(each)} entries for {len(several)} prompts")
    return list(zip(several, each, strict=True))
