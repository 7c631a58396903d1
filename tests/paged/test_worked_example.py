"""The example with which articles explain block managers, worked through by the real one.

Six blocks P0..P5 of 16 tokens; sequence A holds 64 tokens in P0, P3, P1, P5; sequence B starts
with A's first 16 tokens. Told in prose the bookkeeping slips easily, and did so in print:

- B has 32 tokens, shares one block and so takes *one* new block, P2. (In print: it shares one and
  takes two.)
- B's third block is P4. (In print: no block is left.) It is B's fourth that finds the pool empty.
- When A ends, its shared block stays, with one reference. Three blocks come back. (In print: the
  shared one is listed as free too, with a reference count of 1 in one place and 0 in the other.)
"""

import pytest

from paged import (
    AllocStatus,
    BlockSpaceManager,
    CacheConfig,
    NoFreeBlocksError,
    Sequence,
    SequenceGroup,
)

PROMPT_A = list(range(64))
PROMPT_B = [*range(16), *range(100, 116)]


def manager_with_free_order(order, **options):
    """Six blocks that will be handed out in this order."""
    manager = BlockSpaceManager(CacheConfig(num_gpu_blocks=len(order), watermark=0.0, **options))
    holders = [Sequence(f"holder {block}", [block]) for block in range(len(order))]
    for holder in holders:
        manager.allocate(holder)
    for block in order:
        manager.free(holders[block])
    return manager


def grow(manager, seq, num_tokens):
    """Append and compute tokens; stop where the pool is empty."""
    for token in range(num_tokens):
        seq.append_token(token)
        manager.append_slots(seq)
        manager.mark_computed(seq, len(seq))


@pytest.fixture
def example():
    manager = manager_with_free_order([0, 3, 1, 5, 2, 4], num_cpu_blocks=6)
    a, b = Sequence("A", PROMPT_A), Sequence("B", PROMPT_B)
    manager.allocate(a)
    manager.mark_computed(a, 64)
    manager.allocate(b)
    manager.mark_computed(b, 32)
    return manager, a, b


def test_b_shares_one_block_and_takes_one(example):
    manager, a, b = example
    assert manager.block_table(a) == [0, 3, 1, 5]
    assert manager.block_table(b) == [0, 2]
    assert manager.num_cached_tokens(b) == 16
    assert manager.gpu.ref_count(0) == 2
    assert manager.stats().gpu.num_free == 1


def test_b_gets_its_third_block_and_waits_for_its_fourth(example):
    manager, a, b = example
    grow(manager, b, 16)
    assert manager.block_table(b) == [0, 2, 4]

    before = manager.snapshot()
    b.append_token(7)
    assert not manager.can_append_slots(b)
    with pytest.raises(NoFreeBlocksError) as caught:
        manager.append_slots(b)
    assert (caught.value.needed, caught.value.available) == (1, 0)
    assert manager.snapshot() == before

    manager.free(a)  # the wait is over
    assert manager.gpu.ref_count(0) == 1
    assert manager.stats().gpu.num_free == 3
    assert manager.append_slots(b) == []
    assert manager.block_table(b) == [0, 2, 4, 5]  # A's last block is the first to be reused
    manager.check_invariants()


def test_b_is_swapped_out_instead_of_waiting(example):
    manager, a, b = example
    grow(manager, b, 16)
    group = SequenceGroup("B", [b])
    assert manager.swap_out(group) == [(0, 0), (2, 1), (4, 2)]
    assert manager.gpu.ref_count(0) == 1  # A's
    assert manager.stats().gpu.num_free == 2
    assert manager.can_swap_in(group) is AllocStatus.LATER
    manager.free(a)
    assert len(manager.swap_in(group)) == 3
    manager.check_invariants()


def test_a_head_block_is_released_while_the_rest_lives():
    """The article's picture of a table with a hole at its head: what a sliding window does."""
    manager = manager_with_free_order([0, 3, 1, 5, 2, 4], sliding_window=32)
    a = Sequence("A", PROMPT_A)
    manager.allocate(a)
    manager.mark_computed(a, 64)  # the next query sees tokens 33..64: the first two blocks are over
    assert manager.block_table(a) == [-1, -1, 1, 5]
    assert manager.stats().gpu.num_used == 2
    manager.free(a)
    assert manager.stats().gpu.num_used == 0
