"""Groups of several sequences: equal ones, forks, and those that part and must be computed again.

Blocks of 4 tokens throughout.
"""

import pytest
from scheduler_driver import drive, rows


def seq_rows(output):
    """(which sequence of its group, query_len, context_len)."""
    return [
        (seq.seq_id[1], query_len, context_len)
        for seq, query_len, context_len in zip(
            output.seqs, output.query_lens, output.context_lens, strict=True
        )
    ]


def answer(driver, output, *tokens, finished=()):
    """End a step with a token for each row."""
    by_id = dict(zip((seq.seq_id for seq in output.seqs), tokens, strict=True))
    driver.end(output, by_id, list(finished))


def test_the_first_computes_the_prompt_and_all_sample_from_its_last_row():
    driver = drive(max_num_batched_tokens=4)
    driver.add("r", [1] * 6, 3)
    output = driver.step()
    assert seq_rows(output) == [(0, 4, 0)] and output.reaches_end == [False]
    output = driver.begin()
    assert seq_rows(output) == [(0, 2, 4), (1, 0, 6), (2, 0, 6)]
    assert output.reaches_end == [True] * 3
    batch = driver.manager.build_batch(
        output.seqs, output.query_lens, context_lens=output.context_lens
    )
    assert batch.cu_seqlens_q.tolist() == [0, 2, 2, 2]
    answer(driver, output, 7, 8, 9)
    output = driver.begin()
    assert seq_rows(output) == [(0, 1, 6), (1, 1, 6), (2, 1, 6)]
    assert len(output.copies) == 2  # of the tail; the last holder writes in place
    answer(driver, output, 1, 2, 3, finished=[("r", 1)])
    assert seq_rows(driver.step()) == [(0, 1, 7), (2, 1, 7)]


def test_a_group_whose_tokens_do_not_fit_is_passed_and_not_torn_apart():
    driver = drive(num_blocks=20, max_num_batched_tokens=4)
    driver.add("a", [1], 2)
    driver.add("b", [2], 3)
    driver.step()
    assert [name for name, *_ in rows(driver.step())] == ["a", "a"]
    driver.add("c", [3])  # for which there would be budget, and which must not take it
    assert [name for name, *_ in rows(driver.step())] == ["a", "a"]
    driver.abort("a")
    assert [name for name, *_ in rows(driver.step())] == ["b", "b", "b", "c"]


def parted(driver):
    """Three sequences of 10 tokens: 0 and 1 share 8 of them, 2 shares 4: in 3 + 1 + 2 blocks."""
    first = driver.add("r", [1, 1, 1, 1], priority=1).seqs[0]
    answer(driver, driver.begin(), 2)
    driver.fork(first, ("r", 2))
    answer(driver, driver.begin(), 3, 4)
    driver.run(lambda: len(first) == 9)
    driver.fork(first, ("r", 1))
    answer(driver, driver.begin(), 5, 6, 7)
    assert driver.manager.stats().gpu.num_used == 6


@pytest.mark.parametrize("caching", [True, False])
def test_parted_sequences_share_again_what_they_have_in_common(caching):
    driver = drive(num_blocks=7, caching=caching, policy="priority", preemption="recompute")
    parted(driver)
    driver.add("urgent", [5] * 7, priority=0)
    output = driver.step(finish_at=8)
    assert output.preempted == {"r": "recompute"} and rows(output) == [("urgent", 7, 0)]
    output = driver.begin()
    assert output.seqs[0].seq_id == ("r", 0)
    hit = 8 * caching
    assert seq_rows(output) == [(0, 10 - hit, hit), (1, 2, 8), (2, 6, 4)]
    assert driver.manager.stats().gpu.num_used == 6, "no more blocks than before"
    tables = [driver.manager.block_table(seq) for seq in output.seqs]
    assert tables[1][:2] == tables[0][:2] and tables[2][0] == tables[0][0]
    assert driver.scheduler.recomputed_tokens == (9 - hit) + 1 + 5
    answer(driver, output, 1, 2, 3)
    assert seq_rows(driver.step()) == [(0, 1, 10), (1, 1, 10), (2, 1, 10)]


def test_parts_wait_for_what_another_computes_and_reach_their_end_together():
    driver = drive(
        num_blocks=7,
        caching=False,
        policy="priority",
        preemption="recompute",
        max_num_batched_tokens=7,
    )
    parted(driver)
    driver.add("urgent", [5] * 7, priority=0)
    driver.step(finish_at=8)
    assert [seq_rows(driver.step()) for _ in range(3)] == [
        [(0, 7, 0)],  # 1 waits for 8 tokens of 0, and 2 for budget
        [(0, 2, 7), (1, 1, 8), (2, 4, 4)],  # all but their last tokens
        [(0, 1, 9), (1, 1, 9), (2, 2, 8)],
    ]


def test_a_preempted_fork_that_has_not_parted_is_computed_with_its_parent():
    driver = drive(num_blocks=4, caching=False, policy="priority", preemption="recompute")
    first = driver.add("r", [1] * 6, priority=1).seqs[0]
    driver.step()
    driver.fork(first, ("r", 1))
    driver.add("urgent", [5] * 9, priority=0)
    assert driver.step(finish_at=10).preempted == {"r": "recompute"}
    assert seq_rows(driver.step()) == [(0, 7, 0), (1, 0, 7)]
    assert seq_rows(driver.step()) == [(0, 1, 7), (1, 1, 7)]


