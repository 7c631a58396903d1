"""What the Triton backend launches: its own kernels, on legal grids, and nothing when idle."""

import ast
import os
from pathlib import Path

import paged_kernels
import pytest
import torch
from paged_kernels import reshape_and_cache
from paged_kernels._launch import recorded
from paged_kernels.testing import make_batch, validated_call
from paged_kernels.triton_backend import plan, plan_write

SOURCES = sorted(Path(paged_kernels.__file__).parent.glob("*.py"))


def test_triton_results_come_from_triton_kernels(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch's own attention was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    batch = make_batch([5, 40], [2, 30])
    for options in ({}, {"cu_seqlens_q": None, "query": batch.query[:2]}, {"num_splits": 3}):
        with recorded() as launches:
            batch.attend(**options, backend="triton")
        assert len(launches) >= 1
    with recorded() as launches:
        reshape_and_cache(
            batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slots,
            backend="triton",
        )  # fmt: skip
    assert len(launches) == 1


def test_a_split_decode_attends_and_then_merges():
    batch = make_batch([200, 64], num_heads=2, num_kv_heads=1)
    with recorded() as launches:
        batch.attend(num_splits=1, backend="triton")
    assert [launch.kernel.fn.__name__ for launch in launches] == ["attention_kernel"]
    with recorded() as launches:
        batch.attend(num_splits=2, backend="triton")
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == ["attention_kernel", "merge_kernel"]


def test_nothing_is_launched_for_nothing():
    cache = torch.zeros(2, 16, 2, 16)
    rows = torch.zeros(0, 2, 16)
    with recorded() as launches:
        make_batch([]).attend(backend="triton")
        make_batch([], [], padding_rows=3).attend(backend="triton")
        make_batch([5], [0]).attend(backend="triton")
        reshape_and_cache(
            rows, rows, cache, cache, torch.zeros(0, dtype=torch.int64), backend="triton"
        )
    assert launches == []


def meta_call(num_seqs, query_len, num_heads, **options):
    """A call on tensors without memory, so that only its launches are planned."""

    def empty(*shape, dtype=torch.float16):
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = empty(64, 16, num_heads, 16)
    starts = empty(num_seqs + 1, dtype=torch.int32) if query_len > 1 else None
    return validated_call(
        query=empty(num_seqs * query_len, num_heads, 16),
        key_cache=cache,
        value_cache=cache,
        block_table=empty(num_seqs, 64, dtype=torch.int32),
        seq_lens=empty(num_seqs, dtype=torch.int32),
        cu_seqlens_q=starts,
        **options,
    )


@pytest.mark.parametrize(
    ("num_seqs", "query_len", "num_heads", "options"),
    [
        (1, 65_536, 1, {}),
        (70_000, 1, 1, {}),
        (8_192, 1, 64, {}),
        (8_192, 1, 64, {"num_splits": 16}),
        (8_192, 8, 64, {"num_splits": 2}),
        (70_000, 1, 2, {"common_prefix_len": 512}),
        (1, 1, 8, {"split_size": 16}),
    ],
)
def test_only_the_first_grid_axis_grows_without_bound(num_seqs, query_len, num_heads, options):
    launches = plan(meta_call(num_seqs, query_len, num_heads, **options))
    assert launches
    for launch in launches:
        first, *others = launch.grid
        assert 0 < first < 2**31
        assert all(0 < size <= 65_535 for size in others), launch.grid


def test_a_long_write_has_a_legal_grid():
    rows = torch.empty(65_536, 1, 16, device="meta")
    cache = torch.empty(4096, 16, 1, 16, device="meta")
    slots = torch.empty(65_536, dtype=torch.int64, device="meta")
    launch = plan_write(rows, rows, cache, cache, slots)
    assert all(size <= 65_535 for size in launch.grid[1:]), launch.grid


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"common_prefix_len": 64}])
@pytest.mark.parametrize("query_lens", [None, [1, 9]])
def test_the_order_of_programs_does_not_matter(monkeypatch, options, query_lens):
    # On a GPU they run at once; here they run one after another, so try the other way round.
    from triton.runtime import interpreter

    batch = make_batch([70, 90], query_lens, shared_blocks=4, num_heads=3, num_kv_heads=1)
    want = batch.attend(**options, return_lse=True, backend="triton")

    turned = []

    def backwards(*bounds):
        if len(bounds) > 1:  # a loop of the kernel, not an axis of the grid
            return range(*bounds)
        turned.append(bounds[0])
        return reversed(range(bounds[0]))

    monkeypatch.setattr(interpreter, "range", backwards, raising=False)
    got = batch.attend(**options, return_lse=True, backend="triton")
    assert max(turned) > 1
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def calls(function_name):
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function_name:
                yield source.name, node


def test_every_dot_says_how_precise_it_is():
    dots = list(calls("tl.dot"))
    assert dots
    for name, node in dots:
        keywords = {keyword.arg for keyword in node.keywords}
        assert "input_precision" in keywords, f"{name}:{node.lineno}"


def test_nothing_is_tuned_at_call_time():
    text = "".join(source.read_text() for source in SOURCES)
    assert "do_bench" not in text and "autotune" not in text


def test_no_kernel_uses_what_triton_is_removing():
    text = "".join(source.read_text() for source in SOURCES)
    assert "make_block_ptr" not in text and "tl.advance" not in text


def test_each_worker_has_a_kernel_cache_of_its_own():
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    assert os.environ["TRITON_CACHE_DIR"].endswith(worker)
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_splits_stay_on_the_grid():
    batch = make_batch([40], num_heads=2, num_kv_heads=1)
    table = batch.block_table[:, :1].expand(1, 2**17)  # of 2^21 tokens
    arguments = {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": table.contiguous(),
        "seq_lens": batch.seq_lens,
    }
    attention, _ = plan(validated_call(**arguments, num_splits=100_000))
    assert attention.grid[2] <= 65_535
    with pytest.raises(ValueError, match="split_size must give at most 65535 splits, got 16"):
        plan(validated_call(**arguments, split_size=16))
    assert plan(validated_call(**arguments, split_size=16, max_seq_len=40))[0].grid[2] == 3
