"""The arrays of a batch against block tables, while sequences come, go and change places."""

import random

import pytest

from paged import BlockSpaceManager, CacheConfig, Sequence

torch = pytest.importorskip("torch")


def make_manager(**options):
    options = {"num_gpu_blocks": 512, "block_size": 4, "watermark": 0.0} | options
    return BlockSpaceManager(CacheConfig(**options))


def admit(manager, seq_id, tokens):
    seq = Sequence(seq_id, tokens)
    manager.allocate(seq)
    return seq


def assert_describes(batch, manager, seqs, query_lens=None, context_lens=None):
    """The batch says of every sequence what its block table says."""
    block_size = manager.config.block_size
    query_lens = query_lens or [1] * len(seqs)
    context_lens = context_lens or [len(seq) - q for seq, q in zip(seqs, query_lens, strict=True)]
    ends = [c + q for c, q in zip(context_lens, query_lens, strict=True)]
    slots = []
    for row, seq, context, end in zip(batch.block_table, seqs, context_lens, ends, strict=True):
        blocks = manager.block_table(seq)
        used = -(-end // block_size)
        assert row[:used].tolist() == blocks[:used]
        slots += [
            blocks[p // block_size] * block_size + p % block_size for p in range(context, end)
        ]
    assert batch.slot_mapping.tolist() == slots
    assert batch.seq_lens.tolist() == ends
    assert batch.cu_seqlens_q.tolist() == [sum(query_lens[:i]) for i in range(len(seqs) + 1)]
    assert batch.block_table.shape == (len(seqs), -(-max(ends, default=0) // block_size))
    assert (batch.max_query_len, batch.max_seq_len) == (
        max(query_lens, default=0),
        max(ends, default=0),
    )
    assert batch.common_prefix_len == common_prefix_len(manager, seqs, context_lens)


def common_prefix_len(manager, seqs, context_lens):
    if len(seqs) < 2:
        return 0
    block_size, common = manager.config.block_size, 0
    columns = zip(*(manager.block_table(seq) for seq in seqs), strict=False)
    for column in list(columns)[: min(context_lens) // block_size]:
        if len(set(column)) > 1 or column[0] < 0:
            break
        common += block_size
    return common


def test_dtypes_are_those_the_kernels_take():
    manager = make_manager()
    batch = manager.build_batch([admit(manager, 1, range(6))])
    assert (
        batch.block_table.dtype == batch.seq_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
    )
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.block_table.stride(-1) == 1


def test_a_prefill_in_chunks():
    manager = make_manager()
    a, b = admit(manager, "a", range(11)), admit(manager, "b", range(20, 27))
    for query_lens, context_lens in (([5, 7], [0, 0]), ([6, 1], [5, 6]), ([0, 2], [5, 3])):
        batch = manager.build_batch([a, b], query_lens, context_lens=context_lens)
        assert_describes(batch, manager, [a, b], query_lens, context_lens)


def test_an_empty_batch_has_the_right_shapes():
    manager = make_manager()
    for batch in (manager.build_batch([]), manager.build_batch([], []), manager.step([], [])[1]):
        assert_describes(batch, manager, [])


def test_a_sequence_named_twice_is_refused():
    manager = make_manager()
    a = admit(manager, "a", range(3))
    with pytest.raises(ValueError, match="twice"):
        manager.build_batch([a, a])
    with pytest.raises(ValueError, match="twice"):
        manager.step([a, a], [1, 1])
    assert len(a) == 3


def test_a_clone_stays_when_its_buffers_are_reused():
    manager = make_manager()
    a = admit(manager, "a", range(3))
    kept = manager.build_batch([a]).clone()
    for token in range(20):
        manager.step([a], [token])
    assert kept.seq_lens.tolist() == [3]
    assert kept.slot_mapping.tolist() == [2]
    assert kept.block_table.tolist() == [[0]]


def test_a_shared_prefix_is_found_and_ends_where_tables_part():
    manager = make_manager()
    a = admit(manager, "a", range(23))
    manager.mark_computed(a, 23)
    b = admit(manager, "b", [*range(16), *range(50, 55)])
    c = admit(manager, "c", range(40))
    assert manager.build_batch([a, b]).common_prefix_len == 16
    assert manager.build_batch([c, a]).common_prefix_len == 20
    assert manager.build_batch([b, c, a]).common_prefix_len == 16
    assert manager.build_batch([b, c, a], context_lens=[9, 30, 16]).common_prefix_len == 8
    d = admit(manager, "d", range(60, 70))
    assert manager.build_batch([a, b, c, d]).common_prefix_len == 0
    assert manager.build_batch([a]).common_prefix_len == 0


def test_tables_that_meet_again_do_not_count_as_common():
    """Two sequences that computed the same block at the same time, then shared a later one."""
    manager = make_manager()
    a, b = admit(manager, "a", range(4)), admit(manager, "b", range(4))
    for seq in (a, b):
        manager.mark_computed(seq, 4)
    for token in range(4, 9):
        manager.step([b], [token])  # its second block is published behind a's first
    c = admit(manager, "c", range(12))
    assert manager.block_table(c)[1] == manager.block_table(b)[1]
    assert manager.block_table(c)[0] != manager.block_table(b)[0]
    assert manager.build_batch([b, c]).common_prefix_len == 0


def test_tables_in_csr_form():
    manager = make_manager()
    seqs = [admit(manager, n, range(100 * n, 100 * n + n)) for n in (1, 4, 9)]
    kv_indptr, kv_indices, kv_last_page_len = manager.build_batch(seqs).csr()
    assert kv_indptr.tolist() == [0, 1, 2, 5]
    assert kv_indices.tolist() == [b for seq in seqs for b in manager.block_table(seq)]
    assert kv_last_page_len.tolist() == [1, 4, 1]
    assert {t.dtype for t in (kv_indptr, kv_indices, kv_last_page_len)} == {torch.int32}


def test_token_slots_are_one_per_cached_token():
    manager = make_manager()
    seqs = [admit(manager, n, range(100 * n, 100 * n + n)) for n in (1, 4, 9)]
    indptr, slots = manager.build_batch(seqs).token_slots()
    assert indptr.tolist() == [0, 1, 5, 14]
    wanted = [manager.block_table(seq)[p // 4] * 4 + p % 4 for seq in seqs for p in range(len(seq))]
    assert slots.tolist() == wanted


@pytest.mark.parametrize("sliding_window", [None, 6])
def test_batches_stay_right_while_sequences_come_and_go(sliding_window):
    """Joins, leaves, new orders, copies, trims, swaps, growth: every row against its table."""
    rng = random.Random(2)
    manager = make_manager(num_cpu_blocks=64, sliding_window=sliding_window, num_gpu_blocks=4096)
    running, next_id = [], 0
    for _ in range(500):
        kind = rng.random()
        if kind < 0.25 or not running:
            running.append(admit(manager, next_id, range(rng.randint(1, 40))))
            next_id += 1
        elif kind < 0.35:
            parent = rng.choice(running)
            child = parent.fork(next_id)
            manager.fork(parent, child)
            running.append(child)
            next_id += 1
        elif kind < 0.5:
            manager.free(running.pop(rng.randrange(len(running))))
        elif kind < 0.6:
            seq = rng.choice(running)
            if sliding_window is None:
                manager.trim(seq, rng.randint(max(1, len(seq) - 9), len(seq)))
        elif kind < 0.65:
            seq = rng.choice(running)
            if manager.can_swap_out(seq):
                manager.swap_out(seq)
                manager.swap_in(seq)
        elif kind < 0.75:
            rng.shuffle(running)
        chosen = (
            running if rng.random() < 0.7 else rng.sample(running, rng.randint(0, len(running)))
        )
        if rng.random() < 0.8:
            _, batch = manager.step(chosen, [rng.randrange(3) for _ in chosen])
            assert_describes(batch, manager, chosen)
        elif sliding_window is None:
            query_lens = [rng.randint(0, len(seq)) for seq in chosen]
            assert_describes(manager.build_batch(chosen, query_lens), manager, chosen, query_lens)
    manager.check_invariants()


def test_tables_that_were_never_looked_at_for_long_are_right(monkeypatch):
    """More changes between two batches than are kept one by one."""
    monkeypatch.setattr("paged.batch._MAX_CHANGES", 5)
    manager = make_manager()
    a, b = admit(manager, "a", range(3)), admit(manager, "b", range(3))
    manager.build_batch([a, b])
    for token in range(40):
        for seq in (a, b):
            seq.append_token(token)
            manager.append_slots(seq)
    assert_describes(manager.build_batch([b, a]), manager, [b, a])


def test_a_step_takes_no_block_for_a_copy_that_a_drop_has_spared():
    """Behind the window one sequence gives up a block, so its sharer may write it in place."""
    manager = make_manager(block_size=2, sliding_window=1, num_gpu_blocks=3)
    a = admit(manager, "a", [1, 2, 3, 4])
    b = a.fork("b")
    manager.fork(a, b)
    manager.trim(a, 3)
    admit(manager, "another", [7])  # so that there is no block for a copy
    copies, batch = manager.step([a, b], [5, 6])
    assert copies == []
    assert_describes(batch, manager, [a, b])
    manager.check_invariants()
