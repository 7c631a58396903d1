"""Wrong arguments of the manager, its sequences and its allocators: named, and nothing changed."""

import inspect

import numpy as np
import pytest
import torch
from manager_helpers import admit, make_manager

from paged import (
    BlockSpaceManager,
    BuddyAllocator,
    NaiveBlockAllocator,
    NoFreeBlocksError,
    NotAllocatedError,
    PrefixCachingBlockAllocator,
    Sequence,
    SequenceGroup,
)

TAKES_A_SEQUENCE = {
    "can_allocate": (),
    "allocate": (),
    "num_cached_tokens": (),
    "can_append_slots": (),
    "append_slots": (),
    "trim": (1,),
    "mark_computed": (1,),
    "can_swap_out": (),
    "swap_out": (),
    "can_swap_in": (),
    "swap_in": (),
    "free": (),
    "block_table": (),
}


class HalfASequence:
    seq_id = "half"

    def __repr__(self):
        return "HalfASequence()"


class Unhashable(Sequence):
    """A sequence whose name was replaced after it was made."""

    def __init__(self):
        super().__init__("name", [1])
        self.seq_id = ["name"]


@pytest.fixture(params=[True, False], ids=["caching", "plain"])
def manager(request):
    return make_manager(8, enable_prefix_caching=request.param, num_cpu_blocks=4)


def assert_refused(manager, error, match, call):
    """`call` raises that error, and the manager and all tokens are as before."""
    before = manager.snapshot()
    tokens = [list(table.seq.token_ids) for table in manager.tables.values()]
    with pytest.raises(error, match=match):
        call()
    assert manager.snapshot() == before
    assert [list(table.seq.token_ids) for table in manager.tables.values()] == tokens
    manager.check_invariants()


# --- what is no sequence -------------------------------------------------------------------------


@pytest.mark.parametrize("method", TAKES_A_SEQUENCE)
@pytest.mark.parametrize(
    "wrong", [None, "a", 5, [Sequence("a", [1])], {}, HalfASequence()], ids=repr
)
def test_what_is_no_sequence_is_refused_by_name(manager, method, wrong):
    admit(manager, "a", [1, 2, 3, 4, 5])
    name = next(iter(inspect.signature(getattr(manager, method)).parameters))
    rest = TAKES_A_SEQUENCE[method]
    match = rf"^{name} is .*; it must be a Sequence"
    assert_refused(manager, TypeError, match, lambda: getattr(manager, method)(wrong, *rest))


@pytest.mark.parametrize("method", TAKES_A_SEQUENCE)
def test_a_name_that_cannot_be_hashed_is_refused(manager, method):
    call = getattr(manager, method)
    match = r"seq_id is \['name'\]; it must be hashable"
    assert_refused(manager, TypeError, match, lambda: call(Unhashable(), *TAKES_A_SEQUENCE[method]))


def test_a_fork_says_which_of_the_two_is_no_sequence(manager):
    a = admit(manager, "a", [1, 2, 3])
    assert_refused(manager, TypeError, "^child is None", lambda: manager.fork(a, None))
    assert_refused(manager, TypeError, "^seq is None", lambda: manager.fork(None, a))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (None, "^seqs is None; it must be a list of sequences"),
        (5, "^seqs is 5; it must be a list of sequences"),
        (Sequence("b", [1, 2]), r"^seqs is Sequence\('b'.*; it must be a list of sequences"),
        ("ab", r"^seqs\[0\] is 'a'"),
        ({"a": 1}, r"^seqs\[0\] is 'a'"),
    ],
)
def test_a_batch_wants_a_list_of_sequences(manager, wrong, match):
    admit(manager, "a", [1, 2, 3])
    assert_refused(manager, TypeError, match, lambda: manager.build_batch(wrong))
    assert_refused(manager, TypeError, match, lambda: manager.step(wrong, [1]))


@pytest.mark.parametrize("wrong", [None, "b", HalfASequence(), Unhashable()], ids=repr)
def test_a_batch_names_the_entry_that_is_no_sequence(manager, wrong):
    a = admit(manager, "a", [1, 2, 3])
    match = r"seq_id is" if isinstance(wrong, Unhashable) else r"^seqs\[1\] is "
    assert_refused(manager, TypeError, match, lambda: manager.build_batch([a, wrong]))
    assert_refused(manager, TypeError, match, lambda: manager.step([a, wrong], [7, 8]))


