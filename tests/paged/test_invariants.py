"""check_invariants finds every broken invariant, and says which block and whose it is.

Each case breaks one thing through the internals of a healthy manager.
"""

import re

import pytest
from manager_helpers import admit, grow, make_manager

from paged import InvariantError, SequenceGroup

BREAKS = {}


def breaks(*, names_block=True, names_owner=True, **options):
    """Register a function that breaks a manager and returns (block, owner's seq_id)."""

    def register(function):
        BREAKS[function.__name__] = (function, options, names_block, names_owner)
        return function

    return register


def healthy(**options):
    """Two sequences that share a prefix, a fork, freed cached and plain blocks, one swapped out."""
    manager = make_manager(24, 4, num_cpu_blocks=8, **options)
    manager.free(admit(manager, "cached", range(50, 62)))
    manager.free(admit(manager, "plain", range(70, 82), computed=False))
    a = admit(manager, "a", range(10))
    admit(manager, "b", [*range(8), 40, 41, 42])
    child = a.fork("child")
    manager.fork(a, child)
    grow(manager, child, [90, 91, 92])
    manager.swap_out(SequenceGroup("r", [admit(manager, "away", range(20, 30))]))
    return manager


def take_out(free_list, block):
    """Remove one block from a free list, whatever its order."""
    rest = [b for b in free_list.take(len(free_list)) if b != block]
    free_list.give(rest)


# --- references ---------------------------------------------------------------------------------


@breaks()
def a_reference_too_many(manager):
    block = manager.tables["b"].blocks[2]
    manager.gpu.ref_counts[block] += 1
    return block, "b"


@breaks()
def a_reference_too_few_on_a_shared_block(manager):
    block = manager.tables["a"].blocks[0]
    manager.gpu.ref_counts[block] -= 1
    return block, "a"


@breaks()
def a_used_block_without_references(manager):
    block = manager.tables["b"].blocks[2]
    manager.gpu.ref_counts[block] = 0
    return block, "b"


@breaks(names_owner=False)
def a_reference_that_nobody_holds(manager):
    block = manager.gpu.free_blocks()[0]
    manager.gpu.ref_counts[block] = 1
    return block, None


@breaks()
def a_cpu_reference_too_many(manager):
    block = manager.swapped["away"].blocks[1]
    manager.cpu.ref_counts[block] += 1
    return block, "away"


# --- free lists ---------------------------------------------------------------------------------


@breaks()
def a_used_block_in_the_free_list(manager):
    block = manager.tables["b"].blocks[2]
    manager.gpu._free.give([block])
    manager.gpu.num_free += 1
    return block, "b"


@breaks(names_owner=False)
def a_block_twice_in_the_free_list(manager):
    block = manager.gpu.free_blocks()[0]
    manager.gpu._free.give([block])
    manager.gpu.num_free += 1
    return block, None


@breaks(names_owner=False)
def a_lost_block(manager):
    block = manager.gpu.free_blocks()[0]
    take_out(manager.gpu._free, block)
    manager.gpu.num_free -= 1
    return block, None


@breaks(names_block=False, names_owner=False)
def a_wrong_free_count(manager):
    manager.gpu.num_free -= 1
    return None, None


@breaks(names_block=False, names_owner=False)
def a_wrong_cpu_free_count(manager):
    manager.cpu.num_free += 1
    return None, None


@breaks(names_owner=False)
def a_block_that_does_not_exist_in_the_free_list(manager):
    manager.gpu._free.give([99])
    manager.gpu.num_free += 1
    return 99, None


@breaks()
def a_used_cpu_block_in_the_free_list(manager):
    block = manager.swapped["away"].blocks[0]
    manager.cpu._free.give([block])
    manager.cpu.num_free += 1
    return block, "away"


# --- tables -------------------------------------------------------------------------------------


@breaks()
def a_table_that_names_a_free_block(manager):
    block = manager.gpu.free_blocks()[0]
    manager.tables["b"].blocks[2] = block
    return block, "b"


@breaks()
def a_table_that_names_a_block_outside_the_pool(manager):
    manager.tables["b"].blocks[2] = 24
    return 24, "b"


@breaks()
def a_table_that_names_a_block_twice(manager):
    table = manager.tables["b"]
    lost, block = table.blocks[2], table.blocks[1]
    table.blocks[2] = block
    manager.gpu.ref_counts[block] += 1
    manager.gpu.free([lost])
    return block, "b"


@breaks()
def a_table_that_took_over_a_foreign_block(manager):
    # All counts are right, but "b" reads the last tokens of "child".
    table, block = manager.tables["b"], manager.tables["child"].blocks[2]
    lost, table.blocks[2] = table.blocks[2], block
    manager.gpu.share([block])
    manager.gpu.free([lost])
    table.writable_until = 0
    return block, "b"


@breaks()
def a_table_whose_blocks_changed_places(manager):
    blocks = manager.tables["b"].blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]
    return blocks[0], "b"


@breaks(names_block=False)
def a_table_too_short_for_its_tokens(manager):
    table = manager.tables["b"]
    manager.gpu.free([table.blocks.pop()])
    return None, "b"


