"""Thousands of requests, ended at every stage of life: every block comes home."""

import random

import pytest
from manager_helpers import constant_hash, make_manager

from paged import AllocStatus, Sequence, SequenceGroup

NUM_REQUESTS = 2_000
NUM_GPU_BLOCKS, NUM_CPU_BLOCKS = 40, 24
STAGES = ("waiting", "half-prefilled", "prefilled", "decoding", "forked", "swapped", "finished")


class Request:
    """A request that ends at a stage drawn before it starts."""

    def __init__(self, rng, key, block_size):
        around = rng.randrange(0, 5) * block_size + rng.choice([-1, 0, 1])
        shared = [rng.randrange(2)] * max(1, around)
        self.seq = Sequence(key, shared)
        self.children = []
        self.ends_at = rng.choice(STAGES)
        self.decodes_left = rng.choice([0, 1, block_size - 1, block_size, block_size + 1])
        self.stage = "waiting"
        self.ended = False

    @property
    def group(self):
        return SequenceGroup(self.seq.seq_id, [self.seq, *self.children])


def advance(manager, request, rng, key):
    """Take one request one stage further, if there is room; free it where it is to end."""
    seq = request.seq
    if request.stage == "waiting":
        if request.ends_at == "waiting":
            request.ended = True  # aborted before it held anything
        elif manager.can_allocate(seq) is AllocStatus.OK:
            manager.allocate(seq)
            request.stage = "half-prefilled"
        return
    if request.stage == request.ends_at:
        for member in request.group.seqs:
            manager.free(member)
        request.ended = True
    elif request.stage == "half-prefilled":
        manager.mark_computed(seq, max(manager.num_cached_tokens(seq), len(seq) // 2))
        manager.mark_computed(seq, len(seq))
        request.stage = "prefilled"
    elif request.stage == "prefilled":
        request.stage = "decoding"
    elif request.stage == "decoding":
        decode(manager, request, rng, key)
    elif request.stage == "forked":
        if manager.can_swap_out(request.group):
            manager.swap_out(request.group)
            request.stage = "swapped"
        elif not manager.stats().cpu.num_used:
            request.stage = "finished"
    elif request.stage == "swapped" and manager.can_swap_in(request.group) is AllocStatus.OK:
        manager.swap_in(request.group)
        request.stage = "finished"


def decode(manager, request, rng, key):
    """One token, or the fork after the last one."""
    seq = request.seq
    if request.decodes_left:
        seq.append_token(rng.randrange(3))
        if manager.can_append_slots(seq):
            manager.append_slots(seq)
            manager.mark_computed(seq, len(seq))
            request.decodes_left -= 1
        else:
            manager.trim(seq, len(seq) - 1)
        return
    child = seq.fork(f"{key}-child")
    manager.fork(seq, child)
    child.append_token(7)
    if manager.can_append_slots(child):
        manager.append_slots(child)
        manager.mark_computed(child, len(child))
        request.children.append(child)
    else:
        manager.free(child)
    request.stage = "forked"


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("hash_fn", [None, constant_hash], ids=["xxhash", "constant"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_block_comes_home(block_size, hash_fn, sliding_window):
    rng = random.Random(block_size)
    manager = make_manager(
        NUM_GPU_BLOCKS,
        block_size,
        num_cpu_blocks=NUM_CPU_BLOCKS,
        hash_fn=hash_fn,
        sliding_window=sliding_window,
        watermark=0.05,
    )
    active, ended, key, rounds = [], {}, 0, 0
    while key < NUM_REQUESTS or active:
        while key < NUM_REQUESTS and len(active) < 16:
            active.append((key, Request(rng, key, block_size)))
            key += 1
        for name, request in active:
            if not request.ended:
                advance(manager, request, rng, name)
            if request.ended:
                ended[request.ends_at] = ended.get(request.ends_at, 0) + 1
        active = [(name, request) for name, request in active if not request.ended]
        rounds += 1
        assert rounds < 100 * NUM_REQUESTS, "nothing moves any more"
        if rounds % 50 == 0:
            manager.check_invariants()
    assert sum(ended.values()) == NUM_REQUESTS
    assert min(ended.get(stage, 0) for stage in STAGES) > NUM_REQUESTS // 20
    stats = manager.stats()
    assert stats.gpu.num_used == stats.cpu.num_used == 0
    assert stats.gpu.num_free == NUM_GPU_BLOCKS and stats.cpu.num_free == NUM_CPU_BLOCKS
    manager.check_invariants()
    manager.reset_prefix_cache()
    everything = Sequence("everything", range(NUM_GPU_BLOCKS * block_size))
    manager.allocate(everything)
    assert sorted(manager.block_table(everything)) == list(range(NUM_GPU_BLOCKS))
