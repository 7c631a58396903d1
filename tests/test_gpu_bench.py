"""The GPU bench without a GPU: its checks in the interpreter, its reports from a made-up record."""

import inspect
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from paged_kernels import paged_attention

from bench import gpu, gpu_checks, gpu_limits, gpu_rivals, gpu_timing
from bench.gpu_checks import OPTION_SETS, SHORT, Check, assert_same_bytes, checks, run_checks
from bench.gpu_report import plot, records_of, table
from bench.gpu_rivals import OURS, SDPA, Problem, Shape
from bench.records import NotMeasuredError
from bench.report import envelope

CPU = torch.device("cpu")
OPTIONS = Namespace(quick=True, seed=0, threads=1, out=None, sanitize=False)


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotMeasuredError, match="needs a GPU"):
        gpu.run(OPTIONS)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "TRITON_INTERPRET" in gpu.missing()
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert "triton" in gpu.missing()


def named(*names):
    chosen = [check for check in checks(lengths=SHORT) if check.name in names]
    assert len(chosen) == len(names)
    return chosen


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of infinities
def test_the_checks_pass_in_the_interpreter():
    todo = named(
        "attention, float16, scores, D 80",
        "attention, float32 over int8, window, D 64",
        "write, bfloat16 over int8",
        "write, float16 over float8_e4m3fn",
        "write, float32",
        "copy",
    )
    outcomes = run_checks(todo, CPU)
    assert [outcome.name for outcome in outcomes] == [check.name for check in todo]
    assert [outcome.error for outcome in outcomes if outcome.error] == []


def test_small_forms_of_the_long_checks_pass():
    gpu_limits.check_long_write(CPU, tokens=48)
    gpu_limits.check_many_sequences(CPU, num_seqs=5)
    gpu_limits.check_block_moves(CPU)


def test_every_option_meets_every_dtype():
    names = [check.name for check in checks()]
    plain = ["attention, float32,", "attention, float16,", "attention, bfloat16,"]
    for kind in (*plain, " over float8_e4m3fn,", " over float8_e5m2,", " over int8,"):
        own = [name for name in names if kind in name and name.startswith("attention")]
        assert len(own) == len(OPTION_SETS), kind
    options = {option for names in OPTION_SETS.values() for option in names}
    tensors = {"query", "key_cache", "value_cache", "block_table", "seq_lens", "cu_seqlens_q"}
    hints = {"max_query_len", "max_seq_len", "out", "backend"}
    elsewhere = {"num_splits", "split_size", "return_lse", "k_scale", "v_scale", "causal"}
    every = set(inspect.signature(paged_attention).parameters)
    assert options - {"not_causal"} == every - tensors - hints - elsewhere
    assert len(list(checks(quick=True))) < len(names)


def test_a_kernel_that_does_nothing_is_caught(monkeypatch):
    idle = SimpleNamespace(run=lambda: None)
    monkeypatch.setattr(gpu_checks, "plan_copy", lambda caches, pairs: idle)
    (outcome,) = run_checks([Check("copy", gpu_checks.check_copy)], CPU)
    assert "AssertionError" in outcome.error


def test_bytes_are_compared_by_bit_pattern():
    x = torch.tensor([1.0, float("nan"), -0.0])
    assert_same_bytes(x, x.clone())
    with pytest.raises(AssertionError, match="1 of 3"):
        assert_same_bytes(x, torch.tensor([1.0, float("nan"), 0.0]))
    with pytest.raises(AssertionError, match="NaN"):
        assert_same_bytes(x, torch.tensor([1.0, 2.0, -0.0]))
    ones = torch.full((2,), 3, dtype=torch.int8)
    assert_same_bytes(ones, ones + 1, unit=1)
    with pytest.raises(AssertionError, match="up to 2 units"):
        assert_same_bytes(ones, ones + 2, unit=1)


def test_reading_reads_everything():
    x, sums = torch.ones(1 << 12), torch.zeros(3)
    gpu_timing.read_kernel[(3,)](sums, x, len(x), CHUNK=256)
    assert sums.tolist() == [6 * 256, 5 * 256, 5 * 256]


