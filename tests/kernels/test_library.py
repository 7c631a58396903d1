"""The operators: traced, faked and compiled calls do what eager ones do."""

from functools import partial
from shutil import which

import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import paged_attention, reshape_and_cache
from paged_kernels.library import paged_attention_op, reshape_and_cache_op
from paged_kernels.testing import make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

# aot_eager traces, functionalises and runs the graph; inductor also writes C++.
needs_compiler = pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
GRAPH_BACKENDS = ("aot_eager", pytest.param("inductor", marks=needs_compiler))
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def fp8_caches():
    k, v = torch.zeros(2, 4, 16, 2, 8).to(torch.float8_e4m3fn)
    return {"key_cache": k, "value_cache": v, "k_scale": torch.ones(2), "v_factor": 0.5}


def int8_caches():
    k, v = torch.zeros(2, 4, 16, 2, 8, dtype=torch.int8)
    k_scale, v_scale = torch.zeros(2, 4, 16, 2)
    return {"key_cache": k, "value_cache": v, "k_scale": k_scale, "v_scale": v_scale}


def plain_caches():
    k, v = torch.zeros(2, 4, 16, 2, 8)
    return {"key_cache": k, "value_cache": v}


CACHES = (plain_caches, fp8_caches, int8_caches)


def opcheck(operator, arguments):
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if arguments["key_cache"].dtype != torch.float8_e4m3fn:  # its own sums over fp8 do not run
        tests.append("test_schema")
    results = torch.library.opcheck(operator, (), arguments, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}


@quiet
@pytest.mark.parametrize("caches", CACHES)
def test_opcheck_of_the_write(caches):
    rows = {"key": torch.randn(3, 2, 8), "value": torch.randn(3, 2, 8)}
    slots = {"slot_mapping": torch.tensor([5, -1, 40])}
    opcheck(reshape_and_cache_op, {**rows, **caches(), **slots})


