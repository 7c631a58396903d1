"""The scheduler's interface: who comes in, in which order, what an update takes and refuses."""

import numpy as np
import pytest
from scheduler_driver import Driver, drive, rows

from paged import (
    AlreadyAllocatedError,
    BlockSpaceManager,
    CacheConfig,
    NotOnGpuError,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceGroup,
)
from paged.journal import Replay


def test_a_request_from_its_prompt_to_its_end():
    """Blocks of 4: a prompt of 5 and three new tokens; the last is never written."""
    driver = drive()
    group = driver.add("r", [1, 2, 3, 4, 5])
    assert driver.scheduler.waiting == [group]
    assert rows(driver.step(finish_at=8)) == [("r", 5, 0)]
    assert driver.scheduler.running == [group] and driver.scheduler.waiting == []
    assert rows(driver.step(finish_at=8)) == [("r", 1, 5)]
    output = driver.step(finish_at=8)
    assert rows(output) == [("r", 1, 6)] and output.reaches_end == [True]
    assert (output.preempted, output.rejected) == ({}, {})
    assert group.seqs[0].token_ids == [1, 2, 3, 4, 5, 5, 6, 7]
    assert not driver.scheduler.has_unfinished
    scheduler = driver.scheduler
    assert (scheduler.num_prompt_tokens, scheduler.num_generated_tokens) == (5, 3)
    assert (scheduler.num_finished, scheduler.num_rejected) == (1, 0)
    driver.check_nothing_is_left()


def test_nothing_to_do_is_an_empty_step():
    driver = drive()
    output = driver.scheduler.schedule()
    assert output.seqs == output.query_lens == output.context_lens == []
    assert output.swap_out == output.swap_in == output.copies == []
    driver.scheduler.update(output, {})


def test_first_come_first_served_whatever_the_priority():
    driver = drive(num_blocks=20, max_num_seqs=2)
    for name, arrival in (("late", 2.0), ("first", 0.0), ("second", 1.0)):
        driver.add(name, [1, 2], arrival_time=arrival, priority=-arrival)
    assert [group.request_id for group in driver.scheduler.waiting] == ["first", "second", "late"]
    assert rows(driver.step()) == [("first", 2, 0), ("second", 2, 0)]


def test_equal_arrivals_keep_the_order_in_which_they_were_added():
    driver = drive(max_num_seqs=2)
    for name in "bac":
        driver.add(name, [1, 2])
    assert rows(driver.step()) == [("b", 2, 0), ("a", 2, 0)]


def test_more_urgent_ones_come_first_under_the_priority_policy():
    driver = drive(policy="priority", max_num_seqs=2)
    for name, priority in (("a", 1), ("b", 0), ("c", -1)):
        driver.add(name, [1, 2], priority=priority)
    assert rows(driver.step()) == [("c", 2, 0), ("b", 2, 0)]
    assert [group.request_id for group in driver.scheduler.waiting] == ["a"]


def test_a_long_prompt_is_computed_in_parts_beside_decodes():
    driver = drive(num_blocks=20, max_num_batched_tokens=6)
    driver.add("short", [1, 2])
    driver.add("long", [3] * 13)
    output = driver.step()
    assert rows(output) == [("short", 2, 0), ("long", 4, 0)]
    assert output.reaches_end == [True, False]
    driver.add("last", [4, 5])
    assert rows(driver.step()) == [("short", 1, 2), ("long", 5, 4)]
    assert rows(driver.step()) == [("short", 1, 3), ("long", 4, 9), ("last", 1, 0)]
    assert rows(driver.step()) == [("short", 1, 4), ("long", 1, 13), ("last", 1, 1)]


def test_decodes_go_before_the_parts_of_an_earlier_prompt():
    driver = drive(num_blocks=20, max_num_batched_tokens=4)
    driver.add("decodes", [1])
    driver.step()
    driver.add("long", [3] * 9, arrival_time=-1.0)
    assert rows(driver.step()) == [("decodes", 1, 1), ("long", 3, 0)]
    assert [group.request_id for group in driver.scheduler.running] == ["long", "decodes"]
    assert rows(driver.step()) == [("decodes", 1, 2), ("long", 3, 3)]


