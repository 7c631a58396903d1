"""What must not matter does not change a single bit."""

import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import paged_attention
from paged_kernels.testing import make_batch

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

HEADS = {"num_heads": 2, "num_kv_heads": 1}  # few: the interpreter takes its time per head
SEQ_LENS = [5, 40, 0, 17, 64, 1]
QUERY_LENS = {"decode": None, "prefill": [5, 9, 0, 17, 3, 1]}
SPLITS = {
    "unsplit": {"num_splits": 1},
    "4 splits": {"num_splits": 4},
    "splits of 16": {"split_size": 16},
}
OPTIONS = {
    "plain": {},
    "all": {
        "sliding_window": 20,
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.1, 1.0]),
        "sinks": torch.tensor([-1.0, 2.0]),
    },
}


def parametrised(**choices):
    def decorate(function):
        for name, values in choices.items():
            function = pytest.mark.parametrize(name, values)(function)
        return function

    return decorate


def attend(batch, backend, **options):
    return batch.attend(**options, return_lse=True, backend=backend)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), f"differs by up to {(a - b).abs().nan_to_num().max()}"


@parametrised(phase=QUERY_LENS, splits=SPLITS, options=OPTIONS)
def test_physical_places_do_not_matter(backend, phase, splits, options):
    batch = make_batch(SEQ_LENS, QUERY_LENS[phase], block_size=4, **HEADS)
    options = {**OPTIONS[options], **SPLITS[splits]}
    want = attend(batch, backend, **options)
    assert_same_bits(attend(batch.relabelled(), backend, **options), want)


@parametrised(phase=QUERY_LENS, splits=SPLITS, options=OPTIONS)
def test_rows_follow_their_sequence_when_the_batch_is_reordered(backend, phase, splits, options):
    batch = make_batch(SEQ_LENS, QUERY_LENS[phase], **HEADS)
    options = {**OPTIONS[options], **SPLITS[splits]}
    out, lse = attend(batch, backend, **options)
    order = [3, 0, 5, 4, 2, 1]
    starts = torch.tensor([0, *(QUERY_LENS[phase] or [1] * 6)]).cumsum(0)
    rows = torch.cat([torch.arange(starts[seq], starts[seq + 1]) for seq in order])
    got = attend(batch.rows(order), backend, **options)
    assert_same_bits(got, (out[rows], lse[rows]))


@parametrised(splits=SPLITS, phase=QUERY_LENS)
def test_a_row_does_not_depend_on_its_batch_mates(backend, splits, phase):
    mates = [3, 70, 17, 64, 20, 1, 33, 40]
    query_lens = None if phase == "decode" else [3, 2, 17, 7, 1, 1, 20, 1]
    batch = make_batch(mates, query_lens, **HEADS)
    options = {"sinks": torch.tensor([-1.0, 2.0]), **SPLITS[splits]}
    for seq, at in ((0, 7), (6, 2)):
        alone = attend(batch.rows([seq]), backend, **options)
        others = [other for other in range(8) if other != seq]
        order = [*others[:at], seq, *others[at:]]
        lens = [1 if query_lens is None else query_lens[other] for other in order]
        first = sum(lens[:at])
        mine = slice(first, first + lens[at])
        out, lse = attend(batch.rows(order), backend, **options)
        assert_same_bits((out[mine], lse[mine]), alone)
        # Nor on a table that is wider than need be, or on a longer bound.
        hinted = attend(batch.rows([seq]), backend, max_seq_len=mates[seq], **options)
        assert_same_bits(hinted, alone)


@parametrised(layout=["hnd", "interleaved", "packed"], phase=QUERY_LENS)
def test_strides_do_not_matter(backend, layout, phase):
    batch = make_batch(SEQ_LENS, QUERY_LENS[phase], layout=layout, fused_query=True)
    arguments = batch.arguments(num_splits=1, backend=backend)
    want = paged_attention(**arguments)
    for name in ("query", "key_cache", "value_cache"):
        assert not arguments[name].is_contiguous()
        arguments[name] = arguments[name].contiguous()
    torch.testing.assert_close(paged_attention(**arguments), want, rtol=1e-6, atol=1e-6)


@parametrised(phase=QUERY_LENS)
def test_slices_of_larger_buffers_give_the_same(backend, phase):
    # A manager keeps one wide table; slices of it, and of odd rows, start at any address.
    batch = make_batch(SEQ_LENS, QUERY_LENS[phase])
    want = attend(batch, backend, num_splits=1)
    arguments = batch.arguments(num_splits=1, return_lse=True, backend=backend)
    for name in ("block_table", "seq_lens", "cu_seqlens_q", "query"):
        tensor = arguments[name]
        if tensor is not None:
            wide = tensor.new_full([size + 3 for size in tensor.shape], -5)
            inner = wide[tuple(slice(1, size + 1) for size in tensor.shape)]
            arguments[name] = inner.copy_(tensor)
    assert arguments["block_table"].stride(0) > arguments["block_table"].shape[1]
    assert arguments["query"].data_ptr() % 16 != 0
    torch.testing.assert_close(paged_attention(**arguments), want, rtol=1e-6, atol=1e-6)


@parametrised(phase=QUERY_LENS)
def test_the_number_of_splits_changes_rounding_only(backend, phase):
    query_lens = None if phase == "decode" else [1, 2, 1, 30]
    batch = make_batch([1, 7, 17, 100], query_lens, **HEADS)
    want = attend(batch, backend, num_splits=1)
    for splits in ({"num_splits": n} for n in (2, 8, 64)):
        got = attend(batch, backend, **splits)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for splits in ({"split_size": n} for n in (1, 16, 40, 1000)):
        got = attend(batch, backend, **splits)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attend(batch, backend), want, rtol=1e-5, atol=1e-5)


def test_decode_is_a_prefill_of_one_token(backend):
    batch = make_batch([5, 40, 1])
    decode = batch.attend(backend=backend, num_splits=1)
    starts = torch.arange(4, dtype=torch.int32)
    prefill = batch.attend(cu_seqlens_q=starts, backend=backend, num_splits=1)
    torch.testing.assert_close(decode, prefill, rtol=1e-6, atol=1e-6)


def test_a_common_prefix_equals_the_plain_result(backend):
    for query_lens in (None, [1, 9, 4]):
        batch = make_batch([70, 90, 68], query_lens, shared_blocks=4)
        sinks = torch.linspace(-1, 2, 4)
        want = attend(batch, backend, sinks=sinks)
        got = attend(batch, backend, sinks=sinks, common_prefix_len=64)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@parametrised(splits=SPLITS)
def test_a_promised_prefix_keeps_rows_to_themselves(backend, splits):
    batch = make_batch([140, 133, 150], num_heads=4, num_kv_heads=2, shared_blocks=8)
    options = {"common_prefix_len": 128, **SPLITS[splits]}
    together = attend(batch, backend, **options)
    for row in range(3):
        alone = attend(batch.rows([row]), backend, **options)
        assert_same_bits(alone, [part[row : row + 1] for part in together])
