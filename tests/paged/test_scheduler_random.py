"""Random loads in tiny pools: everything ends, in order, and every cached value is right.

`PAGED_SCHEDULER_LOADS=10000 pytest tests/paged/test_scheduler_random.py` goes on for longer.
"""

import os
import random
from collections import Counter

import pytest
from scheduler_driver import Driver

from paged import CacheConfig, NotOnGpuError, SchedulerConfig

LOADS = int(os.environ.get("PAGED_SCHEDULER_LOADS", "400"))


class Load:
    """Requests that arrive, fork, finish and are aborted by chance, drawn from one seed."""

    def __init__(self, number):
        self.rng = rng = random.Random(number)
        block_size = rng.choice([1, 2, 4, 4, 16])
        num_gpu_blocks = rng.choice([3, 4, 5, 6, 8, 8, 10, 12])
        self.families = rng.random() < 0.4  # many groups of several sequences
        self.driver = Driver(
            CacheConfig(
                block_size=block_size,
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=rng.choice([0, 0, 2, 4, 30]),
                enable_prefix_caching=rng.random() < 0.7,
                watermark=rng.choice([0.0, 0.0, 0.01, 0.2]),
                sliding_window=rng.choice([None] * 5 + [3, block_size + 1]),
                free_order=rng.choice(["fifo", "first_fit"]),
                max_cached_blocks=rng.choice([None, None, None, 2]),
            ),
            SchedulerConfig(
                max_num_seqs=rng.choice([1, 2, 3, 4, 8, 8, 8, 16]),
                max_num_batched_tokens=rng.choice([1, 2, 3, 5, 5, 8, 8, 16, 64]),
                policy=rng.choice(["fcfs", "priority"]),
                preemption=rng.choice(["auto", "swap", "recompute"]),
                enable_chunked_prefill=rng.random() < 0.8,
                num_lookahead_slots=rng.choice([0, 0, 0, 0, 1, 3]),
            ),
        )
        self.capacity = block_size * num_gpu_blocks
        config = self.driver.config
        self.most_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.prefix = [rng.randrange(3) for _ in range(self.capacity)]
        self.to_come = rng.randrange(1, 12)
        self.arrives_with = rng.choice([0.1, 0.5, 1.0])
        self.forks = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.aborts = rng.choice([0.0, 0.0, 0.02])
        self.fails = rng.choice([0.0, 0.1])
        self.outputs = {}  # tokens that each request may still generate per sequence
        self.forks_left = {}
        self.added = 0
        self.work = 0

    def arrive(self):
        rng = self.rng
        n = rng.choice([2, 3, 3] if self.families else [1, 1, 1, 2, 3])
        if rng.random() < 0.95:
            n = min(n, self.most_seqs)
        most = (
            self.capacity * rng.choice([1, 1, 1, 2, 3, 6]) // 6
        )  # 6: perhaps with too long outputs
        if not self.driver.config.enable_chunked_prefill and rng.random() < 0.9:
            most = min(most, self.driver.config.max_num_batched_tokens + 1)
        length = rng.randrange(1, max(2, most))
        shared = rng.randrange(length + 1)
        tokens = self.prefix[:shared] + [rng.randrange(3) for _ in range(length - shared)]
        self.added += 1
        self.driver.add(
            self.added,
            tokens,
            n,
            priority=rng.randrange(3),
            arrival_time=float(self.added),
            salt=rng.choice([None, None, None, "s"]),
        )
        self.outputs[self.added] = rng.randrange(
            1, 2 + max(1, self.capacity - length) // rng.choice([1, 1, 2, 3])
        )
        self.forks_left[self.added] = rng.randrange(6)
        self.work += n * (length + self.outputs[self.added])
        self.to_come -= 1

    def run(self):
        driver, rng = self.driver, self.rng
        while self.to_come or driver.scheduler.has_unfinished:
            while self.to_come and (rng.random() < self.arrives_with or not driver.groups):
                self.arrive()
            self.abort_some()
            output = driver.begin()
            while rng.random() < self.fails:  # the model's step failed
                output = driver.begin()
            if rng.random() < 0.5:
                self.fork_some()
            while rng.random() < self.fails:
                output = driver.begin()
            self.abort_some()
            self.end(output)
            if rng.random() < 0.5:
                self.fork_some()
            assert driver.steps < 200 + 20 * self.work, "it goes on and on"
        driver.check_nothing_is_left()

    def end(self, output):
        driver, rng = self.driver, self.rng
        at_end = driver.at_end(output)
        groups = {driver.group_of[seq.seq_id] for seq in at_end}
        tokens, finished = {}, []
        for request_id in groups:
            self.outputs[request_id] -= 1
            members = driver.members(request_id)  # those that have forked since included
            for seq in members:
                ends = self.outputs[request_id] <= 0 or rng.random() < 0.02
                if ends:
                    finished.append(seq.seq_id)
                if not ends or rng.random() < 0.5:
                    tokens[seq.seq_id] = rng.randrange(3)
        if rng.random() < 0.05:  # one that has not come to its end gives up
            finished += [seq.seq_id for seq in list(driver.live.values())[:1]]
            finished = list(dict.fromkeys(finished))
        if rng.random() < 0.2 and driver.live:  # ignored, where it did not come to its end
            tokens.setdefault(rng.choice(list(driver.live)), 7)
        driver.end(output, tokens, finished)

    def fork_some(self):
        driver, rng = self.driver, self.rng
        for parent in list(driver.live.values()):
            request_id = driver.group_of[parent.seq_id]
            if (
                rng.random() < self.forks
                and self.forks_left[request_id]
                and len(driver.members(request_id)) < self.most_seqs
            ):
                self.forks_left[request_id] -= 1
                self.work += len(parent) + max(0, self.outputs[request_id])
                if parent.seq_id in driver.manager.swapped:
                    with pytest.raises(NotOnGpuError):
                        driver.fork(parent, "child")
                else:
                    driver.fork(parent, (request_id, f"child {self.forks_left[request_id]}"))

    def abort_some(self):
        for request_id in list(self.driver.groups):
            if self.rng.random() < self.aborts:
                self.driver.abort(request_id)


@pytest.mark.parametrize("part", range(4))
def test_every_request_of_a_random_load_ends_with_its_own_values(part):
    seen = Counter()
    for number in range(part, LOADS, 4):
        load = Load(number)
        try:
            load.run()
        except Exception as error:
            raise AssertionError(f"load {number}: {error}") from error
        seen.update(load.driver.preempted)
        seen["copies"] += load.driver.copies
        seen["rejected"] += len(load.driver.rejected)
        seen["finished"] += load.driver.scheduler.num_finished
    assert min(seen[kind] for kind in ("swap", "recompute", "copies", "rejected", "finished")) > 0
