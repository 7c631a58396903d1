"""The command line: what it prints where, what it writes, and one line for whatever is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paged
from paged import provenance
from paged.__main__ import main

ROOT = Path(paged.__file__).parents[1]
SMALL = ["--requests", "3", "--max-length", "40", "--heads", "2", "--kv-heads", "1", "--head-dim"]
SMALL += ["16", "--block-size", "4"]
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:17:03.9799600,30,4\n"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments, **options):
    command = [sys.executable, "-m", "paged", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, **options
    )


def test_help_in_a_fresh_process_shows_defaults_and_commands():
    result = run("--help", env=os.environ | {"COLUMNS": "200"})
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for flag, default in (
        ("--trace", "built-in lengths"),
        ("--requests", "64"),
        ("--max-length", "2048"),
        ("--block-size", "16"),
        ("--num-blocks", "half of what --max-num-seqs longest requests take"),
        ("--num-cpu-blocks", "0"),
        ("--max-num-seqs", "16"),
        ("--max-num-batched-tokens", "2048"),
        ("--heads", "8"),
        ("--kv-heads", "2"),
        ("--head-dim", "64"),
        ("--layers", "1"),
        ("--dtype", "float32"),
        ("--backend", "triton on a GPU, torch on a CPU"),
        ("--device", "cpu"),
        ("--no-prefix-cache", "share"),
        ("--seed", "0"),
        ("--json", "do not"),
        ("--block-map", "paged-block-map.png"),
    ):
        assert re.search(rf"{flag}\b[^(]*\(default: {re.escape(default)}\)", text), flag
    assert "paged size" in text
    assert "paged debug" in text


def test_help_needs_no_torch():
    code = (
        "import sys; from paged.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_run_prints_results_on_stdout_and_progress_on_stderr(tmp_path):
    result = run(*SMALL, "--json", "figures.json")
    assert result.returncode == 0, result.stderr
    for words in (
        "requests                       3",
        "steps",
        "prompt tokens",
        "generated tokens",
        "prefix hit tokens",
        "preemptions",
        "in blocks of 4 tokens",
        "contiguous, next power of two",
        "without a token",
        "block manager",
        "writing K and V",
        "paged attention",
        "the same attention, dense",
        "times as long as dense",
        "sampled rows",
        "block map: paged-block-map.png",
    ):
        assert words in result.stdout
    assert "3/3" in result.stderr
    assert "3/3" not in result.stdout
    assert (tmp_path / "paged-block-map.png").read_bytes().startswith(b"\x89PNG")

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["requests"] == 3
    assert figures["max_error"] < 1e-5
    for name in [
        "steps",
        "prompt_tokens",
        "generated_tokens",
        "blocks_peak",
        "waste_paged",
        "waste_contiguous_max",
        "waste_contiguous_pow2",
        "seconds_manager",
        "seconds_write",
        "seconds_attention",
        "seconds_dense",
        "rows_checked",
        "backend",
        "device",
        "versions",
        "commit",
    ]:
        assert name in figures
    assert (figures["backend"], figures["device"]) == ("torch", "cpu")
    assert figures["versions"]["torch"]


def test_every_option_reaches_the_replay(tmp_path):
    options = "--layers 2 --dtype bfloat16 --backend reference --no-prefix-cache --seed 5"
    options += " --num-blocks 30 --max-num-seqs 2 --json f.json --block-map map.svg"
    options += " --num-cpu-blocks 7 --max-num-batched-tokens 25"
    assert main([*SMALL, *options.split()]) == 0
    config = json.loads((tmp_path / "f.json").read_text())["config"]
    assert config == {
        "max_length": 40,
        "block_size": 4,
        "num_blocks": 30,
        "num_cpu_blocks": 7,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 25,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "layers": 2,
        "dtype": "bfloat16",
        "backend": "reference",
        "device": "cpu",
        "prefix_cache": False,
        "threads": 1,
        "seed": 5,
    }
    assert "<svg" in (tmp_path / "map.svg").read_text()


def test_a_trace_file_is_replayed_and_clipping_is_said(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text(
        AZURE_HEADER + AZURE_ROW * 2 + AZURE_ROW.replace("30", "90")
    )
    assert main([*SMALL, "--trace", "trace.csv"]) == 0
    output = capsys.readouterr().out
    assert "3 requests of trace.csv" in output
    assert "1 of them clipped to 40 tokens" in output


def test_triton_in_the_interpreter_agrees_with_torch():
    figures = {}
    for backend in ("triton", "torch"):
        result = run(
            *("--backend", backend, "--requests", "4", "--max-length", "64"),
            *("--json", f"{backend}.json"),
            env=os.environ | {"TRITON_INTERPRET": "1"},
        )
        assert result.returncode == 0, result.stderr
        figures[backend] = json.loads(Path(f"{backend}.json").read_text())
    for name in ("steps", "rows_checked", "blocks_peak", "waste_paged", "max_error_dense"):
        assert figures["triton"][name] == figures["torch"][name]
    assert figures["triton"]["max_error"] < 1e-5


def files(folder):
    """What bad input is made of."""
    (folder / "empty.csv").write_text("")
    (folder / "header.csv").write_text(AZURE_HEADER)
    (folder / "columns.csv").write_text("a,b,c\n1,2,3\n")
    (folder / "negative.csv").write_text(AZURE_HEADER + AZURE_ROW.replace("30", "-30"))
    (folder / "junk").write_bytes(bytes(range(256)) * 8)
    (folder / "long.csv").write_text(AZURE_HEADER + AZURE_ROW)
    (folder / "folder").mkdir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trace absent.csv", "absent.csv cannot be read: No such file or directory"),
        ("--trace folder", "folder cannot be read: Is a directory"),
        ("--trace empty.csv", "empty.csv is empty"),
        ("--trace header.csv", "header.csv holds no requests"),
        ("--trace columns.csv", "columns.csv, line 1: wants a CSV header"),
        ("--trace negative.csv", "negative.csv, line 2: ContextTokens must be an integer >= 1"),
        ("--trace junk", "junk is not a text file"),
        ("--trace long.csv --num-blocks 8", "needs 9 blocks of 4 tokens and can never fit into 8"),
        ("--num-blocks 1", "can never fit into 1"),
        ("--num-blocks 0", "num_blocks is 0"),
        ("--block-size 0", "block_size is 0"),
        ("--block-size -4", "block_size is -4"),
        ("--block-size four", "argument --block-size: invalid int value: 'four'"),
        ("--requests 0", "requests is 0"),
        ("--max-length 1", "max_length is 1"),
        ("--max-num-seqs 0", "max_num_seqs is 0"),
        ("--kv-heads 3", "heads is 2; it must be a multiple of kv_heads, which is 3"),
        ("--head-dim 0", "head_dim is 0"),
        ("--layers 0", "layers is 0"),
        ("--seed -1", "seed is -1"),
        ("--dtype float12", "argument --dtype: invalid choice: 'float12'"),
        ("--backend cuda", "argument --backend: invalid choice: 'cuda'"),
        ("--device cuda:99", "device 'cuda:99' is not at hand"),
        ("--device abacus", "device 'abacus' is not at hand"),
        ("--json absent/figures.json", "No such file or directory: 'absent/figures.json'"),
        ("--json folder", "Is a directory: 'folder'"),
        ("--block-map absent/map.png", "No such file or directory: 'absent/map.png'"),
        ("--block-map map.docx", "map.docx must end in .png, .svg, .pdf"),
        ("--unheard-of", "unrecognized arguments: --unheard-of"),
        ("sizes", "unrecognized arguments: sizes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, options, message):
    files(tmp_path)
    before = sorted(tmp_path.iterdir())
    try:
        code = main([*SMALL, *options.split()])
    except SystemExit as end:  # how argparse leaves
        code = end.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert message in output.err
    assert output.err.startswith("paged: ")
    assert output.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "options", ["--trace absent.csv", "--num-blocks 1", "--dtype float12", "--device cuda:99"]
)
def test_no_traceback_reaches_the_user(options):
    result = run(*SMALL, *options.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("paged: ")
    assert result.stderr.count("\n") == 1


def test_triton_on_a_cpu_without_the_interpreter_says_what_to_set():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = run(*SMALL, "--backend", "triton", env=environment)
    assert result.returncode == 2
    assert "TRITON_INTERPRET=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_beyond_rounding_is_exit_code_1(monkeypatch, capsys):
    from paged_kernels import KVCache

    attend = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *a, **k: attend(*a, **k) + 1)
    assert main(SMALL) == 1
    assert "MORE THAN ROUNDING" in capsys.readouterr().out


def test_interrupting_it_is_no_traceback():
    # A shell's background job ignores interrupts, and so does all that it starts.
    interruptible = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        " from paged.__main__ import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", interruptible, "--requests", "5000", "--max-length", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            shown = ""
            while "/5000" not in shown:  # the bar: it runs
                character = process.stderr.read(1)
                assert character, f"it ended early: {shown}"
                shown += character
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert output == ""
    assert errors.endswith("paged: interrupted\n")
    assert "Traceback" not in errors


def test_the_commit_is_named_inside_the_repository_and_null_elsewhere(tmp_path, monkeypatch):
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        )
        assert provenance.commit() == head.stdout.strip()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() is None
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None
