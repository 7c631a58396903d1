"""Who gives way, how, for whom, and when it comes back. Blocks of 4 tokens throughout."""

import pytest
from scheduler_driver import Driver, drive, rows

from paged import CacheConfig, SchedulerConfig


def names(groups):
    return [group.request_id for group in groups]


def two_that_outgrow_the_pool(**options):
    """Two prompts of 8 fill four blocks; the next token of either needs a fifth."""
    driver = drive(num_blocks=4, **options)
    driver.add("a", [1] * 8)
    driver.add("b", [2] * 8)
    assert rows(driver.step()) == [("a", 8, 0), ("b", 8, 0)]
    return driver


def test_the_last_one_is_swapped_out_and_comes_back():
    driver = two_that_outgrow_the_pool(num_cpu_blocks=4)
    output = driver.step(finish_at=11)
    assert rows(output) == [("a", 1, 8)]
    assert output.preempted == {"b": "swap"} and len(output.swap_out) == 2
    assert names(driver.scheduler.swapped) == ["b"]
    assert driver.scheduler.num_waiting_for_blocks == 1
    driver.step(finish_at=11)
    output = driver.step(finish_at=11)
    assert rows(output) == [("b", 1, 8)] and len(output.swap_in) == 2
    driver.step(finish_at=11)
    driver.check_nothing_is_left()
    assert driver.scheduler.num_preemptions == {"swap": 1, "recompute": 0}
    assert driver.scheduler.recomputed_tokens == 0


@pytest.mark.parametrize("options", [{}, {"num_cpu_blocks": 1}, {"preemption": "recompute"}])
def test_it_is_computed_again_when_the_cpu_pool_is_too_small_or_not_wanted(options):
    driver = two_that_outgrow_the_pool(
        **{"num_cpu_blocks": 4 if "preemption" in options else 0} | options, caching=False
    )
    output = driver.step(finish_at=11)
    assert output.preempted == {"b": "recompute"} and output.swap_out == []
    assert names(driver.scheduler.waiting) == ["b"]
    driver.step(finish_at=11)
    assert rows(driver.step(finish_at=11)) == [("b", 9, 0)]  # its first new token with the prompt
    assert driver.scheduler.recomputed_tokens == 8
    assert driver.scheduler.num_prompt_tokens == 16, "a prompt is counted once"


def test_what_is_still_cached_is_not_computed_again():
    driver = two_that_outgrow_the_pool(preemption="recompute")
    driver.step(finish_at=10)  # takes one of the blocks that b gives back, the tail
    assert rows(driver.step(finish_at=10)) == [("b", 5, 4)]
    assert driver.scheduler.recomputed_tokens == 4


def test_both_kinds_happen_when_the_cpu_pool_fills_up():
    driver = drive(num_blocks=6, num_cpu_blocks=2)
    for name in "abc":
        driver.add(name, [ord(name)] * 8)
    driver.step()
    driver.finish(17)
    assert driver.preempted == {"swap": 1, "recompute": 1}


@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
def test_one_that_has_computed_nothing_is_not_swapped(preemption):
    driver = drive(num_blocks=4, num_cpu_blocks=4, policy="priority", preemption=preemption)
    driver.add("less", [1] * 12, priority=1)
    assert rows(driver.begin()) == [("less", 12, 0)]  # and the model's step fails
    driver.add("urgent", [2] * 12, priority=0)
    output = driver.step()
    assert output.preempted == {"less": "recompute"} and output.swap_out == []
    assert rows(output) == [("urgent", 12, 0)]
    driver.finish(14)
    assert driver.scheduler.recomputed_tokens == 0


def test_nobody_comes_in_in_a_step_that_had_to_preempt():
    driver = two_that_outgrow_the_pool(num_cpu_blocks=4)
    driver.add("tiny", [3])
    assert rows(driver.step()) == [("a", 1, 8)]  # one block is free now
    assert driver.manager.stats().gpu.num_free == 1
    assert names(driver.scheduler.waiting) == ["tiny"]


def test_a_preempted_group_resumes_before_new_ones_even_of_earlier_arrival():
    for num_cpu_blocks in (0, 4):
        driver = two_that_outgrow_the_pool(num_cpu_blocks=num_cpu_blocks)
        driver.step(finish_at=10)
        driver.add("new", [3] * 8, arrival_time=-1.0)
        assert [name for name, *_ in rows(driver.step(finish_at=10))] == ["b"]


def test_a_prompt_that_gave_way_half_done_goes_on_where_it_was():
    driver = drive(num_blocks=5, num_cpu_blocks=5, max_num_batched_tokens=10)
    driver.add("a", [1] * 8)
    driver.add("b", [2] * 12)
    assert rows(driver.step(finish_at=10)) == [("a", 8, 0), ("b", 2, 0)]
    output = driver.step(finish_at=10)
    assert rows(output) == [("a", 1, 8)] and output.preempted == {"b": "swap"}
    assert rows(driver.step(finish_at=20)) == [("b", 10, 2)]