# --- forks --------------------------------------------------------------------------------------


def test_a_fork_before_the_update_takes_a_token_of_its_own():
    driver = drive()
    parent = driver.add("r", [1] * 5).seqs[0]
    output = driver.begin()
    child = driver.fork(parent, ("r", 1))
    grandchild = driver.fork(child, ("r", 2))
    assert driver.groups["r"].seqs == [parent, child, grandchild]
    with pytest.raises(ValueError, match=r"tokens lacks one for sequences .*'r', 1.*'r', 2"):
        driver.scheduler.update(output, {("r", 0): 7})
    driver.end(output, {("r", 0): 7, ("r", 1): 8, ("r", 2): 9})
    assert [seq.token_ids[-1] for seq in (parent, child, grandchild)] == [7, 8, 9]
    output = driver.step()
    assert seq_rows(output) == [(0, 1, 5), (1, 1, 5), (2, 1, 5)]
    assert len(output.copies) == 2


def test_a_fork_may_take_the_place_of_its_parent():
    """Beam search: the parent goes on twice under other names."""
    driver = drive()
    parent = driver.add("r", [1] * 5).seqs[0]
    output = driver.begin()
    for index in (1, 2):
        driver.fork(parent, ("r", index))
    driver.end(output, {("r", 1): 8, ("r", 2): 9}, [("r", 0)])
    output = driver.step()
    assert seq_rows(output) == [(2, 1, 5), (1, 1, 5)] and len(output.copies) == 1
    driver.end(driver.begin(), {("r", 1): 3}, [("r", 2)])
    (group,) = driver.scheduler.running
    assert [seq.seq_id[1] for seq in group.seqs] == [0, 1], "a fork that has finished is forgotten"


def test_a_fork_between_steps_computes_its_pending_token():
    driver = drive()
    parent = driver.add("r", [1] * 5).seqs[0]
    driver.step()
    driver.fork(parent, ("r", 1))
    output = driver.step()
    assert seq_rows(output) == [(0, 1, 5), (1, 1, 5)] and len(output.copies) == 1


def test_a_fork_of_a_prompt_that_is_half_done_follows_it():
    driver = drive(max_num_batched_tokens=3)
    parent = driver.add("r", [1] * 5).seqs[0]
    driver.step()
    driver.fork(parent, ("r", 1))
    assert seq_rows(driver.step()) == [(0, 2, 3), (1, 0, 5)]


def test_a_fork_of_a_waiting_sequence_waits_with_it():
    driver = drive()
    parent = driver.add("r", [1] * 5).seqs[0]
    driver.fork(parent, ("r", 1))
    assert seq_rows(driver.step()) == [(0, 5, 0), (1, 0, 5)]


def test_when_the_one_that_computes_gives_up_the_next_goes_on():
    driver = drive(max_num_batched_tokens=3)
    driver.add("r", [1] * 8, 3)
    output = driver.begin()
    driver.end(output, {}, [("r", 0)])
    assert seq_rows(driver.step()) == [(1, 3, 3)]
    assert seq_rows(driver.step()) == [(1, 2, 6), (2, 0, 8)]


def test_forks_may_need_more_seats_than_there_are():
    """The later group keeps its blocks and goes on when there are seats again."""
    driver = drive(num_blocks=20, max_num_seqs=3)
    parent = driver.add("a", [1]).seqs[0]
    driver.add("b", [2])
    driver.add("c", [3])
    driver.step()
    children = [driver.fork(parent, ("a", index)) for index in (1, 2)]
    assert [name for name, *_ in rows(driver.step())] == ["a", "a", "a"]
    driver.end(driver.begin(), {("a", 0): 1, ("a", 1): 2}, [children[1].seq_id])
    assert [name for name, *_ in rows(driver.step())] == ["a", "a", "b"]
    assert driver.manager.stats().gpu.num_used == 4


def test_a_group_may_lack_seats_for_all_of_its_sequences():
    driver = drive(num_blocks=20, max_num_seqs=3)
    parent = driver.add("a", [1]).seqs[0]
    driver.add("b", [2], 2)
    driver.step()
    driver.fork(parent, ("a", 1))
    assert [name for name, *_ in rows(driver.step())] == ["a", "a"]


def test_a_fork_that_makes_no_sense_is_refused():
    driver = drive(max_num_seqs=2)
    parent = driver.add("r", [1, 2]).seqs[0]
    driver.step()
    stranger = parent.fork("stranger")
    for arguments, error, message in (
        ((None, stranger), TypeError, "parent is None"),
        ((parent, None), TypeError, "child is None"),
        ((stranger, parent.fork("c")), ValueError, "parent 'stranger' is no live sequence"),
        ((parent, parent.fork(("r", 0))), ValueError, "belongs to a live sequence"),
    ):
        with pytest.raises(error, match=message):
            driver.scheduler.fork(*arguments)
    shorter = parent.fork("c")
    shorter.token_ids.pop()
    with pytest.raises(ValueError, match=r"child 'c' and .* differ in tokens"):
        driver.scheduler.fork(parent, shorter)
    child = driver.fork(parent, ("r", 1))
    with pytest.raises(ValueError, match="'d' is one too many: a group has at most 2 sequences"):
        driver.scheduler.fork(child, child.fork("d"))
    assert driver.groups["r"].seqs == [parent, child]
