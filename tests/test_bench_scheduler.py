"""The scheduler's benchmark at a tiny size: steps that are whole, times beside the barest Python."""

import random
from argparse import Namespace

import pytest

from bench import scheduler
from bench.report import envelope


@pytest.fixture
def tiny(monkeypatch):
    for name, value in (("NUM_SEQS", 8), ("LONGEST", 120), ("QUEUE", 5)):
        monkeypatch.setattr(scheduler, name, value)


def test_a_step_is_timed_beside_the_barest_python(tiny, tmp_path):
    options = Namespace(quick=True, seed=0, threads=1, out=tmp_path)
    result = envelope("scheduler", options) | scheduler.run(options)
    names = [record["name"] for record in result["records"]]
    assert len(set(names)) == len(names) == 2 * 6
    assert all(record["value"] > 0 for record in result["records"])
    assert {record["kind"] for record in result["records"]} == {"time", "ratio"}
    table = scheduler.table(result)
    assert "schedule, 2 groups of 4 sequences of 20 to 120 tokens" in table
    scheduler.plot(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_every_step_computes_a_token_of_all_and_the_prompt_of_the_one_that_came(tiny):
    server = scheduler.Server(random.Random(0), 6, 2)
    for _ in range(8):
        output = server.scheduler.schedule()
        assert len(output.seqs) == 12 and all(output.reaches_end)
        assert not output.preempted and not output.rejected
        server.update(output)
    assert server.scheduler.num_finished == 2
    server.scheduler.manager.check_invariants()
