"""The public functions refuse what they cannot honour, by name, and answer empty calls at once."""

import inspect
import subprocess
import sys

import paged_kernels
import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import paged_attention, reshape_and_cache
from paged_kernels.testing import make_batch


def attention_arguments(**changes):
    batch = make_batch([5, 9], [2, 3], head_dim=8)
    return batch.arguments(**{"backend": "torch", **changes})


def write_arguments(**changes):
    batch = make_batch([5], num_kv_heads=2, head_dim=8)
    return {
        "key": torch.ones(3, 2, 8),
        "value": torch.ones(3, 2, 8),
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "slot_mapping": torch.tensor([0, 1, -1]),
        "backend": "torch",
        **changes,
    }


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*shape):
    return zeros(*shape, dtype=torch.int32)


REFUSED_BY_ATTENTION = [
    # wrong kinds and dtypes
    ({"query": [[1.0]]}, TypeError, r"query must be a tensor .*, got \[\[1.0\]\]"),
    ({"query": zeros(5, 4, 8, dtype=torch.float64)}, TypeError, "query .*float32.*got float64"),
    ({"query": zeros(5, 4, 8, dtype=torch.float16)}, TypeError, "query .*float32, got float16"),
    ({"block_table": [[0, 1]]}, TypeError, "block_table must be a tensor .* of int32 or int64"),
    ({"block_table": zeros(2, 3)}, TypeError, "block_table must be int32 or int64, got float32"),
    ({"seq_lens": [5, 9]}, TypeError, r"seq_lens .*got \[5, 9\]"),
    ({"seq_lens": zeros(2, dtype=torch.int16)}, TypeError, "seq_lens .*int16"),
    ({"seq_lens": zeros(2, dtype=torch.uint8)}, TypeError, "seq_lens .*uint8"),
    ({"cu_seqlens_q": zeros(3)}, TypeError, "cu_seqlens_q .*float32"),
    ({"max_query_len": 2.0}, TypeError, "max_query_len must be an int or None, got 2.0"),
    ({"max_query_len": torch.tensor(2)}, TypeError, "max_query_len .*got int64 tensor"),
    ({"max_seq_len": True}, TypeError, "max_seq_len .*got True"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got '1'"),
    ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
    ({"causal": None}, TypeError, "causal must be a bool, got None"),
    ({"sliding_window": 4.0}, TypeError, "sliding_window .*got 4.0"),
    ({"softcap": "5"}, TypeError, "softcap must be a float or None, got '5'"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a tensor"),
    ({"alibi_slopes": zeros(4, dtype=torch.float16)}, TypeError, "alibi_slopes .*float16"),
    ({"sinks": zeros(4, dtype=torch.float64)}, TypeError, "sinks must be float32, got float64"),
    ({"num_splits": 2.0}, TypeError, "num_splits must be an int or None, got 2.0"),
    ({"split_size": "16"}, TypeError, "split_size must be an int or None, got '16'"),
    ({"common_prefix_len": 16.0}, TypeError, "common_prefix_len .*got 16.0"),
    ({"draft_mask": zeros(2, 3, 3)}, TypeError, "draft_mask must be bool, got float32"),
    ({"out": zeros(5, 4, 8, dtype=torch.float16)}, TypeError, "out must be float32, got float16"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
    # wrong shapes
    ({"query": zeros(5, 8)}, ValueError, r"query must have 3 axes .*got shape \[5, 8\]"),
    ({"query": zeros(5, 4, 16)}, ValueError, "head_dim of key_cache, 8, got 16"),
    ({"query": zeros(5, 3, 8)}, ValueError, "multiple of the 2 KV heads .*got 3"),
    ({"key_cache": zeros(4, 2, 8)}, ValueError, "key_cache must have 4 axes"),
    ({"value_cache": zeros(4, 16, 2, 8)}, ValueError, r"value_cache .*got shape \[4, 16, 2, 8\]"),
    ({"block_table": ids(3, 3)}, ValueError, r"seq_lens must be \[num_seqs\] = \[3\], got shape"),
    ({"block_table": ids(2)}, ValueError, "block_table must have 2 axes"),
    ({"seq_lens": ids(2, 1)}, ValueError, "seq_lens must have 1 axes"),
    ({"cu_seqlens_q": ids(2)}, ValueError, r"cu_seqlens_q must be \[num_seqs \+ 1\] = \[3\]"),
    ({"cu_seqlens_q": None}, ValueError, "one row per sequence without cu_seqlens_q, 2 .*got 5"),
    ({"alibi_slopes": zeros(2)}, ValueError, r"alibi_slopes must be \[num_heads\] = \[4\]"),
    ({"sinks": zeros(4, 1)}, ValueError, "sinks must have 1 axes"),
    ({"draft_mask": torch.ones(2, 3, 2).bool()}, ValueError, "draft_mask must be"),
    ({"draft_mask": torch.ones(1, 3, 3).bool()}, ValueError, "draft_mask must be"),
    ({"out": zeros(5, 4, 9)}, ValueError, r"out must be .*\[5, 4, 8\], got shape \[5, 4, 9\]"),
    # wrong strides
    ({"query": zeros(5, 8, 4).mT}, ValueError, "query must have stride 1 on its last axis"),
    ({"key_cache": zeros(5, 16, 8, 2).mT}, ValueError, "value_cache|key_cache .*stride 1"),
    ({"seq_lens": ids(4)[::2]}, ValueError, r"seq_lens must be contiguous, got strides? \(?2"),
    ({"sinks": zeros(8)[::2]}, ValueError, "sinks must be contiguous"),
    ({"block_table": ids(3, 2).T}, ValueError, "block_table must have stride 1"),
    ({"out": zeros(5, 8, 4).mT}, ValueError, "out must have stride 1"),
    # numbers out of range
    ({"max_query_len": -1}, ValueError, "max_query_len must be >= 0, got -1"),
    ({"max_query_len": 0, "query": zeros(2, 4, 8), "cu_seqlens_q": None}, ValueError, ">= 1, got 0"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must be >= 0, got -1"),
    ({"scale": float("nan")}, ValueError, "scale must be finite in float32, got nan"),
    ({"sliding_window": 0}, ValueError, "sliding_window must be >= 1, got 0"),
    ({"softcap": 0.0}, ValueError, "softcap must be > 0 or None, got 0.0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite"),
    ({"num_splits": 0}, ValueError, "num_splits must be >= 1, got 0"),
    ({"split_size": 0}, ValueError, "split_size must be >= 1, got 0"),
    ({"split_size": 16, "num_splits": 2}, ValueError, "split_size must be None when num_splits"),
    ({"common_prefix_len": 8}, ValueError, "common_prefix_len must be a multiple of .* 16, .*got 8"),
    ({"common_prefix_len": -16}, ValueError, "common_prefix_len must be >= 0, got -16"),
    ({"common_prefix_len": 1600}, ValueError, "common_prefix_len .*at most 48"),
    # options that do not go together, or that nobody serves
    ({"k_scale": 1.0}, ValueError, "k_scale must be None unless .*quantised"),
    ({"v_scale": torch.ones(2)}, ValueError, "v_scale must be None unless .*quantised"),
    ({"backend": "cuda"}, ValueError, "backend must be None or one of triton, torch, reference"),
    ({"backend": 3}, ValueError, "backend must be None or one of .*got 3"),
    # tensors elsewhere
    ({"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}, ValueError, "cpu.*meta"),
    ({"key_cache": zeros(5, 16, 2, 8).to("meta")}, ValueError, "key_cache must be on cpu.*on meta"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    REFUSED_BY_ATTENTION,
    ids=[f"{i}-{'-'.join(changes)}" for i, (changes, *_) in enumerate(REFUSED_BY_ATTENTION)],
)
def test_attention_refuses_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        paged_attention(**attention_arguments(**changes))


REFUSED_BY_WRITE = [
    ({"key": zeros(2, 2, 8)}, ValueError, "key must have a row for each of the 3 slots, got 2"),
    ({"value": zeros(2, 2, 8)}, ValueError, "value must have a row for each of the 3 slots"),
    ({"key": zeros(3, 4, 8)}, ValueError, r"key must be .*\[any, 2, 8\], got shape \[3, 4, 8\]"),
    ({"value": zeros(3, 2, 9)}, ValueError, r"value must be .*\[any, 2, 8\]"),
    ({"key": zeros(3, 8, 2).mT}, ValueError, "key must have stride 1 on its last axis"),
    ({"key": zeros(3, 2, 8).half()}, TypeError, "value must be float16, got float32"),
    ({"key": zeros(3, 2, 8).half(), "value": zeros(3, 2, 8).half()}, TypeError, "key .*float16"),
    ({"slot_mapping": [0, 1]}, TypeError, "slot_mapping must be a tensor .* of int32 or int64"),
    ({"slot_mapping": zeros(3)}, TypeError, "slot_mapping must be int32 or int64, got float32"),
    ({"slot_mapping": ids(3, 1)}, ValueError, "slot_mapping must have 1 axes"),
    ({"slot_mapping": ids(6)[::2]}, ValueError, "slot_mapping must be contiguous"),
    ({"key_cache": zeros(4, 0, 2, 8), "value_cache": zeros(4, 0, 2, 8)}, ValueError, "no axis of size 0"),
    ({"key_cache": zeros(4, 16, 2, 8, dtype=torch.uint8)}, TypeError, "key_cache .*got uint8"),
    ({"k_scale": 2.0}, ValueError, "k_scale must be None unless .*quantised"),
    ({"backend": "gpu"}, ValueError, "backend must be"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    REFUSED_BY_WRITE,
    ids=[f"{i}-{'-'.join(changes)}" for i, (changes, *_) in enumerate(REFUSED_BY_WRITE)],
)
def test_write_refuses_by_name(changes, error, message):
    arguments = write_arguments(**changes)
    before = arguments["key_cache"].clone()
    with pytest.raises(error, match=message):
        reshape_and_cache(**arguments)
    assert torch.equal(before.nan_to_num(), arguments["key_cache"].nan_to_num())


QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_scales_must_suit_the_cache(dtype):
    cache = torch.zeros(4, 16, 2, 8).to(dtype)
    planes = torch.ones(4, 16, 2)
    good, wrong = (planes, 1.0) if dtype == torch.int8 else (0.5, planes)
    rejected = [wrong, torch.ones(2).double(), torch.ones(3), "1"]
    rejected += [None] if dtype == torch.int8 else [0.0, -1.0, float("inf"), True]
    for scale in rejected:
        for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
            scales = {name: scale, other: good}
            with pytest.raises((TypeError, ValueError), match=f"{name} must"):
                paged_attention(**attention_arguments(key_cache=cache, value_cache=cache, **scales))
            with pytest.raises((TypeError, ValueError), match=f"{name} must"):
                reshape_and_cache(**write_arguments(key_cache=cache, value_cache=cache, **scales))


def test_e4m3_needs_a_gpu_that_has_it(monkeypatch):
    from paged_kernels._cache_checks import _check_e4m3

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9 - device.index))
    _check_e4m3(torch.device("cuda", 0))
    with pytest.raises(
        ValueError, match=r"key_cache must not be float8_e4m3fn .* got a GPU of 8.8"
    ):
        _check_e4m3(torch.device("cuda", 1))


def test_raw_bytes_are_not_taken_for_fp8():
    cache = torch.zeros(4, 16, 2, 8, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"key_cache .*float8_e4m3fn.*got uint8"):
        paged_attention(**attention_arguments(key_cache=cache, value_cache=cache))


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "sinks"])
def test_there_is_no_backward_pass(name):
    arguments = attention_arguments(sinks=zeros(4))
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        paged_attention(**arguments)
    with torch.no_grad():
        assert paged_attention(**arguments).shape == (5, 4, 8)


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_write_is_not_differentiable(name):
    arguments = write_arguments()
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must not require grad"):
        reshape_and_cache(**arguments)


def test_keyword_only_arguments_are_keyword_only():
    kinds = {
        function: [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        for function in (paged_attention, reshape_and_cache)
    }
    assert kinds[paged_attention] == [
        "query", "key_cache", "value_cache", "block_table", "seq_lens",
    ]  # fmt: skip
    assert kinds[reshape_and_cache] == [
        "key", "value", "key_cache", "value_cache", "slot_mapping",
    ]  # fmt: skip


def test_public_names_are_sorted_and_exist():
    assert paged_kernels.__all__ == sorted(paged_kernels.__all__)
    for name in paged_kernels.__all__:
        assert getattr(paged_kernels, name) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_ids_may_be_int32_or_int64(backend):
    for query_lens in (None, [2, 3]):
        outputs = [
            make_batch([5, 19], query_lens, index_dtype=dtype).attend(backend=backend)
            for dtype in (torch.int32, torch.int64)
        ]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_calls_return_at_once(backend):
    none = make_batch([], [])
    out, lse = none.attend(return_lse=True, backend=backend)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4) and lse.dtype == torch.float32
    assert make_batch([]).attend(backend=backend).shape == (0, 4, 16)
    assert make_batch([5], [0]).attend(backend=backend).shape == (0, 4, 16)

    padding = make_batch([], [], padding_rows=3)
    out, lse = padding.attend(return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == float("-inf")).all()

    cache = torch.zeros(2, 16, 2, 8)
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = torch.ones(0, 2, 8)
    reshape_and_cache(rows, rows, cache, cache, nothing, backend=backend)
    assert (cache == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_without_a_single_block(backend):
    batch = make_batch([0, 0])
    arguments = batch.arguments(
        block_table=torch.zeros(2, 0, dtype=torch.int32),
        key_cache=batch.key_cache[:0],
        value_cache=batch.value_cache[:0],
        sinks=torch.ones(4),
    )
    out, lse = paged_attention(**arguments, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_hints_change_no_result(backend):
    batch = make_batch([5, 19], [2, 3])
    want = batch.attend(backend=backend, num_splits=1)
    for hints in (
        {"max_query_len": 3, "max_seq_len": 19},
        {"max_query_len": 64, "max_seq_len": 9999},
    ):
        got = batch.attend(backend=backend, num_splits=1, **hints)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_may_be_an_integer(backend):
    batch = make_batch([5])
    assert torch.equal(
        batch.attend(scale=1, backend=backend), batch.attend(scale=1.0, backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone(backend):
    batch = make_batch([5, 19], [2, 3], filler=1000.0)
    inputs = [batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens]
    before = [tensor.clone() for tensor in inputs]
    batch.attend(backend=backend)
    assert all(torch.equal(*pair) for pair in zip(before, inputs, strict=True))


def test_checking_reads_no_value_off_the_device():
    from paged_kernels._checks import check_attention, check_write

    class NoDevice(Exception):
        pass

    # A meta tensor has no values to read: any attempt raises.
    batch = make_batch([5, 9], [2, 3])
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in batch.arguments().items()
    }
    bound = inspect.signature(paged_attention).bind(
        **meta, max_query_len=3, max_seq_len=9, alibi_slopes=zeros(4).to("meta"),
        sinks=zeros(4).to("meta"), common_prefix_len=0, return_lse=True,
    )  # fmt: skip
    bound.apply_defaults()
    call, backend = check_attention(**bound.arguments)
    assert backend == "triton" and call.max_seq_len == 9 and call.out.device.type == "meta"

    rows = torch.ones(3, 2, 16, device="meta")
    slots = torch.zeros(3, dtype=torch.int64, device="meta")
    scales = check_write(
        rows, rows, meta["key_cache"], meta["value_cache"], slots, None, None, None
    )
    assert scales == (None, None, "triton")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_backend_follows_the_device(device):
    from paged_kernels._backends import resolve_backend

    want = {"cpu": "torch", "meta": "triton"}[device]
    assert resolve_backend(None, torch.device(device)) == want


SCRIPT = """
import sys
{before}
import torch, paged_kernels
assert "triton" not in sys.modules or {triton_allowed}
q, cache = torch.ones(1, 2, 16), torch.ones(2, 4, 2, 16)
table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
out = paged_kernels.paged_attention(q, cache, cache, table, lens)
assert (out == 1).all()
try:
    paged_kernels.paged_attention(q, cache, cache, table, lens, backend="triton")
except ValueError as error:
    print(error)
"""


def run(script, **environment):
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_cpu_tensors_need_the_interpreter_for_triton():
    message = run(SCRIPT.format(before="", triton_allowed=False))
    assert "TRITON_INTERPRET=1" in message and "backend='torch'" in message


def test_without_triton_the_torch_backend_still_serves():
    before = "sys.modules['triton'] = None"
    message = run(SCRIPT.format(before=before, triton_allowed=True))
    assert "needs the package triton" in message
