"""How long until the first token behind a prompt that many requests share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.model_runs import BLOCK_SIZE
from bench.model_source import check_tokens
from bench.records import GROUPS, Record, ratio_record, time_in_turns, time_record
from paged import CacheConfig

OWN = 32  # tokens of each request behind the shared ones
WARM, COLD = (
    "first token, shared prompt in the cache",
    "first token, shared prompt not in the cache",
)
WANTED = "<= 0.25"


def first_token_records(model: Any, shared: int, title: str, seed: int) -> list[Record]:
    """Warm: a prompt that came before. Cold: one of the same length that never did."""
    from paged.engine import Engine, SamplingParams

    rng = random.Random(seed)
    vocab_size = model.config.vocab_size
    num_blocks = (GROUPS + 3) * (-(-(shared + OWN + 1) // BLOCK_SIZE))
    engine = Engine(model, cache_config=CacheConfig(BLOCK_SIZE, num_blocks))
    params = SamplingParams(max_tokens=1, ignore_eos=True)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(number)]

    def first_token(prompt: list[int]) -> tuple[int, int]:
        """The token, and how many of the prompt's were in the cache."""
        (output,) = engine.generate([prompt], params)
        return output.outputs[0].token_ids[0], output.metrics.num_cached_tokens

    def runs(prefix: list[int] | None) -> Iterator[Callable[[], object]]:
        while True:
            prompt = (prefix or tokens(shared)) + tokens(OWN)
            yield partial(first_token, prompt)

    system_prompt = tokens(shared)
    for is_warm in (False, True):
        prompt = system_prompt + tokens(OWN)
        token, num_cached = first_token(prompt)
        assert (num_cached > 0) == is_warm, num_cached
        check_tokens(model, [prompt], [[token]], WARM if is_warm else COLD)
    times = time_in_turns(
        {WARM: runs(system_prompt), COLD: runs(None)},
        rounds=GROUPS,
        seed=seed,
        clock=time.perf_counter,
    )
    name = f"{title}, {shared:,} shared tokens: "
    records = [time_record(name + who, values, who=who, tokens=1) for who, values in times.items()]
    ratio = ratio_record(
        f"{name}first token, warm over cold", times[WARM], times[COLD], "x cold", who=WARM
    )
    return [*records, ratio | {"wanted": WANTED}]