def test_without_chunked_prefill_what_was_preempted_may_return_in_parts():
    driver = drive(
        num_blocks=8, max_num_batched_tokens=14, enable_chunked_prefill=False, caching=False
    )
    driver.add("a", [1] * 12)
    driver.step(finish_at=21)
    driver.add("b", [2] * 12)
    output = driver.run(lambda: driver.preempted, 21)
    assert output.preempted == {"b": "recompute"}
    output = driver.run(lambda: names(driver.scheduler.running) == ["b"], 21)
    assert rows(output) == [("b", 14, 0)]  # 16 tokens with a budget of 14
    assert rows(driver.step(21))[0][2] == 14


def test_one_that_outgrows_the_pool_alone_is_rejected_with_the_numbers():
    driver = drive(num_blocks=2, num_cpu_blocks=9)
    driver.add("a", [1] * 8)
    driver.add("b", [2])
    driver.step()
    output = driver.step()
    assert output.rejected == {
        "a": "1 more blocks needed and 0 left while it runs alone; "
        "the pool has 2 blocks of 4 tokens"
    }
    assert rows(output) == []
    assert rows(driver.step()) == [("b", 1, 0)]


# --- priority -----------------------------------------------------------------------------------


def test_a_more_urgent_arrival_has_a_less_urgent_one_swapped_out():
    driver = drive(num_blocks=4, num_cpu_blocks=4, policy="priority")
    driver.add("batch job", [1] * 10, priority=5)
    driver.step()
    driver.step()
    driver.add("urgent", [2] * 6, priority=0)
    output = driver.step(finish_at=14)
    assert output.preempted == {"batch job": "swap"}
    assert len(output.swap_out) == 3
    assert rows(output) == [("urgent", 6, 0)]
    assert names(driver.scheduler.swapped) == ["batch job"]
    output = driver.run(lambda: names(driver.scheduler.running) == ["batch job"], 14)
    assert len(output.swap_in) == 3
    driver.finish(14)  # and the driver has compared every cached value


def test_equal_urgency_preempts_nobody():
    driver = drive(num_blocks=4, num_cpu_blocks=4, policy="priority")
    driver.add("a", [1] * 10, priority=1)
    driver.step()
    driver.add("b", [2] * 6, priority=1, arrival_time=-1.0)
    assert rows(driver.step()) == [("a", 1, 10)]


def test_first_come_first_served_preempts_nobody_for_an_arrival():
    driver = drive(num_blocks=4, num_cpu_blocks=4)
    driver.add("a", [1] * 10, priority=5)
    driver.step()
    driver.add("b", [2] * 6, priority=0)
    assert rows(driver.step()) == [("a", 1, 10)]


def test_as_few_as_needed_give_way_the_least_urgent_first():
    driver = drive(num_blocks=6, num_cpu_blocks=9, policy="priority")
    for name, priority in (("c", 3), ("a", 1), ("b", 2)):
        driver.add(name, [priority] * 6, priority=priority)
    driver.step()
    driver.add("urgent", [9] * 13, priority=0)
    output = driver.step()
    assert output.preempted == {"c": "swap", "b": "swap"}
    assert rows(output) == [("a", 1, 6), ("urgent", 13, 0)]


def test_nobody_gives_way_in_vain():
    """Without the less urgent one there would still be too few blocks."""
    driver = drive(num_blocks=6, num_cpu_blocks=9, policy="priority")
    driver.add("equal", [1] * 14, priority=0)
    driver.add("less", [2] * 6, priority=1)
    driver.step()
    driver.add("urgent", [9] * 9, priority=0)
    output = driver.step()
    assert output.preempted == {} and len(output.seqs) == 2
    assert driver.scheduler.num_waiting_for_blocks == 1


def test_nobody_goes_on_who_is_less_urgent_than_one_that_gave_way():
    """The last has one block, of five that are needed; it does not stay while the other goes."""
    driver = drive(num_blocks=7, num_cpu_blocks=9, policy="priority")
    driver.add("large", [1] * 18, priority=1)
    driver.add("last", [2] * 2, priority=2)
    driver.step()
    driver.add("urgent", [9] * 21, priority=0)
    assert driver.step().preempted == {"last": "swap", "large": "swap"}


def test_only_blocks_that_the_victims_alone_hold_make_room():
    """Three of the victim's four blocks are shared with another that stays."""
    driver = drive(num_blocks=8, num_cpu_blocks=9, policy="priority")
    driver.add("stays", [1] * 14, priority=0)
    driver.step()
    driver.add("shares", [1] * 13, priority=1)
    driver.step()
    assert driver.manager.num_cached_tokens(driver.live["shares", 0]) == 12
    driver.add("urgent", [9] * 17, priority=0)
    assert driver.step().preempted == {}  # one block would be gained, three are free, five needed
    driver.abort("urgent")
    driver.add("smaller", [9] * 12, priority=0)  # two are free now
    assert driver.step().preempted == {"shares": "swap"}