def test_without_chunked_prefill_a_prompt_waits_until_all_of_it_fits():
    driver = drive(num_blocks=20, max_num_batched_tokens=6, enable_chunked_prefill=False)
    driver.add("a", [1, 2])
    driver.add("b", [3] * 5)
    driver.add("c", [4])
    assert rows(driver.step()) == [("a", 2, 0)]  # and c does not overtake b
    assert rows(driver.step()) == [("a", 1, 2), ("b", 5, 0)]
    assert rows(driver.step()) == [("a", 1, 3), ("b", 1, 5), ("c", 1, 0)]


def test_without_chunked_prefill_a_prompt_above_the_budget_is_rejected():
    driver = drive(num_blocks=20, max_num_batched_tokens=6, enable_chunked_prefill=False)
    driver.add("a", [1] * 7)
    driver.add("b", [1] * 6)
    output = driver.step()
    assert list(output.rejected) == ["a"]
    assert "7 tokens to compute, max_num_batched_tokens is 6" in output.rejected["a"]
    assert rows(output) == [("b", 6, 0)]
    assert driver.scheduler.num_rejected == 1


def test_cached_tokens_count_when_a_prompt_must_fit_into_one_step():
    driver = drive(num_blocks=20, max_num_batched_tokens=6, enable_chunked_prefill=False)
    driver.add("a", [1, 2, 3, 4, 5])
    driver.step()
    driver.add("b", [1, 2, 3, 4, 6, 7, 8, 9])
    assert rows(driver.step()) == [("a", 1, 5), ("b", 4, 4)]


@pytest.mark.parametrize(
    ("config", "length", "n", "reason"),
    [
        ({}, 33, 1, "9 blocks needed; the pool has 8 blocks of 4 tokens"),
        ({"num_lookahead_slots": 1}, 32, 1, "9 blocks needed"),
        ({"num_lookahead_slots": 4}, 21, 3, "11 blocks needed"),  # 5, and 2 for each to write
        ({"max_num_seqs": 2}, 3, 3, "3 sequences, max_num_seqs is 2"),
        ({"max_num_batched_tokens": 2}, 3, 3, "3 sequences, max_num_batched_tokens is 2"),
    ],
)
def test_what_can_never_fit_is_rejected_with_the_numbers(config, length, n, reason):
    driver = drive(**config)
    driver.add("never", [1] * length, n)
    driver.add("next", [1])
    output = driver.begin()
    assert reason in output.rejected["never"]
    assert rows(output) == [("next", 1, 0)]


def test_the_first_that_does_not_fit_is_not_overtaken():
    driver = drive(num_blocks=8)
    driver.add("a", [1] * 20)
    driver.step()
    driver.add("large", [2] * 16)
    driver.add("small", [3])
    assert rows(driver.step()) == [("a", 1, 20)]
    assert driver.scheduler.num_waiting_for_blocks == 2
    driver.abort("a")
    assert rows(driver.step()) == [("large", 16, 0), ("small", 1, 0)]
    assert driver.scheduler.num_waiting_for_blocks == 0


def test_who_waits_for_a_seat_does_not_wait_for_blocks():
    driver = drive(max_num_seqs=1)
    driver.add("a", [1])
    driver.add("b", [2])
    assert rows(driver.step()) == [("a", 1, 0)]
    assert driver.scheduler.num_waiting_for_blocks == 0
    assert driver.scheduler.num_sequences == {"waiting": 1, "running": 1, "swapped": 0}


def test_lookahead_slots_are_there_for_every_decode():
    """Blocks of 4: with 3 tokens and 3 more slots a second block is needed, with 2 none."""
    for lookahead, num_blocks in ((1, 1), (2, 2)):
        driver = drive(num_lookahead_slots=lookahead)
        driver.add("a", [1, 2])
        driver.step()
        driver.step()
        assert len(driver.manager.tables["a", 0].blocks) == num_blocks