@breaks(names_block=False)
def slots_for_tokens_that_are_not_there(manager):
    manager.tables["b"].seq.token_ids.pop()
    return None, "b"


@breaks(names_block=False)
def more_computed_than_there_are(manager):
    manager.tables["b"].num_computed = 12
    return None, "b"


@breaks(names_block=False)
def a_negative_computed_count(manager):
    manager.tables["b"].num_computed = -1
    return None, "b"


@breaks(names_block=False)
def a_sequence_in_both_tiers(manager):
    manager.swapped["b"] = manager.tables["b"]
    return None, "b"


@breaks(names_block=False)
def a_table_under_another_id(manager):
    manager.tables["stranger"] = manager.tables.pop("b")
    return None, "b"


@breaks()
def a_gap_inside_a_table(manager):
    table = manager.tables["b"]
    block, table.blocks[2] = table.blocks[2], -1
    manager.gpu.free([block])
    return -1, "b"


@breaks(names_block=False, sliding_window=4)
def a_dropped_count_that_is_too_low(manager):
    manager.tables["b"].num_dropped = 0
    return None, "b"


@breaks()
def a_shared_block_that_its_sequence_would_write(manager):
    # "a" and "b" share their second block; "a" believes it may write there.
    table = manager.tables["a"]
    del table.seq.token_ids[5:]
    manager.gpu.free([table.blocks.pop()])
    table.num_tokens = table.num_computed = 5
    table.num_published = 1
    table.parent = manager.cache.entry_of(table.blocks[0])
    table.chain.truncate(1)
    table.writable_until = 8
    return table.blocks[1], "a"


# --- prefix cache -------------------------------------------------------------------------------


@breaks(names_owner=False)
def content_that_its_block_does_not_have(manager):
    block = manager.cache.cached_blocks()[0]
    manager.cache._entries[block] = None
    return block, None


@breaks(names_owner=False)
def content_that_cannot_be_found(manager):
    block = manager.cache.cached_blocks()[0]
    entry = manager.cache.entry_of(block)
    manager.cache.index.remove(entry)
    return block, None


@breaks()
def a_used_block_that_may_be_evicted(manager):
    block = manager.tables["a"].blocks[0]
    manager.cache._evictable[block] = manager.cache.entry_of(block)
    manager.gpu.num_free += 1
    return block, "a"


@breaks(names_owner=False)
def a_cached_block_that_is_not_evictable(manager):
    block = manager.cache.cached_blocks()[0]
    del manager.cache._evictable[block]
    manager.gpu.num_free -= 1
    return block, None


@breaks(names_owner=False)
def a_cached_block_that_counts_as_plain(manager):
    block = manager.cache.cached_blocks()[0]
    del manager.cache._evictable[block]
    manager.cache._free.give([block])
    return block, None


@breaks(names_owner=False)
def content_behind_a_forgotten_parent(manager):
    head = manager.cache.cached_blocks()[-1]
    entry = manager.cache.entry_of(head)
    manager.cache.index.remove(entry)
    manager.cache._entries[head] = None
    del manager.cache._evictable[head]
    manager.cache._free.give([head])
    return None, None


@breaks()
def content_of_other_tokens_than_its_owner_has(manager):
    table = manager.tables["b"]
    entry = manager.cache.entry_of(table.blocks[1])
    entry.tokens = bytes(len(entry.tokens))
    return table.blocks[1], "b"


@breaks(names_block=False, names_owner=False, max_cached_blocks=3)
def more_cached_than_allowed(manager):
    manager.cache._max_cached = 2
    return None, None


# --- the tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"max_cached_blocks": 3}])
def test_a_healthy_manager_passes(options):
    healthy(**options).check_invariants()


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_found_and_named(name):
    break_it, options, names_block, names_owner = BREAKS[name]
    manager = healthy(**options)
    block, owner = break_it(manager)
    with pytest.raises(InvariantError) as caught:
        manager.check_invariants()
    text = str(caught.value)
    if names_block and block is not None:
        assert re.search(rf"block {block}\b", text), text
    if names_owner:
        assert repr(owner) in text, text


@pytest.mark.parametrize("operation", ["allocate", "fork", "free"])
def test_a_broken_block_comes_with_its_last_operation(operation):
    manager = make_manager(8, 4)
    seq = admit(manager, "a", range(9))
    if operation == "fork":
        manager.fork(seq, seq.fork("b"))
    if operation == "free":
        manager.free(seq)
    manager.gpu.ref_counts[1] += 1
    name = "'b'" if operation == "fork" else "'a'"
    with pytest.raises(InvariantError, match=rf"block 1\b.*{operation} by sequence {name}"):
        manager.check_invariants()


def test_checking_changes_nothing():
    manager = healthy()
    before = manager.snapshot()
    manager.check_invariants()
    assert manager.snapshot() == before


def test_a_naive_manager_is_checked_too():
    manager = make_manager(8, 4, enable_prefix_caching=False)
    admit(manager, "a", range(9))
    manager.check_invariants()
    block = manager.tables["a"].blocks[1]
    manager.gpu.ref_counts[block] = 2
    with pytest.raises(InvariantError, match=rf"block {block}\b.*'a'"):
        manager.check_invariants()