def test_cached_blocks_of_the_victim_serve_the_arrival():
    """Its prefix is the victim's: the hit survives in what the victim gives back."""
    driver = drive(num_blocks=4, num_cpu_blocks=4, policy="priority")
    driver.add("less", [1] * 10, priority=1)
    driver.step()
    driver.add("urgent", [*[1] * 8, *[2] * 7], priority=0)
    output = driver.step()
    assert output.preempted == {"less": "swap"}
    assert rows(output) == [("urgent", 7, 8)]


def test_cached_blocks_of_the_victim_are_not_room_as_well():
    """Of the three blocks that would be given back the arrival finds two: one, and one that is
    free, are not the three more that it needs.
    """
    driver = drive(num_blocks=6, num_cpu_blocks=9, policy="priority")
    driver.add("stays", [7] * 6, priority=0)
    driver.add("less", [1] * 10, priority=1)
    driver.step()
    driver.add("urgent", [*[1] * 8, *[2] * 9], priority=0)
    assert driver.step().preempted == {}


def test_the_watermark_is_not_kept_free_when_nobody_is_left_to_grow():
    driver = drive(num_blocks=8, num_cpu_blocks=8, watermark=0.25, policy="priority")
    driver.add("less", [1] * 10, priority=1)
    driver.step()
    driver.add("urgent", [2] * 30, priority=0)  # all eight blocks
    assert driver.step().preempted == {"less": "swap"}


def test_a_seat_or_a_token_of_the_budget_is_worth_a_preemption_too():
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        driver = drive(num_blocks=9, num_cpu_blocks=9, policy="priority", **{limit: 2})
        for name in "ab":
            driver.add(name, [ord(name)], priority=1)
        driver.step()
        driver.add("urgent", [9, 9], priority=0)
        output = driver.step()
        assert output.preempted == {"b": "swap"}
        assert rows(output) == [("a", 1, 1), ("urgent", 2 if limit == "max_num_seqs" else 1, 0)]


def test_an_arrival_preempts_though_others_lack_tokens_of_the_budget():
    driver = drive(num_blocks=9, num_cpu_blocks=9, policy="priority", max_num_batched_tokens=2)
    parent = driver.add("a", [1], priority=1).seqs[0]
    driver.add("b", [2], priority=1)
    driver.step()
    driver.fork(parent, ("a", 1))
    assert rows(driver.step()) == [("a", 1, 1), ("a", 1, 1)]  # b gets none
    driver.add("as urgent", [3], priority=1)
    assert rows(driver.step()) == [("a", 1, 2), ("a", 1, 2)]
    driver.add("urgent", [9, 9], priority=0)
    output = driver.step()
    assert output.preempted == {"b": "swap", "a": "swap"}
    assert rows(output) == [("urgent", 2, 0)]


def test_one_that_gave_way_computes_nothing_that_others_could_wait_for():
    driver = drive(num_blocks=12, num_cpu_blocks=12, policy="priority", max_num_batched_tokens=16)
    driver.add("victim", [1] * 40, priority=1)
    driver.step()
    driver.add("urgent", [2] * 9, priority=0)
    driver.add("urgent too", [1] * 20, priority=0)
    output = driver.step()
    assert output.preempted == {"victim": "swap"}
    assert rows(output) == [("urgent", 9, 0), ("urgent too", 4, 16)]


def test_nobody_as_urgent_as_the_victim_takes_its_place():
    driver = drive(num_blocks=5, num_cpu_blocks=9, policy="priority")
    driver.add("victim", [1] * 18, priority=1)
    driver.step()
    driver.add("urgent", [2] * 6, priority=0)
    driver.add("small", [3], priority=1, arrival_time=9.0)
    driver.add("urgent too", [4], priority=0)
    output = driver.step()
    assert output.preempted == {"victim": "swap"}
    assert rows(output) == [("urgent", 6, 0), ("urgent too", 1, 0)]


@pytest.mark.parametrize(
    ("num_cpu_blocks", "preemption"), [(4, "auto"), (4, "recompute"), (0, "auto")]
)
def test_one_that_outgrew_the_pool_behind_its_window_is_swapped_or_lost(num_cpu_blocks, preemption):
    """With 30 tokens it holds two blocks of a pool of four; to compute it again takes eight."""
    driver = Driver(
        CacheConfig(
            block_size=4,
            num_gpu_blocks=4,
            num_cpu_blocks=num_cpu_blocks,
            sliding_window=4,
            watermark=0.0,
        ),
        SchedulerConfig(policy="priority", preemption=preemption),
    )
    driver.add("long", [1] * 4, priority=1)
    while len(driver.live["long", 0]) < 30:
        driver.step()
    driver.add("urgent", [2] * 14, priority=0)
    output = driver.begin()
    if num_cpu_blocks:
        assert output.preempted == {"long": "swap"}
    else:
        assert output.preempted == {}
        assert "had to give way, the CPU pool has 0 free blocks" in output.rejected["long"]
    driver.end(output, {("urgent", 0): 1}, [("urgent", 0)])
    for _ in range(3):
        driver.step()
    assert len(driver.live.get(("long", 0), [])) == (33 if num_cpu_blocks else 0)