def test_tokens_that_somebody_appended_are_computed_with_the_next_one():
    """Drafts: two sequences with two tokens more each; the blocks of the later one are taken."""
    driver = drive(num_blocks=4, num_cpu_blocks=4)
    first, second = (driver.add(name, [name] * 7).seqs[0] for name in (1, 2))
    driver.step()
    for seq in (first, second):
        seq.append_token(8)
        seq.append_token(9)
    output = driver.step()
    assert rows(output) == [(1, 3, 7)] and output.preempted == {2: "swap"}
    assert rows(driver.step()) == [(1, 1, 10)]


def test_the_same_step_is_planned_again_when_it_failed():
    driver = drive(num_cpu_blocks=8)
    driver.add("a", [1] * 9, 2)
    driver.step()
    first = driver.begin()
    assert rows(first) == [("a", 1, 9), ("a", 1, 9)] and first.copies
    again = driver.begin()
    assert rows(again) == rows(first)
    assert again.copies == []  # the copies are made
    with pytest.raises(ValueError, match="output must be what schedule returned last"):
        driver.scheduler.update(first, {("a", 0): 1, ("a", 1): 1})
    driver.end(again, {("a", 0): 1, ("a", 1): 1})


# --- update -------------------------------------------------------------------------------------


def test_tokens_before_the_end_of_a_prompt_are_ignored():
    driver = drive(max_num_batched_tokens=3)
    group = driver.add("a", [1] * 5)
    driver.end(driver.begin(), {("a", 0): 7})
    assert len(group.seqs[0]) == 5
    driver.end(driver.begin(), {("a", 0): np.int64(7)})
    assert group.seqs[0].token_ids == [1] * 5 + [7]
    assert type(group.seqs[0].token_ids[-1]) is int


def test_a_finished_sequence_may_have_a_last_token_or_none():
    for tokens, length in (({("a", 0): 9}, 5), ({}, 4)):
        driver = drive()
        group = driver.add("a", [1, 2, 3, 4])
        driver.end(driver.begin(), tokens, [("a", 0)])
        assert len(group.seqs[0]) == length
        assert driver.manager.stats().gpu.num_cached == 1, "published before it was freed"
        driver.check_nothing_is_left()


def test_an_update_that_makes_no_sense_changes_nothing():
    driver = drive()
    driver.add("a", [1, 2])
    driver.add("b", [3, 4])
    output = driver.begin()
    before = driver.manager.snapshot()
    complete = {("a", 0): 5, ("b", 0): 5}
    for arguments, error, message in (
        (({("a", 0): 5},), ValueError, r"tokens lacks one for sequences \[\"\('b', 0\)\"\]"),
        (({**complete, "x": 1},), ValueError, r"unknown sequences \[\"'x'\"\]"),
        ((complete, ["y"]), ValueError, r"unknown sequences \[\"'y'\"\]"),
        (({**complete, ("a", 0): "5"},), TypeError, "'5' at position"),
        (({**complete, ("a", 0): 2**31},), ValueError, "out of range"),
        (([5, 5],), TypeError, "tokens is .* must be a dict"),
        ((complete, 3), TypeError, "finished is 3"),
    ):
        with pytest.raises(error, match=message):
            driver.scheduler.update(output, *arguments)
        assert driver.manager.snapshot() == before
    driver.end(output, complete)
    with pytest.raises(ValueError, match="output must be what schedule returned last"):
        driver.scheduler.update(output, complete)
    for stranger in (None, driver.scheduler):
        with pytest.raises(ValueError, match="output must be"):
            driver.scheduler.update(stranger, {})


# --- add and abort ------------------------------------------------------------------------------


class Words:
    """A sequence of the caller's own, with tokens that are none."""

    seq_id, token_ids = "words", ("a", "b")

    def append_token(self, token):
        raise AssertionError("never reached")

    def __len__(self):
        return len(self.token_ids)


