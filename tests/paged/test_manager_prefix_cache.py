"""Who may share with whom: identity of content, publishing, digests, reset, statistics."""

import ast
import subprocess
import sys

import numpy as np
import pytest
import torch
from manager_helpers import admit, cached_tokens, constant_hash, grow, make_manager, refused

from paged import Sequence, SequenceGroup


@pytest.fixture(params=[None, constant_hash], ids=["xxhash", "constant"])
def hash_fn(request):
    return request.param


PROMPT = list(range(1, 13))


# --- identity -----------------------------------------------------------------------------------

KEYS = [None, 1, True, "1", b"1", 1.0, 0, False, "", (1, 2), (1, "2"), "a", "b"]


@pytest.mark.parametrize("name", ["salt", "extra_key"])
def test_every_salt_and_extra_key_is_a_world_of_its_own(hash_fn, name):
    manager = make_manager(64, 4, hash_fn=hash_fn)
    for k, key in enumerate(KEYS):
        seq = admit(manager, k, PROMPT, **{name: key})
        assert manager.num_cached_tokens(seq) == 0, (key, "hit another key's content")
    for key in KEYS:
        assert cached_tokens(manager, [*PROMPT, 99], **{name: key}) == 12


def test_a_salt_is_not_an_extra_key(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    admit(manager, "a", PROMPT, salt="x")
    assert cached_tokens(manager, PROMPT, extra_key="x") == 0
    assert cached_tokens(manager, PROMPT, salt="x", extra_key="x") == 0
    assert cached_tokens(manager, PROMPT, salt="x") == 8


@pytest.mark.parametrize("name", ["salt", "extra_key"])
def test_salt_and_extra_key_reach_every_later_block(hash_fn, name):
    manager = make_manager(16, 2, hash_fn=hash_fn)
    admit(manager, "a", PROMPT[:4], **{name: "one"})
    grown = admit(manager, "b", PROMPT[:4], **{name: "two"})
    grow(manager, grown, PROMPT[4:8])
    assert cached_tokens(manager, PROMPT, **{name: "one"}) == 4
    assert cached_tokens(manager, PROMPT, **{name: "two"}) == 8
    assert cached_tokens(manager, PROMPT) == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([-1], [-2]),
        ([65], [321]),
        ([1], [65537]),
        ([2**31 - 1], [-1]),
        ([-(2**31)], [0]),
        ([0], [1]),
        ([1, 23], [12, 3]),
        ([1, 0], [0, 1]),
        ([0, 0], [0, 1]),
    ],
)
def test_tokens_that_a_poor_key_mixes_up_stay_apart(hash_fn, a, b):
    manager = make_manager(8, len(a), hash_fn=hash_fn)
    admit(manager, "a", a)
    assert cached_tokens(manager, [*b, 9]) == 0
    assert cached_tokens(manager, [*a, 9]) == len(a)


def test_numpy_tokens_are_the_same_tokens(hash_fn):
    manager = make_manager(8, 2, hash_fn=hash_fn)
    admit(manager, "a", [5, 6, 7, 8])
    for dtype in (np.int64, np.int32, np.uint16):
        assert cached_tokens(manager, np.array([5, 6, 7, 8, 9], dtype=dtype)) == 4


def test_tensor_tokens_share_a_key_or_are_refused(hash_fn):
    manager = make_manager(8, 2, hash_fn=hash_fn)
    admit(manager, "a", [5, 6])
    try:
        hit = cached_tokens(manager, [torch.tensor(5), torch.tensor(6), torch.tensor(9)])
    except TypeError:
        return
    assert hit == 2


@pytest.mark.parametrize(
    "bad", [True, 1.0, "1", None, 2**31, -(2**31) - 1, 2**63, np.bool_(True), torch.tensor(True)]
)
def test_a_bad_token_is_refused_where_it_enters(bad):
    with pytest.raises((TypeError, ValueError), match="token"):
        Sequence("a", [1, bad])
    seq = Sequence("a", [1])
    with pytest.raises((TypeError, ValueError), match="token"):
        seq.append_token(bad)
    assert list(seq.token_ids) == [1]


@pytest.mark.parametrize("token", [2**31 - 1, -(2**31), np.int64(7), np.uint8(7)])
def test_every_token_in_range_is_taken(token):
    seq = Sequence("a", [token])
    seq.append_token(token)
    assert list(seq.token_ids) == [int(token)] * 2
    assert all(type(t) is int for t in seq.token_ids)


