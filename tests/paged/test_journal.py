"""What a journal recorded can be replayed, and a replay stops where the bookkeeping breaks."""

import argparse
import json

import pytest

from paged import (
    AlreadyAllocatedError,
    BlockSpaceManager,
    CacheConfig,
    NotAllocatedError,
    Sequence,
    SequenceGroup,
    debug,
)
from paged.journal import Replay

CONFIG = CacheConfig(block_size=4, num_gpu_blocks=12, num_cpu_blocks=8, watermark=0.0, hash_seed=1)


def record_a_life(path):
    """Every kind of call once, refused ones included; returns the manager."""
    manager = BlockSpaceManager(CONFIG)
    with manager.record(path):
        a = Sequence("a", range(10), salt=(1, "x"), extra_key=b"\x00")
        manager.can_allocate(a, 2)
        manager.allocate(a)
        b = a.fork("b")
        manager.fork(a, b)
        for token in range(5):
            manager.step([b, a], [token, 7])
        group = SequenceGroup("g", [a, b])
        manager.can_swap_out(group)
        manager.swap_out(group)
        manager.can_swap_in(group)
        manager.swap_in(group)
        manager.trim(a, 6)
        a.append_token(3)
        manager.can_append_slots(a)
        manager.append_slots(a, num_lookahead_slots=2)
        manager.build_batch([a, b], [1, 2], context_lens=[3, 4])
        manager.mark_computed(a, 7)
        manager.block_table(a)
        manager.num_cached_tokens(b)
        with pytest.raises(AlreadyAllocatedError):
            manager.allocate(a)
        manager.free(b)
        with pytest.raises(NotAllocatedError):
            manager.free(b)
        manager.reset_prefix_cache()
        manager.resize(7)
        manager.allocate(Sequence("b", [1, 2]))  # a name that was used before
    return manager


def run_debug(path, *options):
    parser = argparse.ArgumentParser()
    debug.add_arguments(parser)
    return debug.run(parser.parse_args([str(path), *options]))


def test_a_replay_ends_in_the_same_state(tmp_path):
    manager = record_a_life(tmp_path / "journal")
    replay = Replay(tmp_path / "journal")
    assert [differs for _, _, differs in replay] == [None] * len(replay)
    assert replay.manager.snapshot() == manager.snapshot()


def test_every_line_is_json_and_names_its_call(tmp_path):
    record_a_life(tmp_path / "journal")
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert lines[0]["config"]["block_size"] == 4
    assert [line["call"] for line in lines[1:4]] == ["can_allocate", "allocate", "fork"]
    assert [line["error"] for line in lines if "error" in line] == [
        "AlreadyAllocatedError",
        "NotAllocatedError",
    ]


def test_a_closed_journal_leaves_the_manager_as_it_was(tmp_path):
    manager = BlockSpaceManager(CONFIG)
    manager.record(tmp_path / "journal").close()
    assert vars(manager).keys() == vars(BlockSpaceManager(CONFIG)).keys()
    manager.allocate(Sequence(1, [1]))
    assert len((tmp_path / "journal").read_text().splitlines()) == 1


def test_a_journal_must_start_with_an_unused_manager(tmp_path):
    manager = BlockSpaceManager(CONFIG)
    manager.allocate(Sequence(1, [1]))
    with pytest.raises(ValueError, match="unused"):
        manager.record(tmp_path / "journal")


def test_debug_accepts_a_sound_journal_and_draws_it(tmp_path, capsys):
    record_a_life(tmp_path / "journal")
    assert run_debug(tmp_path / "journal", "--picture", str(tmp_path / "map.png")) == 0
    printed = capsys.readouterr().out
    assert "every invariant held" in printed
    assert "A 'a': 7 tokens" in printed
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_debug_stops_at_the_first_broken_invariant(tmp_path, capsys, monkeypatch):
    record_a_life(tmp_path / "journal")

    def forget_a_reference(manager, parent, child):
        fork(manager, parent, child)
        manager.gpu.ref_counts[manager.block_table(child)[1]] -= 1

    fork = BlockSpaceManager.fork
    monkeypatch.setattr(BlockSpaceManager, "fork", forget_a_reference)
    assert run_debug(tmp_path / "journal") == 1
    printed = capsys.readouterr().out
    assert "line 4: fork" in printed
    assert "block 1 has 1 references, its owners are ['a', 'b']" in printed
    assert "***........." in printed


def test_debug_stops_where_the_outcome_differs(tmp_path, capsys):
    record_a_life(tmp_path / "journal")
    text = (tmp_path / "journal").read_text()
    assert '"result": [[[2, 3]], "Batch"]' in text
    (tmp_path / "journal").write_text(text.replace("[[[2, 3]]", "[[[2, 9]]"))
    assert run_debug(tmp_path / "journal") == 1
    assert "line 5: step" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"config": {"block_size": 0}}'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, content):
    (tmp_path / "journal").write_text(content)
    with pytest.raises(ValueError, match="is not a journal"):
        Replay(tmp_path / "journal")


def test_a_binary_file_is_named(tmp_path):
    (tmp_path / "bin.dat").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"bin\.dat is not a journal"):
        Replay(tmp_path / "bin.dat")


def test_a_picture_shows_at_least_one_call(tmp_path):
    with pytest.raises(ValueError, match="frames is 0"):
        run_debug(tmp_path / "journal", "--frames", "0")


def test_a_damaged_line_is_named(tmp_path):
    record_a_life(tmp_path / "journal")
    with (tmp_path / "journal").open("a") as file:
        file.write('{"call": "fork"}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(Replay(tmp_path / "journal"))
