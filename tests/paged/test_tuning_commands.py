"""`paged tune` and `paged compare`: tables and a reason on stdout, files where asked, short errors."""

import json
import subprocess
import sys

import pytest

from paged.__main__ import main
from paged.tuning import tune_command

SHAPE = ["--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float32"]
MOONCAKE = [
    {"timestamp": 100 * i, "input_length": 700, "output_length": 5, "hash_ids": [i % 3, 10 + i]}
    for i in range(12)
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


def test_tune_recommends_and_replays(trace, tmp_path, capsys):
    options = ["--trace", str(trace), "--kv-memory", "2MiB", *SHAPE]
    options += ["--block-sizes", "8", "16", "32", "--json", str(tmp_path / "a.json")]
    assert main(["tune", *options, "--plots", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr()
    assert "12 requests of trace.jsonl" in shown.out
    assert "prompt 700 tokens (median)" in shown.out
    assert "Take block size" in shown.out
    assert "Most hits in all" in shown.out
    assert "12 of 12 finished" in shown.out
    assert "a pool of 2.0 MiB" in shown.out
    assert "a load of 0.8 x what 256 sequences and 2,048 tokens a step allow" in shown.out
    assert "100%" in shown.err
    figures = json.loads((tmp_path / "a.json").read_text())
    assert list(figures) == ["block_sizes", "policies", "replay"]
    room = 2 * 2**20 // (2 * 2 * 2 * 16 * 4)
    size = figures["block_sizes"]["recommendation"]["block_size"]
    assert figures["replay"]["config"]["num_gpu_blocks"] == room // size
    assert [pool["pool_tokens"] for pool in figures["policies"]["pools"]] == [room, 4 * room]
    assert figures["block_sizes"]["rows"][0]["sequences"] == room // 704
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["block_sizes.png", "policies.png", "replay.png"]


def test_tune_needs_nothing_but_its_name(monkeypatch, capsys):
    monkeypatch.setattr("paged.tuning.command_options.BUILT_IN_REQUESTS", 20)
    monkeypatch.setattr("paged.tuning.side_by_side.COST", 3_000)
    monkeypatch.setattr(tune_command, "REPLAY_COST", 9_000)
    assert main(["tune", "--block-sizes", "16", "32"]) == 0
    shown = capsys.readouterr().out
    assert "20 requests of the built-in lengths" in shown
    assert "Replay of the first" in shown
    assert "Most hits" not in shown
    assert "Pool: at a load of 0.8 of 256 sequences and 2,048 tokens a step the peak was" in shown
    assert "More keeps prefixes" not in shown


def test_tune_ends_with_the_pool_to_take(trace, capsys):
    """Three families, four at once: 4 x 44 blocks of 16, less the 32 that two alike share."""
    options = ["tune", "--trace", str(trace), *SHAPE, "--block-sizes", "16"]
    options += ["--max-num-seqs", "4", "--load", "4"]
    at = "at a load of 4 of 4 sequences and 2,048 tokens a step the peak was 144 blocks (1.1 MiB)"
    take = (
        "Take a pool of 146 blocks (1.1 MiB) or more, the peak and the 1% that admission leaves"
        " free. More keeps prefixes that no running request holds"
    )
    assert main([*options, "--kv-memory", "2MiB"]) == 0
    *before, last = capsys.readouterr().out.strip().splitlines()
    waited = "and no request waited for blocks, only for their turn in a step"
    assert last == f"Pool: {at}, {waited}. {take}"
    assert not any(line.startswith("options here") for line in before)
    assert main([*options, "--kv-memory", "800KiB"]) == 0
    *before, last = capsys.readouterr().out.strip().splitlines()
    assert last == (
        "Pool: 100 blocks (0.8 MiB) are too few: short of blocks in 25 of 30 steps. With room for"
        f" all, {at}, so 1.5 times as many are wanted. {take}"
    )
    flags = "options here: num_gpu_blocks is --kv-memory, max_num_seqs is --max-num-seqs"
    assert flags in before
    assert main([*options, "--kv-memory", "320KiB"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith(
        "Pool: 40 blocks (0.3 MiB) are too few: too small for 12 requests at all. "
    )


def test_compare_tells_cost_and_saving(trace, tmp_path, capsys):
    options = ["--trace", str(trace), *SHAPE, "--heads", "4", "--kv-memory", "8MiB"]
    options += ["--batch", "2", "--longest", "60", "--seconds", "0", "--json", str(tmp_path / "b")]
    assert main(["compare", *options, "--plots", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Memory: a running sequence holds" in shown
    assert "times as long as dense in decode" in shown
    figures = json.loads((tmp_path / "b").read_text())["dense"]
    assert figures["shape"] == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
    }
    assert figures["bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert (tmp_path / "dense.png").exists()
    assert "MiB of K and V in 2 layers of 2 KV heads of 16, float32" in shown
    assert "prefixes that requests share are left out" in shown
    assert "slow in" not in shown
    assert "the shape is assumed" not in shown


def test_compare_warns_of_half_precision_on_a_cpu(tmp_path, capsys):
    options = [*SHAPE[:-1], "bfloat16", "--device", "cpu", "--requests", "3"]
    assert main(["compare", *options, "--batch", "1", "--longest", "20", "--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "dense attention itself is slow in bfloat16 on a CPU: --dtype float32" in shown
    assert "query heads are taken to be as many as KV heads, 2: --heads" in shown
    assert "sequences are timed at 20 tokens at most (--longest)" in shown
    assert "prefixes" not in shown


@pytest.mark.parametrize(
    "options",
    [
        ["tune", "--block-sizes", "0"],
        ["compare", "--batch", "0"],
        ["compare", "--longest", "0"],
        ["compare", "--block-size", "few"],
    ],
    ids=" ".join,
)
def test_counts_below_one_are_refused_with_the_options(options, capsys):
    with pytest.raises(SystemExit) as left:
        main(options)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument {options[1]}: it is {options[2]}; it must be an integer >= 1" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tune", "--trace", "nowhere"], "trace nowhere cannot be read"),
        (["tune", "--kv-memory", "8 apples"], "--kv-memory wants --config"),
        (["tune", "--dtype", "float12"], "--dtype wants --config, or --layers"),
        (["tune", *SHAPE, "--dtype", "float12"], "dtype is 'float12'; it must be one of float32"),
        (["tune", *SHAPE, "--kv-memory", "8 apples"], "memory must look like"),
        (["tune", *SHAPE, "--kv-memory", "9"], "one token takes 512 bytes"),
        (["tune", *SHAPE, "--kv-memory", "600"], "tokens that fit into the memory is 1"),
        (["tune", "--layers", "2"], "--head-dim, --kv-heads must be given"),
        (["tune", "--requests", "0"], "requests is 0"),
        (["tune", "--seed", "-1"], "seed is -1"),
        (["tune", "--load", "0"], "load is 0"),
        (["tune", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["tune", "--block-sizes", "8", "8"], "different sizes"),
        (["tune", "--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written: No such"),
        (["tune", "--config", "."], "config config.json cannot be read"),
        (["compare", *SHAPE, "--heads", "3"], "num_heads is 3"),
        (["compare", "--heads", "4"], "--heads wants --config"),
        (["tune", *SHAPE, "--kv-memory", "9" * 400], "too large for this machine"),
        (["tune", "--requests", "10000000000000000"], "too large for this machine"),
        (["compare", "--kv-memory", "8GiB"], "--kv-memory wants"),
        (["compare", "--dtype", "float16"], "--dtype wants --config"),
        (["compare", "--seconds", "-1"], "seconds is -1.0; it must be a finite number >= 0"),
        (["compare", "--seconds", "nan"], "seconds is nan"),
        (["compare", "--threads", "1000000"], "threads is 1000000; this machine has"),
        (["compare", "--device", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paged.tuning.command_options.BUILT_IN_REQUESTS", 3)
    assert main(options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("paged: ")
    assert message in lines[-1]


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_a_dangling_link_is_written_through(command, tmp_path, monkeypatch):
    monkeypatch.setattr("paged.tuning.command_options.BUILT_IN_REQUESTS", 3)
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "target.json")
    few = ["--block-sizes", "16"] if command == "tune" else ["--batch", "1", "--longest", "20"]
    few += [] if command == "tune" else ["--seconds", "0", "--device", "cpu"]
    assert main([command, *few, "--json", str(link)]) == 0
    assert link.is_symlink() and json.loads((tmp_path / "target.json").read_text())


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_help_needs_no_heavy_library(command):
    code = (
        "import sys\nfor name in ('torch', 'numpy', 'matplotlib', 'triton'): sys.modules[name] = None\n"
        f"from paged.__main__ import main\nmain([{command!r}, '--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "--trace" in result.stdout