def test_a_batch_takes_its_sequences_from_any_iterable(manager):
    seqs = [admit(manager, name, [1, 2, 3]) for name in "ab"]
    for kind in (tuple, iter):
        assert manager.build_batch(kind(seqs)).seq_lens.tolist() == [3, 3]
    _, batch = manager.step(iter(seqs), [7, 8])
    assert batch.seq_lens.tolist() == [4, 4]


def test_a_group_wants_sequences():
    with pytest.raises(TypeError, match=r"^seqs is None; it must be a list of sequences"):
        SequenceGroup("g", None)
    with pytest.raises(TypeError, match=r"^seqs\[1\] is None; it must be a Sequence"):
        SequenceGroup("g", [Sequence("a", [1]), None])


@pytest.mark.parametrize("wrong", [None, 5, torch.tensor(3), np.array(3)], ids=repr)
def test_a_prompt_wants_a_list(wrong):
    with pytest.raises(TypeError, match=r"^prompt_token_ids is .*; it must be a list of ints"):
        Sequence("a", wrong)


@pytest.mark.parametrize(
    "wrong", [torch.tensor(1.5), torch.tensor(True), np.array([1, 2])], ids=repr
)
def test_a_token_that_only_looks_like_an_int_is_refused(wrong):
    with pytest.raises(TypeError, match="at position 1 is no int"):
        Sequence("a", [0, wrong])


def test_a_sequence_wants_a_name_that_can_be_hashed():
    with pytest.raises(TypeError, match=r"seq_id is \[1\]; it must be hashable"):
        Sequence([1], [1])


@pytest.mark.parametrize("wrong", [None, {"block_size": 4}, 8])
def test_a_manager_wants_a_config(wrong):
    with pytest.raises(TypeError, match=r"config is .*; it must be a CacheConfig"):
        BlockSpaceManager(wrong)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [None, "", [], 0.0, False, 1.5, np.array([1, 2]), torch.tensor(1.5)]
)
@pytest.mark.parametrize("method", ["can_append_slots", "append_slots"])
def test_lookahead_slots_are_a_count(manager, method, wrong):
    a = admit(manager, "a", [1, 2, 3])
    call = getattr(manager, method)
    assert_refused(manager, TypeError, "^num_lookahead_slots is ", lambda: call(a, wrong))


@pytest.mark.parametrize("name", ["query_lens", "context_lens"])
def test_the_lengths_of_a_batch_are_lists_of_counts(manager, name):
    a = admit(manager, "a", [1, 2, 3])
    for wrong, match in (
        (5, f"^{name} is 5; it must be a list of ints"),
        ([1.0], f"^{name} is 1.0; it must be an int >= 0"),
        ([True], f"^{name} is True; it must be an int >= 0"),
    ):
        assert_refused(
            manager,
            TypeError,
            match,
            lambda wrong=wrong: manager.build_batch([a], **{name: wrong}),
        )


def test_more_queries_than_tokens_are_named(manager):
    a = admit(manager, "a", [1, 2, 3])
    match = "^query_lens has 4 for sequence 'a', which has 3 tokens"
    assert_refused(manager, ValueError, match, lambda: manager.build_batch([a], [4]))


def test_the_tokens_of_a_step_are_a_list(manager):
    a = admit(manager, "a", [1, 2, 3])
    for wrong in (None, 5):
        match = f"^tokens is {wrong}; it must be a list of ints"
        assert_refused(manager, TypeError, match, lambda wrong=wrong: manager.step([a], wrong))


# --- token_ids of other kinds --------------------------------------------------------------------


class Joined(Sequence):
    """Its tokens are put together anew on each access."""

    def __init__(self, seq_id, tokens):
        super().__init__(seq_id, ())
        self.prompt, self.output = list(tokens), []

    @property
    def token_ids(self):
        return self.prompt + self.output

    @token_ids.setter
    def token_ids(self, tokens):
        self.prompt, self.output = list(tokens), []

    def append_token(self, token):
        self.output.append(token)


class Frozen(Sequence):
    """Its tokens are a tuple."""

    def __init__(self, seq_id, tokens):
        super().__init__(seq_id, tokens)
        self.token_ids = tuple(self.token_ids)

    def append_token(self, token):
        self.token_ids = (*self.token_ids, token)


class Array(Sequence):
    """Its tokens are a numpy array."""

    def __init__(self, seq_id, tokens):
        super().__init__(seq_id, tokens)
        self.token_ids = np.array(self.token_ids)

    def append_token(self, token):
        self.token_ids = np.append(self.token_ids, token)