SHAPES = [Shape("decode", 3, 1, 70, 4, 2, 32), Shape("all", 2, 40, 40, 4, 2, 32),
          Shape("chunk", 2, 5, 37, 4, 2, 32)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_paged_and_dense_attention_agree_on_a_problem(shape):
    problem = Problem(shape, CPU)
    assert gpu_timing.largest_error(problem, gpu_rivals.paged(problem)) < 2**-7
    assert gpu_timing.largest_error(problem, gpu_rivals.sdpa(problem)) < 2**-7
    zeros = torch.zeros_like(problem.query)
    assert gpu_timing.largest_error(problem, lambda copy: zeros) == 1
    assert gpu_timing.largest_error(problem, lambda copy: zeros * float("nan")) == float("inf")
    if shape.query_len == 1:
        assert gpu_timing.largest_error(problem, gpu_rivals.sdpa_packed(problem)) < 2**-7


@pytest.fixture
def timeless(monkeypatch):
    """Everything that takes a GPU to measure takes a millisecond."""
    monkeypatch.setattr(gpu_timing, "times_ms", lambda run, copies, n: ([1.0] * n, True))
    monkeypatch.setattr(gpu_timing, "host_us", lambda run: 20.0)
    properties = SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def absent(problem):
        raise ImportError("no such project\nreally")

    def wrong(problem):
        return lambda copy: torch.zeros_like(problem.query)

    rivals = {SDPA: gpu_rivals.sdpa, "absent": absent, "wrong": wrong}
    monkeypatch.setattr(gpu_timing, "RIVALS", rivals)


def test_what_cannot_be_timed_is_skipped_with_a_reason(timeless):
    ours, sdpa, absent, wrong = gpu_timing.measure(SHAPES[0], CPU, 8, time.monotonic() + 100)
    assert (ours.provider, ours.median, ours.rounds, ours.skipped) == (OURS, 1.0, 8, None)
    assert sdpa.skipped is None and 0 < sdpa.max_error < 2**-7
    assert absent.skipped == "ImportError: no such project"
    assert wrong.skipped.startswith("WrongKernelError") and wrong.median == 0
    keys, queries, ids = 3 * 70 * 2 * 64 * 2, 3 * 4 * 32 * 2, 3 * 5 * 4
    assert ours.bytes == keys + 2 * queries + ids
    assert ours.flops == 2 * 3 * 70 * 4 * 64
    late = gpu_timing.measure(SHAPES[0], CPU, 8, time.monotonic() - 1)
    assert [row.skipped for row in late] == [None, None, "out of time", "out of time"]


def test_our_own_kernel_is_not_timed_when_it_is_wrong(timeless, monkeypatch):
    monkeypatch.setattr(
        gpu_timing, "paged", lambda problem: lambda copy: torch.zeros_like(problem.query)
    )
    with pytest.raises(gpu_timing.WrongKernelError, match="decode: error 1"):
        gpu_timing.measure(SHAPES[0], CPU, 8, time.monotonic() + 100)


def made_up_record():
    def row(phase, case, provider, median, **changes):
        return {
            "phase": phase, "case": case, "provider": provider, "bytes": 4 * 10**9,
            "flops": 10**10, "median": median, "lower_quartile": 0.9 * median,
            "upper_quartile": 1.1 * median, "rounds": 20, "graph": True, "host_us": 21.0,
            "max_error": 1e-3, "skipped": None, **changes,
        }  # fmt: skip

    record = envelope("gpu", OPTIONS) | {
        "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0",
        "checks": [{"name": "copy", "seconds": 0.1, "error": None}],
        "rates": {"read": 4.4e12, "copy": 4.0e12, "matmul": 8e14},
        "rows": [
            row("decode", "8 x 8k", OURS, 1.0), row("decode", "8 x 8k", SDPA, 2.0, graph=False),
            row("decode", "8 x 8k", "FlashInfer", 0.0, skipped="ImportError: none"),
            row("prefill", "1 x 8k", OURS, 3.0, flops=10**12),
        ],
    }  # fmt: skip
    return record | {"records": records_of(record)}


def test_the_table_gives_shares_of_what_was_measured():
    ours, sdpa, absent, prefill = table(made_up_record()).splitlines()[-4:]
    assert ours.split()[-10:] == [
        "0.9000", "1.0000", "1.1000", "4.000", "90.9", "100.0", "10.0", "0.50", "21.0", "1.0e-03",
    ]  # fmt: skip
    assert " 1.00 " in sdpa and sdpa.endswith("launched from Python")
    assert absent.endswith("not measured: ImportError: none")
    assert " - " in prefill and "333.3" in prefill  # SDPA was not timed on it


def test_records_hold_times_and_ratios_with_the_spread_of_both():
    records = {record["name"]: record for record in made_up_record()["records"]}
    assert list(records) == [
        f"decode 8 x 8k: {OURS}", f"decode 8 x 8k: {OURS} over SDPA",
        f"decode 8 x 8k: {OURS} of read bandwidth", f"decode 8 x 8k: {SDPA}",
        f"prefill 1 x 8k: {OURS}",
    ]  # fmt: skip
    ratio = records[f"decode 8 x 8k: {OURS} over SDPA"]
    assert (ratio["kind"], ratio["value"], ratio["repeats"]) == ("ratio", 0.5, 20)
    assert (ratio["lower"], ratio["upper"]) == pytest.approx((0.9 / 2.2, 1.1 / 1.8))
    share = records[f"decode 8 x 8k: {OURS} of read bandwidth"]
    bounds = [share[name] for name in ("lower", "value", "upper")]
    assert bounds == pytest.approx([4 / 4.4 / 1.1, 4 / 4.4, 4 / 4.4 / 0.9])


def test_a_record_is_drawn_without_a_gpu(tmp_path):
    picture = tmp_path / "gpu.png"
    plot(made_up_record(), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1 of 1 checks passed" in table(made_up_record())


def test_a_wrong_kernel_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpu, "environment", lambda device: {"gpu": "H200", "driver": "580"})

    def refuse(*args):
        raise AssertionError("a wrong kernel was timed")

    monkeypatch.setattr(gpu, "time_all", refuse)
    failed = [gpu_checks.Outcome("decode", 1.0, "off by one"), gpu_checks.Outcome("copy", 1.0)]
    monkeypatch.setattr(gpu_checks, "run_checks", lambda todo, device, num_workers: failed)
    result = gpu.run(OPTIONS)
    assert result["failures"] == ["FAILED decode: off by one"]
    assert result["rates"] is None and result["records"] == []
    assert "1 of 2 checks passed\nnothing was timed" in table(result)
