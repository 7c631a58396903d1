"""Every backend against the float64 reference, over all pairs of options, dtypes and sizes.

The caches are poisoned and guarded, the blocks lie at random places, the tables end in garbage.
"""

import itertools

import pytest
from attention_cases import BACKENDS, OPTIONS, PHASES, batch_of, is_on, matrix
from paged_kernels.testing import assert_matches_reference


def name(case):
    on = [option for option in OPTIONS if is_on(case, option)]
    dtype = str(case["dtype"]).removeprefix("torch.")
    dims = "x".join(map(str, case["head dims"]))
    return (
        f"{case['phase']}-{dtype}-{dims}-g{case['group_size']}-b{case['block_size']}-{'+'.join(on)}"
    )


@pytest.mark.parametrize("case", matrix(), ids=name)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_backend_matches_the_reference(backend, case):
    batch, options = batch_of(case)
    assert_matches_reference(batch, backend, **options)


def test_the_matrix_holds_every_pair_of_options_in_every_phase():
    missing = [
        (phase, *pair)
        for phase in PHASES
        for pair in itertools.combinations(OPTIONS, 2)
        if not any(
            case["phase"] == phase and all(is_on(case, option) for option in pair)
            for case in matrix()
        )
    ]
    assert missing == []