def test_a_group_that_makes_no_sense_is_refused():
    driver = drive()
    seq = Sequence("s", [1])
    driver.scheduler.add(SequenceGroup("r", [seq]))
    taken = Sequence("taken", [1])
    driver.manager.allocate(taken)
    for group, error, message in (
        (Sequence("t", [1]), TypeError, "must be a SequenceGroup, also for one sequence"),
        (None, TypeError, "group is None"),
        (SequenceGroup("r", [Sequence("t", [1])]), ValueError, "request_id 'r' belongs to a live"),
        (SequenceGroup("q", [Sequence("s", [1])]), ValueError, "seq_id 's' belongs to a live"),
        (SequenceGroup("q", [Sequence("t", [])]), ValueError, "'t' has no tokens"),
        (
            SequenceGroup("q", [Sequence("t", [1]), Sequence("u", [2])]),
            ValueError,
            "'t' and 'u' of a group differ in tokens",
        ),
        (
            SequenceGroup("q", [Sequence("t", [1]), Sequence("u", [1], salt="x")]),
            ValueError,
            "salt or extra_key of sequences 't' and 'u' differ",
        ),
        (SequenceGroup("q", [taken]), AlreadyAllocatedError, "'taken' already holds blocks"),
        (SequenceGroup("q", [Words()]), TypeError, "token 'a' at position 0 is no int"),
    ):
        with pytest.raises(error, match=message):
            driver.scheduler.add(group)
    assert [group.request_id for group in driver.scheduler.waiting] == ["r"]


def test_abort_at_every_stage_frees_everything():
    driver = drive(num_blocks=6, num_cpu_blocks=3, max_num_batched_tokens=10)
    driver.add("running", [1] * 10)
    driver.add("swapped", [2] * 10)
    driver.add("waiting", [3] * 10)
    driver.step()
    driver.abort("waiting")
    driver.step()
    while not driver.scheduler.swapped:
        driver.step()
    driver.abort("swapped")
    assert driver.manager.stats().cpu.num_used == 0
    output = driver.begin()
    driver.abort("running")
    driver.end(output, {("running", 0): 1}, [("running", 0)])  # passed over silently
    driver.check_nothing_is_left()
    for request_id in ("running", "never"):
        with pytest.raises(ValueError, match=f"{request_id!r} belongs to no live group"):
            driver.scheduler.abort(request_id)
    with pytest.raises(TypeError, match=r"request_id is \[1\]; it must be hashable"):
        driver.scheduler.abort([1])


def test_a_name_may_be_used_again_at_once():
    driver = drive()
    driver.add("a", [1, 2])
    output = driver.begin()
    driver.abort("a")
    group = driver.add("a", [3, 4, 5])
    driver.end(output, {("a", 0): 9})  # of the aborted one
    assert len(group.seqs[0]) == 3
    assert rows(driver.step()) == [("a", 3, 0)]


def test_wrong_settings_are_named():
    for name, value, error in (
        ("max_num_seqs", 0, ValueError),
        ("max_num_batched_tokens", 2.5, TypeError),
        ("policy", "lifo", ValueError),
        ("preemption", None, ValueError),
        ("enable_chunked_prefill", 1, TypeError),
        ("num_lookahead_slots", -1, ValueError),
    ):
        with pytest.raises(error, match=f"{name} is "):
            SchedulerConfig(**{name: value})
    manager = BlockSpaceManager(CacheConfig(num_gpu_blocks=1))
    with pytest.raises(TypeError, match=r"config is .* must be a SchedulerConfig"):
        Scheduler(manager, SchedulerConfig())
    with pytest.raises(TypeError, match=r"manager is None; it must be a BlockSpaceManager"):
        Scheduler(SchedulerConfig(), None)


# --- prefixes and records -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("n", [1, 2])
def test_identical_prompts_that_arrive_together_compute_what_they_share_once(budget, n):
    """Ten tokens in blocks of 4: the first computes all, each other one its last two."""
    driver = drive(num_blocks=40, max_num_batched_tokens=budget)
    for name in range(5):
        driver.add(name, list(range(10)), n)
    driver.add("other", [99])
    first = driver.step()
    assert (first.seqs[-1].seq_id[0] == "other") is (budget == 64)  # it may pass those that wait
    while driver.scheduler.has_unfinished:
        driver.step(finish_at=13)
    decodes = driver.scheduler.num_generated_tokens - 5 * n - 1
    assert driver.computed_tokens == 10 + 4 * 2 + 1 + decodes
    assert driver.manager.stats().prefix_hit_tokens == 4 * 8 * n


