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
    options = ["--trace", str(trace), "--memory", "2MiB", *SHAPE]
    options += ["--block-sizes", "8", "16", "32", "--json", str(tmp_path / "a.json")]
    assert main(["tune", *options, "--plots", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr()
    assert "12 requests of trace.jsonl" in shown.out
    assert "prompt 700 tokens (median)" in shown.out
    assert "Take block size" in shown.out
    assert "Most hits in all" in shown.out
    assert "12 of 12 finished" in shown.out
    assert "a pool of 0.0 GiB" in shown.out
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


def test_compare_tells_cost_and_saving(trace, tmp_path, capsys):
    options = ["--trace", str(trace), *SHAPE, "--heads", "4", "--memory", "8MiB"]
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tune", "--trace", "nowhere"], "trace nowhere cannot be read"),
        (["tune", "--memory", "8 apples"], "--memory wants --config"),
        (["tune", "--dtype", "float12"], "--dtype wants --config, or --layers"),
        (["tune", *SHAPE, "--dtype", "float12"], "dtype is 'float12'; it must be one of float32"),
        (["tune", *SHAPE, "--memory", "8 apples"], "memory must look like"),
        (["tune", *SHAPE, "--memory", "9"], "one token takes 512 bytes"),
        (["tune", *SHAPE, "--memory", "600"], "tokens that fit into the memory is 1"),
        (["tune", "--layers", "2"], "--head-dim, --kv-heads must be given"),
        (["tune", "--requests", "0"], "requests is 0"),
        (["tune", "--seed", "-1"], "seed is -1"),
        (["tune", "--load", "0"], "load is 0"),
        (["tune", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["tune", "--block-sizes", "8", "8"], "different sizes"),
        (["tune", "--json", "nowhere/x.json"], "nowhere"),
        (["compare", "--block-size", "0"], "block_size is 0"),
        (["compare", *SHAPE, "--heads", "3"], "num_heads is 3"),
        (["compare", "--memory", "8GiB"], "--memory wants"),
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
def test_help_needs_no_heavy_library(command):
    code = (
        "import sys\nfor name in ('torch', 'numpy', 'matplotlib', 'triton'): sys.modules[name] = None\n"
        f"from paged.__main__ import main\nmain([{command!r}, '--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "--trace" in result.stdout
