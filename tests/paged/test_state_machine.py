"""Random walks over all manager calls, each call checked against a model with real token values.

`PAGED_STATE_MACHINE_CALLS=1000000 pytest tests/paged/test_state_machine.py -s` walks further and
prints its progress.
"""

import os
import random
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manager_helpers import constant_hash
from manager_oracle import CheckedManager

from paged import CacheConfig
from paged.journal import Replay

CALLS = int(os.environ.get("PAGED_STATE_MACHINE_CALLS", "20000"))
BLOCK_SIZES = (1, 2, 4, 16)
WALK = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

pick = st.integers(0, 11)
token = st.integers(0, 1)  # few tokens: equal prefixes are common


class ManagerWalk(RuleBasedStateMachine):
    """One manager from its first to its last call."""

    block_size = 4
    calls = 0

    def __init__(self):
        super().__init__()
        self.walk = None
        self.past = []
        self.waiting = []

    @initialize(
        num_gpu_blocks=st.integers(3, 12),
        num_cpu_blocks=st.integers(0, 6),
        caching=st.sampled_from([True] * 7 + [False]),
        max_cached_blocks=st.sampled_from([None] * 6 + [0, 2]),
        free_order=st.sampled_from(["fifo", "first_fit"]),
        watermark=st.sampled_from([0.0, 0.2, 0.4]),
        window=st.sampled_from([None] * 5 + [1, 1, 2, 3, 8, 17]),
        hash_fn=st.sampled_from([None, constant_hash]),
    )
    def start(
        self,
        num_gpu_blocks,
        num_cpu_blocks,
        caching,
        max_cached_blocks,
        free_order,
        watermark,
        window,
        hash_fn,
    ):
        self.walk = CheckedManager(
            CacheConfig(
                block_size=self.block_size,
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=num_cpu_blocks,
                enable_prefix_caching=caching,
                max_cached_blocks=max_cached_blocks,
                free_order=free_order,
                watermark=watermark,
                sliding_window=window,
                hash_fn=hash_fn,
            )
        )

    def one(self, index, handles):
        return handles[index % len(handles)]

    def some_running(self):
        return bool(self.walk and self.walk.running())

    def some_swapped(self):
        return bool(self.walk and self.walk.swapped())

    def finish(self, h):
        """Write and publish all that has a slot, as an engine does after each step."""
        if h.written < h.slotted:
            self.walk.compute(h, h.slotted - h.written)
        if h.computed < h.written:
            self.walk.mark(h, h.written)

    @rule(
        blocks=st.integers(0, 4),
        offset=st.integers(-1, 1),
        change=st.integers(0, 40),
        num_seqs=st.sampled_from([1, 1, 1, 1, 2, 3]),
        again=st.sampled_from([None, 0, 0, 1, 1, 2, 3]),
        keys=st.sampled_from([(None, None)] * 3 + [("s", None), (None, 1), (None, "1")]),
        finish=st.sampled_from([True, True, False]),
    )
    def allocate(self, blocks, offset, change, num_seqs, again, keys, finish):
        length = max(1, blocks * self.block_size + offset)
        prompt = [0] * length
        if again is not None and again < len(self.past):  # what an earlier sequence held
            tokens, keys = self.past[again]
            prompt = (tokens + prompt)[:length]
        if change < length:
            prompt[change] = 2
        self.admit(self.walk.new_sequences(prompt, num_seqs, *keys), finish)

    def admit(self, seqs, finish):
        admitted = self.walk.allocate(seqs)
        for h in admitted:
            self.remember(h)
            if finish:
                self.finish(h)
        if not admitted:
            self.waiting = [seqs, *self.waiting[:2]]

    @precondition(lambda self: self.walk and self.waiting)
    @rule(index=pick, finish=st.booleans())
    def try_again(self, index, finish):
        """A queue asks for the same sequences at every step, whatever has been evicted since."""
        self.admit(self.waiting.pop(index % len(self.waiting)), finish)

    def remember(self, h):
        self.past.insert(0, (list(h.seq.token_ids), (h.seq.salt, h.seq.extra_key)))
        del self.past[4:]

    @precondition(some_running)
    @rule(index=pick, part=st.integers(1, 4))
    def compute(self, index, part):
        h = self.one(index, self.walk.running())
        missing = h.slotted - h.written
        if missing:
            self.walk.compute(h, max(1, missing * part // 4))

    @precondition(some_running)
    @rule(index=pick, back=st.sampled_from([0, 0, 0, 1, 5]))
    def mark_computed(self, index, back):
        h = self.one(index, self.walk.running())
        if h.written:
            self.walk.mark(h, max(0, h.written - back))

    @precondition(some_running)
    @rule(
        index=pick,
        tokens=st.lists(token, max_size=5),
        lookahead=st.sampled_from([0, 0, 0, 1, 3]),
        finish=st.booleans(),
    )
    def append(self, index, tokens, lookahead, finish):
        h = self.one(index, self.walk.running())
        if len(h.seq) < 8 * self.block_size + 8:
            done = self.walk.append(h, tokens, lookahead)
            if done is not None and finish:
                self.finish(h)

    @precondition(some_running)
    @rule(
        rows=st.permutations(range(6)),
        count=st.sampled_from([1, 2, 3, 6]),
        tokens=st.lists(token, min_size=6, max_size=6),
    )
    def step(self, rows, count, tokens):
        running = self.walk.running()
        chosen = [running[i] for i in rows[:count] if i < len(running)]
        for h in chosen:
            if h.slotted < len(h.seq) and self.walk.append(h, [], 0) is None:
                return
            if h.written < h.slotted:
                self.walk.compute(h, h.slotted - h.written)
        if chosen:
            self.walk.step(chosen, tokens[: len(chosen)])

    @precondition(some_running)
    @rule(index=pick, back=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def fork(self, index, back):
        if len(self.walk.live) < 5:
            child = self.walk.fork(self.one(index, self.walk.running()))
            if back:
                self.walk.trim(child, max(0, len(child.seq) - back))

    @precondition(some_running)
    @rule(index=pick, blocks=st.integers(0, 4), tokens=st.lists(token, max_size=6))
    def branch(self, index, blocks, tokens):
        if len(self.walk.live) < 5:
            h = self.one(index, self.walk.running())
            num_tokens = min(blocks, len(h.seq) // self.block_size) * self.block_size
            if num_tokens or tokens:
                self.walk.branch(h, tokens, num_tokens)

    @precondition(some_running)
    @rule(index=pick, back=st.sampled_from([0, 1, 1, 2, 3, 5, 9]))
    def trim(self, index, back):
        h = self.one(index, self.walk.running())
        self.walk.trim(h, max(0, len(h.seq) - back))

    @precondition(some_running)
    @rule(index=pick, count=st.integers(1, 3))
    def swap_out(self, index, count):
        running = self.walk.running()
        start = index % len(running)
        self.walk.swap_out(running[start : start + count])

    @precondition(some_swapped)
    @rule(index=pick, count=st.integers(1, 3))
    def swap_in(self, index, count):
        swapped = self.walk.swapped()
        start = index % len(swapped)
        self.walk.swap_in(swapped[start : start + count])

    @precondition(lambda self: self.walk and self.walk.live)
    @rule(index=pick)
    def free(self, index):
        h = self.one(index, list(self.walk.live.values()))
        self.remember(h)
        self.walk.free(h)

    @rule(chance=st.integers(0, 9))
    def reset_prefix_cache(self, chance):
        if chance == 5:
            self.walk.reset()

    @rule(num_blocks=st.integers(3, 14), chance=st.integers(0, 9))
    def resize(self, num_blocks, chance):
        if chance == 5:
            self.walk.resize(num_blocks)

    def teardown(self):
        if self.walk:
            type(self).calls += sum(self.walk.calls.values())
            if self.walk.sound:
                self.walk.finish()


def walk_for(block_size, calls):
    """Walk until so many manager calls are made; says how far it is every few seconds."""
    machine = type(
        f"ManagerWalkBlockSize{block_size}", (ManagerWalk,), {"block_size": block_size, "calls": 0}
    )
    begin = said = time.perf_counter()
    round_ = 0
    while machine.calls < calls:
        run_state_machine_as_test(seed(round_)(machine), settings=WALK)
        round_ += 1
        now = time.perf_counter()
        if calls > 20_000 and now - said > 10:
            said = now
            print(
                f"block size {block_size}: {machine.calls:,} of {calls:,} calls, {now - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return machine.calls


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_call_agrees_with_the_model(block_size):
    calls = CALLS // len(BLOCK_SIZES)
    assert walk_for(block_size, calls) >= calls


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("free_order", ["fifo", "first_fit"])
def test_a_larger_pool_agrees_with_the_model(free_order, window, tmp_path):
    """Many sequences with long chains, by plain random choice: what small pools cannot hold.

    The calls are recorded, and replayed they lead to the same state.
    """
    rng = random.Random(1)
    walk = ManagerWalk()
    walk.start(
        num_gpu_blocks=60,
        num_cpu_blocks=30,
        caching=True,
        max_cached_blocks=None,
        free_order=free_order,
        watermark=0.05,
        window=window,
        hash_fn=None,
    )
    journal = walk.walk.manager.record(tmp_path / "journal")
    for _ in range(800):
        index, tokens = rng.randrange(12), [rng.randrange(2) for _ in range(6)]
        action = rng.choice(
            [walk.allocate] * 4
            + [walk.step] * 4
            + [walk.free] * 2
            + [walk.append, walk.fork, walk.branch]
            + [walk.trim, walk.swap_out, walk.swap_in, walk.mark_computed]
            + [walk.try_again] * 3
            + [walk.resize]
        )
        if action == walk.allocate:
            walk.allocate(
                blocks=rng.randrange(12),
                offset=rng.randrange(-1, 2),
                change=rng.randrange(80),
                num_seqs=rng.choice([1, 1, 1, 2]),
                again=rng.choice([None, 0, 1, 2, 3]),
                keys=(None, None),
                finish=rng.random() < 0.8,
            )
        elif walk.walk.live and action == walk.free:
            walk.free(index=index)
        elif action == walk.swap_in and walk.walk.swapped():
            walk.swap_in(index=index, count=rng.randrange(1, 4))
        elif action == walk.try_again and walk.waiting:
            walk.try_again(index=index, finish=True)
        elif action == walk.resize:
            walk.resize(num_blocks=rng.randrange(40, 70), chance=5)
        elif not walk.walk.running():
            continue
        elif action == walk.step:
            walk.step(rows=rng.sample(range(6), 6), count=6, tokens=tokens)
        elif action == walk.append:
            walk.append(index=index, tokens=tokens, lookahead=rng.randrange(6), finish=True)
        elif action == walk.fork:
            walk.fork(index=index, back=rng.choice([0, 0, 3]))
        elif action == walk.branch:
            walk.branch(index=index, blocks=rng.randrange(5), tokens=tokens[: rng.randrange(6)])
        elif action == walk.trim:
            walk.trim(index=index, back=rng.randrange(10))
        elif action == walk.swap_out:
            walk.swap_out(index=index, count=rng.randrange(1, 4))
        elif action == walk.mark_computed:
            walk.mark_computed(index=index, back=0)
    assert walk.walk.hit > 0 and walk.walk.calls["swap_in"] > 5
    journal.close()
    replay = Replay(tmp_path / "journal")
    assert [differs for *_, differs in replay if differs] == []
    assert without_digests(replay.manager) == without_digests(walk.walk.manager)
    walk.walk.finish()


def without_digests(manager):
    """A manager's state; digests differ from one unseeded manager to the next."""
    state = manager.snapshot()
    for entry in state["cache"]["published"].values():
        del entry["digest"]
    return state