@quiet
@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("decode", [True, False])
def test_opcheck_of_attention(caches, decode):
    arguments = {
        "query": torch.randn(3, 4, 8),
        **caches(),
        "block_table": torch.tensor([[1, 3], [2, 0], [0, 0]][: 3 if decode else 2]),
        "seq_lens": torch.tensor([20, 7, 1][: 3 if decode else 2]),
        "cu_seqlens_q": None if decode else torch.tensor([0, 2, 3]),
        "alibi_slopes": torch.ones(4),
        "sinks": torch.zeros(4),
        "softcap": 3.0,
        "sliding_window": 9,
    }
    opcheck(paged_attention_op, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_gives_the_bits_of_the_function(backend):
    batch = make_batch([20, 7], [2, 1])
    arguments = batch.arguments(sliding_window=9)
    out, lse = paged_attention(**arguments, return_lse=True, backend=backend)
    op_out, op_lse = torch.ops.paged_kernels.paged_attention(
        **{name: x for name, x in arguments.items() if name not in ("k_scale", "v_scale")},
        backend=backend,
    )
    assert torch.equal(op_out, out) and torch.equal(op_lse, lse)


def test_an_eager_call_does_not_pay_for_the_operator(monkeypatch):
    batch = make_batch([20, 7], [2, 1])
    expected = batch.attend()
    for name in ("traced_attention", "traced_write"):
        monkeypatch.delattr(f"paged_kernels.library.{name}")
    assert torch.equal(batch.attend(), expected)
    rows = torch.zeros(1, *batch.key_cache.shape[2:])
    reshape_and_cache(rows, rows, batch.key_cache, batch.value_cache, torch.tensor([0]))


class Attention(nn.Module):
    """Two layers, each of which writes its K and V into pages, then attends over them."""

    def __init__(self, num_blocks=16, block_size=4, num_heads=4, num_kv_heads=2, head_dim=8):
        super().__init__()
        self.sizes = (num_heads, num_kv_heads, head_dim)
        width = num_heads * head_dim
        self.qkv = nn.ModuleList(
            nn.Linear(width, width + 2 * num_kv_heads * head_dim) for _ in range(2)
        )
        caches = torch.zeros(2, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.register_buffer("caches", caches)

    def forward(self, x, slot_mapping, block_table, seq_lens, max_seq_len):
        num_heads, num_kv_heads, head_dim = self.sizes
        for layer, qkv in enumerate(self.qkv):
            q, k, v = (
                qkv(x)
                .unflatten(1, (-1, head_dim))
                .split((num_heads, num_kv_heads, num_kv_heads), 1)
            )
            key_cache, value_cache = self.caches[layer]
            reshape_and_cache(k, v, key_cache, value_cache, slot_mapping)
            out = paged_attention(
                q, key_cache, value_cache, block_table, seq_lens, max_seq_len=max_seq_len
            )
            x = x + out.flatten(1)
        return x


def steps(batch_sizes, seq_len=6):
    for i, batch_size in enumerate(batch_sizes):
        block_table = torch.randperm(16)[: 3 * batch_size].view(batch_size, 3)
        position = seq_len - 1
        slots = block_table[:, position // 4] * 4 + position % 4
        x = torch.randn(batch_size, 32)
        yield x, slots, block_table, torch.full((batch_size,), seq_len), seq_len + i % 3


@quiet
@pytest.mark.parametrize("graph_backend", GRAPH_BACKENDS)
def test_compiled_layers_match_eager_at_every_batch_size_without_graph_breaks(graph_backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, traced = Attention(), Attention()
    traced.load_state_dict(eager.state_dict())
    counter = CompileCounterWithBackend(graph_backend)
    compiled = torch.compile(traced, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for arguments in steps([2, 5, 3, 4]):
            torch.testing.assert_close(compiled(*arguments), eager(*arguments))
            torch.testing.assert_close(traced.caches, eager.caches)
    assert traced.caches.count_nonzero() > 0
    assert counter.frame_count == 1, "another batch size compiled anew"


@quiet
def test_a_compiled_call_honours_out_return_lse_and_both_kinds_of_scale():
    torch._dynamo.reset()
    query, key, value = torch.randn(3, 2, 2, 8).unbind()
    table, lens, slots = torch.tensor([[1], [2]]), torch.tensor([1, 1]), torch.tensor([16, 32])

    def step(caches, out):
        k, v, k_scale, v_scale = caches
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        reshape_and_cache(key, value, k, v, slots, **scales)
        return paged_attention(query, k, v, table, lens, **scales, out=out, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for caches in (fp8_caches, int8_caches):
        sides = [tuple(caches().values()) for _ in range(2)]
        outs = [torch.zeros(2, 2, 8) for _ in range(2)]
        eager_out, eager_lse = step(sides[0], outs[0])
        out, lse = compiled(sides[1], outs[1])
        assert torch.equal(out, eager_out) and torch.equal(outs[1], eager_out)
        assert torch.equal(lse, eager_lse) and lse.isfinite().all()
        for left, right in zip(*sides, strict=True):
            if isinstance(left, torch.Tensor):
                assert torch.equal(left.float(), right.float())


@pytest.mark.parametrize("traced", [False, True])
def test_a_tensor_that_requires_grad_is_refused_traced_or_not(traced):
    batch = make_batch([5])
    call = partial(paged_attention, **{**batch.arguments(), "query": None})
    query = batch.query.clone().requires_grad_()
    if traced:
        query = nn.Parameter(query.detach())
    with pytest.raises(ValueError, match="query must not require grad"):
        call(query=query)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors_get_the_shapes_and_dtypes_of_the_result(device):
    with FakeTensorMode():
        query = torch.empty(3, 4, 8, dtype=torch.bfloat16, device=device)
        key_cache, value_cache = query.new_empty(5, 16, 2, 8), query.new_empty(5, 16, 2, 6)
        table, lens = (query.new_empty(shape, dtype=torch.int32) for shape in ((3, 2), (3,)))
        out, lse = paged_attention(query, key_cache, value_cache, table, lens, return_lse=True)
        reshape_and_cache(query[:, :2], query[:, :2, :6], key_cache, value_cache, lens)
    assert out.shape == (3, 4, 6) and out.dtype == torch.bfloat16
    assert lse.shape == (3, 4) and lse.dtype == torch.float32
    assert out.device.type == lse.device.type == device


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("query_len", [1, 3])
def test_planning_a_call_reads_no_value_off_the_device(query_len, num_splits):
    # A meta tensor has no values: reading one raises here, and breaks a CUDA graph's capture there.
    query = torch.zeros(3 * query_len, 4, 16, device="meta")
    key_cache, value_cache = torch.zeros(2, 5, 16, 2, 16, device="meta").unbind()
    seq_lens = torch.zeros(3, dtype=torch.int32, device="meta")
    packed = {"cu_seqlens_q": seq_lens.new_zeros(4), "max_query_len": query_len}
    call = validated_call(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=seq_lens.new_zeros(3, 2),
        seq_lens=seq_lens,
        max_seq_len=32,
        num_splits=num_splits,
        return_lse=True,
        **(packed if query_len > 1 else {}),
    )
    assert len(plan(call)) == (1 if num_splits == 1 else 2)
    assert plan_write(query[:, :2], query[:, :2], key_cache, value_cache, seq_lens).grid[0] == 3
