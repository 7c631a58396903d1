"""Every backend against the float64 reference, over all pairs of options, dtypes and sizes.

The caches are poisoned and guarded, the blocks lie at random places, the tables end in garbage.
"""

import itertools

import pytest
from attention_cases import BACKENDS, OPTIONS, PHASES, batch_of, is_on, matrix, refuses
from paged_kernels.testing import assert_matches_reference


def name(case):
    on = [option for option in OPTIONS if is_on(case, option)]
    dtype = str(case["dtype"]).removeprefix("torch.")
    dims = "x".join(map(str, case["head dims"]))
    return (
        f"{case['phase']}-{dtype}-{dims}-g{case['group_size']}-b{case['block_size']}-{'+'.join(on)}"
    )


CASES = [(backend, case) for backend in BACKENDS[1:] for case in matrix(backend)]
REFUSED = [
    (backend, option, phase)
    for backend in BACKENDS
    for option in OPTIONS
    for phase in PHASES
    if refuses(backend, option)
]


@pytest.mark.parametrize(
    ("backend", "case"), CASES, ids=[f"{backend}-{name(case)}" for backend, case in CASES]
)
def test_backend_matches_the_reference(backend, case):
    batch, options = batch_of(case)
    assert_matches_reference(batch, backend, **options)


@pytest.mark.parametrize(("backend", "option", "phase"), REFUSED)
def test_backend_refuses_what_it_cannot_honour(backend, option, phase):
    like = next(case for case in matrix(backend) if case["phase"] == phase)
    for setting in OPTIONS[option][1:]:
        batch, options = batch_of({**like, option: setting})
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot honour a {option}"):
            batch.attend(**options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_matrix_holds_every_pair_of_options_in_every_phase(backend):
    served = [option for option in OPTIONS if not refuses(backend, option)]
    missing = [
        (phase, *pair)
        for phase in PHASES
        for pair in itertools.combinations(served, 2)
        if not any(
            case["phase"] == phase and all(is_on(case, option) for option in pair)
            for case in matrix(backend)
        )
    ]
    assert missing == []
