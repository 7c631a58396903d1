"""Random batches and options against the reference: what the matrix did not think of."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from paged_kernels.testing import assert_matches_reference, make_batch

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), min_size=1, max_size=4)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "sliding_window": st.integers(1, 50),
        "softcap": st.floats(0.1, 50),
        "scale": st.floats(0.01, 0.5),
        "alibi_slopes": st.just(torch.tensor([0.5, 0.25])),
        "sinks": st.just(torch.tensor([-1.0, 2.0])),
    },
)
SPLITS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"num_splits": st.integers(1, 20)}),
    st.fixed_dictionaries({"split_size": st.integers(1, 50)}),
)
SHAPES = st.fixed_dictionaries(
    {
        "num_heads": st.just(2),
        "num_kv_heads": st.sampled_from([1, 2]),
        "block_size": st.integers(1, 20),
        "head_dim": st.integers(1, 33),
        "seed": st.integers(0, 99),
    }
)
CASES = st.tuples(LENGTHS, st.booleans(), SHAPES, OPTIONS, SPLITS)


def check(backend, case):
    lengths, decode, shapes, options, splits = case
    seq_lens = [seq_len for seq_len, _ in lengths]
    query_lens = None if decode else [query_len for _, query_len in lengths]
    batch = make_batch(seq_lens, query_lens, **shapes)
    assert_matches_reference(batch, backend, **options, **splits)


@given(CASES)
@settings(max_examples=150)
def test_torch_matches_the_reference(case):
    check("torch", case)


@given(CASES)
@settings(max_examples=25, phases=[Phase.generate])  # too slow to search for a smaller case
def test_triton_matches_the_reference(case):
    check("triton", case)