@pytest.fixture(params=[Joined, Frozen, Array])
def other_kind(request):
    return request.param


def test_a_refused_step_leaves_tokens_of_any_kind_as_they_were(other_kind):
    manager = make_manager(3, enable_prefix_caching=False)
    plain, other = Sequence("plain", [1, 2]), other_kind("other", [1, 2, 3, 4])
    for seq in (plain, other):
        manager.allocate(seq)
    manager.append_slots(plain, num_lookahead_slots=6)  # the last block
    assert_refused(
        manager, NoFreeBlocksError, "blocks needed", lambda: manager.step([plain, other], [7, 8])
    )
    manager.free(plain)
    manager.step([other], [8])
    assert list(other.token_ids) == [1, 2, 3, 4, 8]


def test_tokens_that_cannot_be_cut_are_named_by_trim(manager, other_kind):
    seq = other_kind("a", [1, 2, 3, 4, 5])
    manager.allocate(seq)
    match = r"^token_ids of sequence 'a' is .*; to be trimmed it must be one list"
    assert_refused(manager, TypeError, match, lambda: manager.trim(seq, 2))


def test_tokens_of_different_kinds_share_blocks(manager, other_kind):
    manager.allocate(SequenceGroup("g", [Sequence("a", [1, 2, 3]), other_kind("b", [1, 2, 3])]))
    manager.check_invariants()
    assert manager.stats().gpu.num_used == 1


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("foo", ValueError), ("cuda:99", ValueError), (None, TypeError), (1.5, TypeError)],
)
def test_a_device_that_is_not_there_is_named(manager, wrong, error):
    a = admit(manager, "a", [1, 2, 3])
    match = f"^device is {wrong!r}; "
    assert_refused(manager, error, match, lambda: manager.build_batch([a], device=wrong))
    assert_refused(manager, error, match, lambda: manager.step([a], [7], device=wrong))


# --- allocators ----------------------------------------------------------------------------------


@pytest.fixture(params=[NaiveBlockAllocator, lambda n: PrefixCachingBlockAllocator(n, 2)])
def pool(request):
    return request.param(4)


@pytest.mark.parametrize("wrong", [True, 1.5, None, "a"])
def test_an_allocator_names_what_is_no_count_and_no_block(pool, wrong):
    with pytest.raises(TypeError, match=f"^n is {wrong!r}; it must be an int >= 0"):
        pool.allocate(wrong)
    with pytest.raises(TypeError, match=f"^block is {wrong!r}; it must be an int >= 0"):
        pool.ref_count(wrong)
    assert pool.num_free == 4


@pytest.mark.parametrize("wrong", [None, 5, "x", (0, 1.0)])
def test_an_allocator_wants_a_list_of_blocks(pool, wrong):
    pool.allocate(2)
    for call in (pool.share, pool.free):
        with pytest.raises(TypeError, match=r"^blocks is .*; it must be a list of block ids"):
            call(wrong)
    assert [pool.ref_count(block) for block in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("wrong", [9, -1])
def test_a_foreign_block_is_refused_alike_by_share_and_free(pool, wrong):
    pool.allocate(2)
    for call in (pool.share, pool.free):
        with pytest.raises(NotAllocatedError, match=f"block {wrong} "):
            call([0, wrong])
    assert [pool.ref_count(block) for block in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_blocks_freed_as_an_array_come_back_as_plain_ints(pool, kind):
    pool.free(kind(pool.allocate(4)))
    assert {type(block) for block in pool.allocate(4)} == {int}


def test_a_wrong_immutable_block_is_named():
    pool = PrefixCachingBlockAllocator(4, 2)
    with pytest.raises(TypeError, match=r"^token_ids is None; it must be a list of ints"):
        pool.allocate_immutable(None, None)
    with pytest.raises(TypeError, match=r"^block is 'a'; "):
        pool.allocate_immutable("a", [1, 2])
    assert pool.num_free == 4


@pytest.mark.parametrize("wrong", [None, [0, 1], 5])
def test_the_buddy_allocator_takes_back_ranges(wrong):
    pool = BuddyAllocator(4)
    pool.allocate(2)
    with pytest.raises(TypeError, match=r"^blocks is .*; it must be a range"):
        pool.free(wrong)
    assert pool.num_free == 2