@pytest.mark.parametrize("bad", [True, 2**31, 1.5, "x"])
def test_step_refuses_a_bad_token_before_anything_changes(bad):
    manager = make_manager(8, 2)
    seqs = [admit(manager, i, [i, 1, 2]) for i in range(2)]
    with refused(manager, (TypeError, ValueError), "token"):
        manager.step(seqs, [1, bad])
    assert [list(seq.token_ids) for seq in seqs] == [[0, 1, 2], [1, 1, 2]]


def test_tokens_cut_off_between_two_lives_are_not_remembered(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", PROMPT)
    manager.free(seq)
    del seq.token_ids[6:]
    for token in range(50, 58):
        seq.append_token(token)
    manager.allocate(seq)
    assert manager.num_cached_tokens(seq) == 4
    manager.mark_computed(seq, len(seq))
    assert cached_tokens(manager, [*PROMPT[:6], *range(50, 56), 9]) == 12
    assert cached_tokens(manager, [*PROMPT, 9]) == 12


def test_a_lookup_before_a_trim_is_not_the_answer_after_it(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    admit(manager, "a", PROMPT)
    seq = admit(manager, "b", [*PROMPT, 99], computed=False)
    assert manager.num_cached_tokens(seq) == 12
    manager.trim(seq, 10)  # the tail is shared: nothing is withdrawn
    manager.free(seq)
    for token in (50, 51, 52):
        seq.append_token(token)
    manager.allocate(seq)
    assert manager.num_cached_tokens(seq) == 8


# --- publishing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", range(13))
def test_only_full_blocks_of_written_tokens_are_shareable(hash_fn, computed):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", PROMPT, computed=False)
    manager.mark_computed(seq, computed)
    assert cached_tokens(manager, [*PROMPT, 99]) == computed // 4 * 4


def test_marking_is_monotone(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", PROMPT)
    manager.mark_computed(seq, 2)
    assert cached_tokens(manager, [*PROMPT, 99]) == 12


@pytest.mark.parametrize("bad", [13, 100, -1])
def test_marking_more_than_there_is_is_refused(hash_fn, bad):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", PROMPT)
    with refused(manager, ValueError, str(bad)):
        manager.mark_computed(seq, bad)


def test_step_publishes_what_came_before_it(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    seq = admit(manager, "a", PROMPT[:7])
    manager.step([seq], [PROMPT[7]])
    assert cached_tokens(manager, [*PROMPT[:8], 99]) == 4
    manager.step([seq], [PROMPT[8]])
    assert cached_tokens(manager, [*PROMPT[:8], 99]) == 8


def test_a_child_publishes_under_the_blocks_it_shares(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    parent = admit(manager, "a", PROMPT[:6])
    child = parent.fork("b")
    manager.fork(parent, child)
    grow(manager, child, [50, 51])
    grow(manager, parent, [60, 61])
    assert cached_tokens(manager, [*PROMPT[:6], 50, 51, 9]) == 8
    assert cached_tokens(manager, [*PROMPT[:6], 60, 61, 9]) == 8
    assert cached_tokens(manager, [*PROMPT[:6], 50, 61, 9]) == 4


def test_no_caching_means_no_hits_and_no_hashing():
    calls = []

    def counting(data):
        calls.append(data)
        return bytes(16)

    manager = make_manager(16, 4, enable_prefix_caching=False, hash_fn=counting)
    manager.free(admit(manager, "a", PROMPT))
    again = admit(manager, "b", PROMPT)
    grow(manager, again, range(9))
    manager.step([again], [1])
    assert manager.num_cached_tokens(again) == 0
    assert manager.stats().gpu.num_cached == 0
    assert calls == []


def test_a_digest_is_never_computed_twice():
    import hashlib

    calls = []

    def counting(data):
        calls.append(bytes(data))
        return hashlib.sha256(data).digest()[:16]

    manager = make_manager(16, 4, hash_fn=counting)
    seq = Sequence("a", PROMPT)
    for _ in range(3):
        manager.can_allocate(seq)
    manager.allocate(seq)
    for n in range(13):
        manager.mark_computed(seq, n)
    after_prompt = len(calls)
    assert after_prompt <= 4  # three blocks and, at most, a root
    for token in range(8):
        manager.step([seq], [token])
    manager.mark_computed(seq, 20)
    assert len(calls) - after_prompt == 2
    assert len(set(calls)) == len(calls)


def test_a_fork_inherits_its_parents_digests():
    calls = []

    def counting(data):
        calls.append(bytes(data))
        return bytes(15) + bytes([len(calls)])

    manager = make_manager(16, 4, hash_fn=counting)
    parent = admit(manager, "a", PROMPT)
    before = len(calls)
    child = parent.fork("b")
    manager.fork(parent, child)
    grow(manager, child, [1, 2, 3, 4])
    assert len(calls) - before == 1


@pytest.mark.parametrize("bad", [lambda data: 7, lambda data: None, lambda data: "digest"])
def test_a_hash_that_returns_no_bytes_is_refused_before_anything_changes(bad):
    with pytest.raises(TypeError, match="hash_fn"):
        admit(make_manager(8, 4, hash_fn=bad), "a", PROMPT)


# --- reset --------------------------------------------------------------------------------------


def test_reset_forgets_free_and_running_content(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    manager.free(admit(manager, "gone", range(50, 58)))
    running = admit(manager, "a", PROMPT)
    table = manager.block_table(running)
    manager.reset_prefix_cache()
    assert manager.stats().gpu.num_cached == 0
    assert manager.block_table(running) == table
    assert cached_tokens(manager, [*PROMPT, 9]) == 0
    assert cached_tokens(manager, [*range(50, 58), 9]) == 0
    grow(manager, running, range(9))
    manager.check_invariants()
    manager.free(running)
    assert manager.stats().gpu.num_used == 0


def test_content_computed_after_a_reset_is_shareable_again(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    admit(manager, "old", PROMPT)
    manager.reset_prefix_cache()
    new = admit(manager, "new", PROMPT)
    assert manager.num_cached_tokens(new) == 0
    assert cached_tokens(manager, [*PROMPT, 9]) == 12


# --- statistics ---------------------------------------------------------------------------------


def test_prefix_tokens_count_once_per_sequence(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn)
    first = admit(manager, "a", PROMPT)
    stats = manager.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (12, 0)
    second = Sequence("b", PROMPT)
    for _ in range(3):
        manager.can_allocate(second)
    manager.allocate(second)
    stats = manager.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24, 8)
    # Preempted by recomputation: the same request asks again and finds its own blocks.
    manager.free(second)
    manager.allocate(second)
    manager.free(first)
    stats = manager.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24, 8)


def test_a_refused_request_counts_when_it_is_admitted(hash_fn):
    manager = make_manager(4, 4, hash_fn=hash_fn)
    blocker = admit(manager, "blocker", range(50, 62), computed=False)
    waiting = Sequence("a", PROMPT)
    with pytest.raises(Exception, match="a"):
        manager.allocate(waiting)
    manager.free(blocker)
    before = manager.stats().prefix_queried_tokens
    manager.allocate(waiting)
    assert manager.stats().prefix_queried_tokens - before == 12


def test_fork_and_swap_do_not_count_as_queries(hash_fn):
    manager = make_manager(16, 4, hash_fn=hash_fn, num_cpu_blocks=8)
    seq = admit(manager, "a", PROMPT)
    before = manager.stats()
    child = seq.fork("b")
    manager.fork(seq, child)
    group = SequenceGroup("r", [seq, child])
    manager.swap_out(group)
    manager.swap_in(group)
    after = manager.stats()
    assert after.prefix_queried_tokens == before.prefix_queried_tokens == 12
    assert after.prefix_hit_tokens == before.prefix_hit_tokens == 0


# --- seeds --------------------------------------------------------------------------------------

DIGESTS = """
from paged import BlockSpaceManager, CacheConfig, Sequence

manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=8, hash_seed={seed}))
seq = Sequence("a", range(1, 13), salt="s", extra_key=1)
manager.allocate(seq)
manager.mark_computed(seq, 12)
print([entry["digest"] for entry in manager.snapshot()["cache"]["published"].values()])
"""


def digests(seed):
    code = DIGESTS.format(seed=seed)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_a_digest_has_at_least_128_bits():
    assert all(len(digest) >= 32 for digest in ast.literal_eval(digests(1)))


def test_seeded_digests_agree_across_processes_and_differ_between_seeds():
    assert digests(1) == digests(1) != digests(2)


def test_digests_of_an_unseeded_manager_cannot_be_foretold():
    assert digests(None) != digests(None)
