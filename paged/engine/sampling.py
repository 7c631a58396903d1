"""What a request asks for, and the choice of the next token.

A draw depends on a sequence's seed and on how many tokens it has generated, on nothing else: not
on the rest of the batch, on preemption, or on a step that failed and was made again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from paged.config import check_int
from paged.sequence import checked_tokens

if TYPE_CHECKING:
    from torch import Tensor

SEED_BITS = 63
_LEAST_TEMPERATURE = 1e-37  # below, it is 0 in float32 on some devices


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request goes on from its prompt.

    max_tokens      most tokens that each sequence generates
    temperature     logits are divided by it; 0: the most probable token, always
    top_k           draw among the k most probable tokens (and those equal to the last of them)
    top_p           draw among the fewest most probable tokens with this probability together
    seed            of the draws; sequence i of n draws as a request with seed + i alone would.
                    None: another one each time
    n               sequences that come back: drawn independently, or the n best beams
    num_beams       beams of a beam search; 1: none
    length_penalty  a beam's score is its log-probability / length ** length_penalty
    early_stopping  True: end with num_beams finished beams; False: when the best running one falls
                    behind them at its present length; "never": when it cannot catch up at any
    stop_token_ids  tokens that end a sequence, besides the model's own
    ignore_eos      the model's own do not
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, minimum=1)
        _check_number("temperature", self.temperature, "a number >= 0", minimum=0)
        check_int("top_k", self.top_k, minimum=1, optional=True)
        if self.top_p is not None:
            wanted = "a number in (0, 1] or None"
            _check_number("top_p", self.top_p, wanted, minimum=0)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p is {self.top_p}; it must be {wanted}")
        check_int("seed", self.seed, minimum=0, optional=True)
        if self.seed is not None and self.seed >> SEED_BITS:
            raise ValueError(f"seed is {self.seed}; it must be below 2**{SEED_BITS}")
        check_int("n", self.n, minimum=1)
        check_int("num_beams", self.num_beams, minimum=1)
        _check_number("length_penalty", self.length_penalty, "a finite number")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f'early_stopping is {self.early_stopping!r}; it must be True, False or "never"'
            )
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        stop_token_ids = tuple(checked_tokens(self.stop_token_ids, "stop_token_ids"))
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        self._check_together()

    def _check_together(self) -> None:
        if self.num_beams == 1:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                raise ValueError(
                    f"num_beams is 1; length_penalty {self.length_penalty} and early_stopping "
                    f"{self.early_stopping!r} are for a beam search"
                )
            if self.n > 1 and self.temperature == 0:
                raise ValueError(
                    f"n is {self.n} at temperature 0; the most probable sequence is only one: "
                    f"raise temperature or num_beams"
                )
        else:
            if self.temperature > 0:
                raise ValueError(
                    f"temperature is {self.temperature} with num_beams {self.num_beams}; "
                    f"beams are not drawn: it must be 0"
                )
            if self.n > self.num_beams:
                raise ValueError(f"n is {self.n}; it must be at most num_beams, {self.num_beams}")


class Draw(NamedTuple):
    """Whose token is chosen: the request's params, the sequence's seed, its generated tokens."""

    params: SamplingParams
    seed: int
    position: int


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row of `logits` [num_rows, vocab]; None where the row has a NaN."""
    tokens: list[int | None] = [None] * len(draws)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row, (params, _, _) in enumerate(draws):
        alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(row)
    for (temperature, top_k, top_p), rows in alike.items():
        part = logits if len(rows) == len(draws) else logits[rows]
        if temperature == 0:
            found = _most_probable(part)
        else:
            points = [uniform(draws[row].seed, draws[row].position) for row in rows]
            found = _drawn(probabilities(part, temperature, top_k, top_p), points)
        for row, token in zip(rows, found, strict=True):
            tokens[row] = token
    return tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that looks random and is a function of both."""
    bits: int = xxh3_64_intdigest(pack("<QQ", seed, position))
    return float(bits >> 11) * 2.0**-53


def probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """float32 [num_rows, vocab], 0 for what top_k and then top_p leave out."""
    import torch

    logits = logits.float()
    # Differences to the greatest cannot overflow, however small the temperature.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, _LEAST_TEMPERATURE)
    vocab = logits.shape[-1]
    if top_k is not None and top_k < vocab:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort()
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        left_out[:, -1] = False
        logits = logits.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
    return logits.softmax(-1)


def _most_probable(logits: Tensor) -> list[int | None]:
    best = logits.max(-1)  # NaN counts as the largest
    missing = best.values.isnan().tolist()
    tokens = best.indices.tolist()
    return [None if nan else token for nan, token in zip(missing, tokens, strict=True)]


def _drawn(probs: Tensor, points: list[float]) -> list[int | None]:
    """The token at which the running sum passes the row's point: never one of probability 0."""
    import torch

    sums = probs.cumsum(-1, dtype=torch.float64)
    totals = sums[:, -1:]
    targets = torch.tensor(points, dtype=torch.float64, device=probs.device)[:, None] * totals
    tokens = torch.searchsorted(sums, targets, right=True)[:, 0].tolist()
    missing = totals[:, 0].isnan().tolist()
    return [None if nan else token for nan, token in zip(missing, tokens, strict=True)]


def _check_number(name: str, value: Any, wanted: str, minimum: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be {wanted}")
    if not math.isfinite(value) or value < minimum:
        raise ValueError(f"{name} is {value}; it must be {wanted}")
