"""Arguments that pass every check of shape and dtype and still cannot be served: refused by name."""

import numpy as np
import pytest
import torch
from attention_cases import BACKENDS
from paged_kernels import KVCache, dense_attention, paged_attention
from paged_kernels.testing import make_batch

SIZES = {"num_layers": 2, "num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}


def attend(**changes):
    batch = make_batch([5, 9], [2, 3], head_dim=8)
    return paged_attention(**batch.arguments(**{"backend": "torch", **changes}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "strides", [(0, 8, 1), (8, 0, 1), (8, 8, 1), (36, 9, 0), (20, 8, 1)], ids=str
)
def test_an_output_that_overlaps_itself_is_refused(backend, strides):
    out = torch.zeros(200).as_strided((5, 4, 8), strides)
    with pytest.raises(ValueError, match=r"^out must have"):
        attend(out=out, backend=backend)
    assert not out.any()


@pytest.mark.parametrize("strides", [(32, 8, 1), (8, 40, 1), (64, 16, 1), (33, 8, 1)], ids=str)
def test_an_output_of_any_strides_without_overlap_is_filled(strides):
    out = torch.zeros(400).as_strided((5, 4, 8), strides)
    assert torch.equal(attend(out=out), attend())


@pytest.mark.parametrize(
    "name",
    ["sliding_window", "split_size", "num_splits", "max_query_len", "max_seq_len"],
)
def test_an_int_beyond_64_bits_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^{name} must be < 2\*\*63, got an int of 64 bits"):
        attend(**{name: 2**63})
    expected = attend()
    torch.testing.assert_close(attend(**{name: 2**63 - 1}), expected)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [10**400, 1e300, float("inf"), float("nan")], ids=str)
def test_a_number_that_float32_cannot_hold_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be finite in float32"):
        attend(**{name: value})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_softcap_may_be_an_int_of_any_size(backend):
    torch.testing.assert_close(attend(softcap=2**70, backend=backend), attend(softcap=float(2**70)))
    assert torch.equal(attend(softcap=2, backend=backend), attend(softcap=2.0, backend=backend))


@pytest.mark.parametrize(
    ("softcap", "error"), [("x", TypeError), (True, TypeError), (0, ValueError)]
)
def test_a_wrong_softcap_is_named_by_the_dense_side_too(softcap, error):
    query, key, lens = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), torch.tensor([0, 4])
    with pytest.raises(error, match=r"^softcap must be"):
        dense_attention(query, key, key, cu_seqlens_q=lens, cu_seqlens_k=lens, softcap=softcap)


def test_a_draft_mask_smaller_than_the_queries_is_named():
    with pytest.raises(ValueError, match=r"in 0\.\.2, what draft_mask of shape \[2, 2, 2\] allows"):
        attend(draft_mask=torch.ones(2, 2, 2, dtype=torch.bool), max_query_len=None)
    with pytest.raises(ValueError, match=r"in 0\.\.2, what max_query_len allows"):
        attend(draft_mask=torch.ones(2, 3, 3, dtype=torch.bool), max_query_len=2)


@pytest.mark.parametrize("backend", [np.array(["torch", "x"]), torch.zeros(2), ["torch"], 5])
def test_a_backend_of_another_kind_is_refused(backend):
    with pytest.raises(ValueError, match=r"^backend must be None or one of"):
        attend(backend=backend)


@pytest.mark.parametrize(
    ("device", "error"),
    [("foo", ValueError), ("cuda:99", ValueError), (None, TypeError), (1.5, TypeError)],
)
def test_a_cache_names_a_device_that_is_not_there(device, error):
    with pytest.raises(error, match=f"^device must be .*got {device!r}"):
        KVCache(**SIZES, dtype=torch.float32, device=device)


@pytest.mark.parametrize(
    ("layer", "error"), [(-1, ValueError), (2, ValueError), (True, TypeError), (None, TypeError)]
)
def test_a_cache_names_a_wrong_layer_and_writes_nothing(layer, error):
    cache = KVCache(**SIZES, dtype=torch.float32, device="cpu")
    batch = make_batch([5], [2], num_heads=2, num_kv_heads=2, head_dim=8)
    cache.key[1].zero_()
    rows = torch.ones(2, 2, 8)
    with pytest.raises(error, match=f"^layer must be .*got {layer}"):
        cache.write(layer, rows, rows, batch)
    with pytest.raises(error, match=f"^layer must be .*got {layer}"):
        cache.attend(layer, rows, batch)
    assert not cache.key[1].any()


def test_a_cache_names_what_is_no_batch():
    cache = KVCache(**SIZES, dtype=torch.float32, device="cpu")
    rows = torch.ones(2, 2, 8)
    with pytest.raises(TypeError, match=r"^batch must have the field \w+, got None"):
        cache.write(0, rows, rows, None)
    with pytest.raises(TypeError, match=r"^batch must have the field \w+, got None"):
        cache.attend(0, rows, None)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "out"])
def test_a_tensor_that_expects_a_gradient_is_refused_by_name(name):
    shape = (5, 4, 8) if name == "out" else (4,)
    with pytest.raises(ValueError, match=rf"^{name} must not require grad"):
        attend(**{name: torch.zeros(shape, requires_grad=True)})


def test_a_scale_that_expects_a_gradient_is_refused_by_name():
    batch = make_batch([5], head_dim=8)
    stored = batch.key_cache.to(torch.float8_e5m2), batch.value_cache.to(torch.float8_e5m2)
    scale = torch.ones(batch.key_cache.shape[2], requires_grad=True)
    with pytest.raises(ValueError, match=r"^v_scale must not require grad"):
        paged_attention(batch.query, *stored, batch.block_table, batch.seq_lens, v_scale=scale)
