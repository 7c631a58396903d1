"""The counter of memory traffic, and the budgets that the kernels' traffic is held to."""

from argparse import Namespace

import pytest
import torch
import triton
import triton.language as tl
from paged_kernels.copy_kernel import plan_copy
from triton.runtime.interpreter import InterpreterBuilder

import bench.traffic
from bench.report import envelope
from bench.traffic import (
    BUDGETS,
    SECTOR,
    Report,
    Traffic,
    attention_case,
    broken_budgets,
    cases,
    counted,
    measure,
    records_of,
    run,
    table,
)

OPTIONS = Namespace(quick=True, seed=0, threads=1, out=None)


@triton.jit
def gather_kernel(out, x, ids, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    index = tl.load(ids + i // 4, mask=i < n, other=0)
    tl.store(out + i, tl.load(x + index, mask=i < n), mask=i < n)


def test_bytes_are_those_of_the_unmasked_lanes_and_sectors_are_shared():
    x, ids = torch.zeros(1024, dtype=torch.float16), torch.tensor([0, 600, 16], dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.float16)
    assert all(tensor.data_ptr() % SECTOR == 0 for tensor in (x, ids, out))
    with counted([x]) as traffic:
        gather_kernel[(1,)](out, x, ids, 12, SIZE=16)
    assert traffic.loaded == 12 * 4 + 12 * 2  # 12 ids, though only 3 differ
    assert traffic.stored == 12 * 2
    assert traffic.cache_loaded == 12 * 2
    assert traffic.sectors == 1 + 3 + 1  # ids, values that lie apart, output


def test_the_interpreter_is_as_before_afterwards():
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with pytest.raises(ZeroDivisionError), counted([]):
        assert InterpreterBuilder.create_masked_load is not load
        raise ZeroDivisionError
    assert InterpreterBuilder.create_masked_load is load
    assert InterpreterBuilder.create_masked_store is store


def test_copied_blocks_are_counted_to_the_byte():
    cache = torch.zeros(4, 16, 2, 16)
    launch = plan_copy([cache], torch.tensor([[0, 1], [2, 3]]))
    with counted([cache]) as traffic:
        launch.run()
    block = 16 * 2 * 16 * 4
    numbers = 3 + 2 * 1  # address, step and size; the ids of the pair
    assert traffic.loaded == 2 * (block + numbers * 8)
    assert (traffic.stored, traffic.cache_loaded) == (2 * block, 2 * block)


def test_decode_reads_each_key_and_value_once_and_an_id_per_key():
    report = measure(attention_case("decode", [100, 3], num_splits=1))
    (traffic,) = report.launches
    queries, cache = 2 * 8 * 128 * 2, 103 * 2 * 128 * 2 * 2
    assert traffic.cache_loaded == cache == report.least_cache
    assert traffic.stored == queries
    ids, lengths = 103 * 2 * 4, 2 * 2 * 4  # of each KV head
    assert traffic.loaded == cache + queries + ids + lengths
    assert report.least == cache + 2 * queries


def test_a_shared_prefix_is_read_once_per_query_tile():
    # 32 queries fit a tile of 128 rows at 4 heads per KV head.
    prefix = 64 * 2 * 128 * 2 * 2
    for query_lens, tiles in ((None, 1), ([1, 20, 30], 2)):
        report = measure(attention_case("cascade", [70, 110, 96], query_lens, common_prefix_len=64))
        assert report.launches[0].cache_loaded == tiles * prefix
        assert report.launches[-1].kernel == "merge_kernel"


def test_kernels_keep_their_budgets():
    reports = [measure(case) for case in cases()]
    assert {r.name for r in reports} >= set(BUDGETS)
    assert broken_budgets(reports) == []
    figures = [record for report in reports for record in records_of(report)]
    assert len({record["name"] for record in figures}) == len(figures)
    assert all(record["value"] >= 1 for record in figures if record["name"].endswith(": bytes"))
    assert len(list(cases(quick=True))) < len(reports)


def test_a_broken_budget_is_named():
    report = Report("decode", "kv 5", 100, 80, [Traffic("attention_kernel", 102, 1, 4, 80)])
    assert report.bytes_ratio == 1.03 and report.sectors_ratio == 1.28 and report.cache_ratio == 1
    assert broken_budgets([report]) == [
        "decode (kv 5): bytes_ratio is 1.0300, budget 1.02",
        "decode (kv 5): sectors_ratio is 1.2800, budget 1.02",
    ]


def test_a_broken_budget_is_a_failure_and_records_hold_the_figures(monkeypatch, tmp_path):
    case = attention_case("decode", [3], num_splits=1)
    monkeypatch.setattr(bench.traffic, "cases", lambda quick: [case])
    monkeypatch.setitem(BUDGETS, "decode", {"bytes_ratio": 1.0})
    result = run(OPTIONS)
    values = {record["name"].split(": ")[1]: record["value"] for record in result["records"]}
    assert values["K and V"] == 1 and set(values) == {"bytes", "sectors", "K and V"}
    assert result["failures"] == [
        f"decode (kv 3, 8/2 heads, D 128): bytes_ratio is {values['bytes']:.4f}, budget 1.0"
    ]
    assert all(record["kind"] == "exact" for record in result["records"])
    text = table(result)
    assert "attention_kernel" in text and f"{values['bytes']:.3f}" in text
    picture = tmp_path / "traffic.png"
    bench.traffic.plot(result | envelope("traffic", OPTIONS), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
