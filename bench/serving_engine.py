"""The article's rows with a model: one engine for all ways, behind a gate that they differ in."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from bench.model_source import check_tokens
from bench.records import GROUPS, Record, ratio_record, time_in_turns, time_record
from bench.serving_loads import Load
from bench.serving_replay import PAGE
from bench.serving_table import GAIN, SECONDS
from bench.serving_ways import LONGEST, ORACLE, PAGES, POWER_OF_TWO, Pieces, Way
from paged import CacheConfig
from paged.replay_config import final_length

WAYS = (LONGEST, POWER_OF_TWO, ORACLE, PAGES)
BUDGETS = (1, 4)  # units
REQUESTS, NEW_TOKENS = 8, 32
NUM_RUNS = len(BUDGETS) * len(WAYS) * GROUPS  # of one load


def shortened(load: Load) -> Load:
    """With less to generate, so that a run takes seconds."""
    requests = [
        replace(request, output_len=min(request.output_len, NEW_TOKENS))
        for request in load.requests
    ]
    return replace(load, requests=requests)


def measure(
    model: Any,
    load: Load,
    seed: int,
    on_run: Callable[[], object] = lambda: None,
    rounds: int = GROUPS,
) -> list[Record]:
    """Serve the load at each budget by each way, in turns; the tokens are checked first.

    on_run: called after each of the runs, NUM_RUNS by default.
    """
    rng = random.Random(seed)
    vocab_size = model.config.vocab_size
    prompts = [
        [rng.randrange(vocab_size) for _ in range(request.prompt_len)] for request in load.requests
    ]
    places = list(product(BUDGETS, WAYS))
    works = {
        f"{budget} {way.name}": _runs(model, load, way, budget * load.unit, prompts, on_run)
        for budget, way in places
    }
    times = time_in_turns(works, rounds=rounds, seed=seed, clock=time.perf_counter)
    num_tokens = sum(request.output_len for request in load.requests)
    records: list[Record] = []
    for budget, way in places:
        title = f"{load.name}, {len(prompts)} requests, {budget} x {load.unit:,} slots: {way.name}"
        place: dict[str, Any] = {"load": load.name, "budget": budget, "way": way.name}
        mine, pages = times[f"{budget} {way.name}"], times[f"{budget} {PAGES.name}"]
        records.append(
            time_record(f"{title}, with a model", mine, figure=SECONDS, tokens=num_tokens, **place)
        )
        if way is not PAGES:
            name = f"{title}, time over that of pages"
            records.append(ratio_record(name, mine, pages, "x pages", figure=GAIN, **place))
    return records


def serve(
    model: Any, load: Load, way: Way, num_slots: int, prompts: list[list[int]]
) -> list[list[int]]:
    """The tokens that each request generates."""
    from paged.engine import Engine, SamplingParams

    pieces = Pieces(way, load, num_slots) if way.places else None
    # Contiguous ways: a pool in which nothing is ever short, since the gate is what holds back.
    num_blocks = len(prompts) * load.unit // PAGE if pieces else num_slots // PAGE
    config = CacheConfig(PAGE, num_gpu_blocks=num_blocks, enable_prefix_caching=False)
    engine = Engine(model, cache_config=config)
    queue = deque(enumerate(load.requests))
    tokens: list[list[int]] = [[] for _ in prompts]
    while queue or engine.has_unfinished:
        while queue:
            key, request = queue[0]
            if pieces and not pieces.take(key, request.prompt_len, final_length(request)):
                break
            params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
            engine.add_request(prompts[key], params, request_id=key)
            queue.popleft()
        for output in engine.step():
            if output.finished:
                key = int(str(output.request_id))
                tokens[key] = list(output.outputs[0].token_ids)
                if pieces:
                    pieces.give_back(key)
    return tokens


def _runs(
    model: Any,
    load: Load,
    way: Way,
    num_slots: int,
    prompts: list[list[int]],
    on_run: Callable[[], object],
) -> Iterator[Callable[[], object]]:
    def checked() -> None:
        check_tokens(model, prompts, serve(model, load, way, num_slots, prompts), way.name)

    yield checked
    while True:
        on_run()
        yield lambda: serve(model, load, way, num_slots, prompts)
