"""How long a scheduler's step takes, in CPU time, beside the barest Python that does a step.

"Barest" is a token appended and its slot computed, sequence by sequence. Sequences of 20 to 2,000
tokens decode; at every fourth step one ends and another comes, whose prompt is computed beside
them. What lies between the timed calls (sampling, arrivals) is not counted.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from tqdm import tqdm

from bench.block_manager_steps import append_and_slot
from bench.block_manager_works import freeze, random_tokens
from bench.charts import bar_chart
from bench.records import Record, Work, ratio_record, spread_text, text_table, time_in_turns
from bench.records import time_record as milliseconds
from bench.report import Result
from paged import (
    BlockSpaceManager,
    CacheConfig,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
)

NUM_SEQS = 256
SHORTEST, LONGEST = 20, 2_000
QUEUE = 10_000
BAREST = ", over the barest"


class Server:
    """A scheduler at work. The pool has room for all, so that nobody has to give way."""

    def __init__(self, rng: random.Random, num_groups: int, n: int) -> None:
        self.rng, self.n = rng, n
        blocks = CacheConfig(num_gpu_blocks=num_groups * n * 2 * LONGEST // 16, watermark=0.0)
        config = SchedulerConfig(max_num_seqs=num_groups * n, max_num_batched_tokens=1 << 20)
        self.scheduler = Scheduler(config, BlockSpaceManager(blocks))
        self.names = count()
        self.steps = count()
        for _ in range(num_groups):
            self.arrive()
        self.update(self.scheduler.schedule(), leave=False)
        freeze()

    def arrive(self) -> None:
        name, length = next(self.names), self.rng.randrange(SHORTEST, LONGEST)
        tokens = random_tokens(self.rng, length)
        self.scheduler.add(
            SequenceGroup(name, [Sequence((name, i), tokens) for i in range(self.n)])
        )

    def arguments(
        self, output: SchedulerOutput, leave: bool = True
    ) -> tuple[SchedulerOutput, dict[object, int], list[object]]:
        """What the update of a step takes; at every fourth one a group leaves."""
        tokens = random_tokens(self.rng, len(output.seqs))
        finished: list[object] = []
        if leave and next(self.steps) % 4 == 0:
            group = self.rng.choice(self.scheduler.running)
            finished = [seq.seq_id for seq in group.seqs]
            self.arrive()
        ids = [seq.seq_id for seq in output.seqs]
        return output, dict(zip(ids, tokens, strict=True)), finished

    def update(self, output: SchedulerOutput, leave: bool = True) -> None:
        self.scheduler.update(*self.arguments(output, leave))


def schedules(server: Server) -> Work:
    """`schedule` is timed."""
    outputs: list[SchedulerOutput] = []
    while True:
        yield lambda: outputs.append(server.scheduler.schedule())
        server.update(outputs.pop())


def updates(server: Server) -> Work:
    """`update` is timed."""
    while True:
        yield partial(server.scheduler.update, *server.arguments(server.scheduler.schedule()))


def items(rng: random.Random, quick: bool) -> Iterator[tuple[str, Work, int, str]]:
    """Name, work, sequences, wanted. Wanted times are those of a quiet machine."""
    lengths = f"sequences of {SHORTEST} to {LONGEST:,} tokens"
    for num_seqs in (16, NUM_SEQS) if quick else (16, NUM_SEQS, 4 * NUM_SEQS):
        wanted = "<= 0.4 ms" if num_seqs == NUM_SEQS else ""
        for name, work in (("schedule", schedules), ("update", updates)):
            yield (
                f"{name}, {num_seqs:,} {lengths}",
                work(Server(rng, num_seqs, 1)),
                num_seqs,
                wanted,
            )
    groups = Server(rng, NUM_SEQS // 4, 4)
    yield f"schedule, {NUM_SEQS // 4} groups of 4 {lengths}", schedules(groups), NUM_SEQS, ""
    behind = Server(rng, NUM_SEQS, 1)
    for _ in range(QUEUE):
        behind.arrive()
    yield f"schedule, {NUM_SEQS} {lengths}, {QUEUE:,} waiting", schedules(behind), NUM_SEQS, ""


def run(options: Namespace) -> Result:
    """Time everything beside the barest."""
    rng = random.Random(options.seed)
    records: list[Record] = []
    for name, ours, num_seqs, wanted in tqdm(
        list(items(rng, options.quick)), desc="scheduler", unit="work"
    ):
        barest = append_and_slot(rng, num_seqs, LONGEST // 2)
        times = time_in_turns(
            {"ours": ours, "barest": barest},
            rounds=30 if options.quick else 200,
            seed=options.seed,
        )
        records.append(milliseconds(name, times["ours"], wanted=wanted))
        records.append(ratio_record(name + BAREST, times["ours"], times["barest"], "x barest"))
    return {"records": records}


def table(result: Result) -> str:
    """A line for each work."""
    ratios = {r["name"]: f"{r['value']:.1f}" for r in result["records"] if r["kind"] == "ratio"}
    rows = [
        [r["name"], spread_text(r), ratios[r["name"] + BAREST], r["wanted"]]
        for r in result["records"]
        if r["kind"] == "time"
    ]
    return text_table(["CPU time", "ms: quartiles and median", "x barest", "wanted"], rows)


def plot(result: Result, path: Path) -> None:
    """The ratios."""
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    title = "CPU time of the scheduler (log scale, spread as a line)"
    bar_chart(result, path, ratios, title, "the barest Python")