def test_only_a_further_full_block_is_worth_waiting_for():
    driver = drive(num_blocks=40)
    driver.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    driver.add("same salt", [1, 2, 3, 4, 5])
    driver.add("all but one block", [1, 2, 3, 4])  # its last token is computed in any case
    driver.add("no full block", [1, 2, 3])
    assert [seq.seq_id[0] for seq in driver.step().seqs] == [
        "a",
        "all but one block",
        "no full block",
    ]
    driver = drive(num_blocks=40)
    driver.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    driver.add("another salt", [1, 2, 3, 4, 5], salt="s")
    assert len(driver.step().seqs) == 2


def test_nobody_waits_for_a_prefix_without_a_cache():
    driver = drive(num_blocks=40, caching=False)
    for name in range(3):
        driver.add(name, list(range(10)))
    assert driver.step().query_lens == [10, 10, 10]


def test_a_journal_of_a_scheduler_replays(tmp_path):
    driver = Driver(
        CacheConfig(block_size=2, num_gpu_blocks=7, num_cpu_blocks=4, hash_seed=1),
        SchedulerConfig(max_num_batched_tokens=4),
    )
    with driver.manager.record(tmp_path / "journal"):
        for name in range(4):
            driver.add(name, [1, 2, name], 1 + name % 2)
        while driver.scheduler.has_unfinished:
            driver.step(finish_at=9)
    assert all(driver.preempted.values())
    assert [differs for *_, differs in Replay(tmp_path / "journal") if differs] == []


def test_a_sequence_of_another_class_serves():
    class Plain:
        """Refuses new attributes, so that no digests can be kept on it."""

        __slots__ = ("seq_id", "token_ids")

        def __init__(self, seq_id, token_ids):
            self.seq_id, self.token_ids = seq_id, token_ids

        def append_token(self, token):
            self.token_ids.append(token)

        def __len__(self):
            return len(self.token_ids)

    manager = BlockSpaceManager(CacheConfig(block_size=2, num_gpu_blocks=6))
    scheduler = Scheduler(SchedulerConfig(), manager)
    seqs = [Plain(name, [1, 2, 3]) for name in range(3)]
    for seq in seqs:
        scheduler.add(SequenceGroup(seq.seq_id, [seq]))
    for _ in range(20):
        output = scheduler.schedule()
        done = [seq.seq_id for seq in output.seqs if len(seq) == 6]
        scheduler.update(output, {seq.seq_id: 0 for seq in output.seqs}, done)
        manager.check_invariants()
    assert not scheduler.has_unfinished and all(len(seq) == 7 for seq in seqs)


def test_a_fork_of_a_swapped_sequence_is_refused():
    driver = drive(num_blocks=6, num_cpu_blocks=3)
    for name in "ab":
        driver.add(name, [ord(name)] * 10)
    while not driver.scheduler.swapped:
        driver.step()
    (group,) = driver.scheduler.swapped
    with pytest.raises(NotOnGpuError):
        driver.scheduler.fork(group.seqs[0], group.seqs[0].fork("child"))
    assert len(group.seqs) == 1


def test_a_group_that_was_aborted_and_comes_again_has_no_part_in_the_step():
    d = drive()
    again, _ = d.add("a", [1, 2, 3]), d.add("b", [5, 6])
    output = d.begin()
    d.scheduler.abort("a")
    d.scheduler.add(again)
    d.scheduler.update(output, {("a", 0): 7, ("b", 0): 8})
    assert d.live["a", 0].token_ids == [1, 2, 3]
    assert d.live["b", 0].token_ids == [5, 6, 8]
    d.finish(6)
