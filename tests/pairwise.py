"""A few cases in place of the full product: every allowed pair of settings occurs in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    allowed: Callable[[Case], bool] = lambda case: True,
    triples: Sequence[tuple[str, str, str]] = (),
    seed: int = 0,
) -> list[Case]:
    """Cases that cover all pairs of settings, and all settings of the factors in `triples`.

    Greedy, as in Cohen et al. 1997, "The AETG System": each case starts from something uncovered
    and takes, factor by factor, the setting that covers most of what is left. `allowed` judges a
    partial case, by the factors that it has. The same seed gives the same cases.
    """
    generator = random.Random(seed)
    groups = [*itertools.combinations(factors, 2), *triples]
    missing = {
        (group, settings)
        for group in groups
        for settings in itertools.product(*(range(len(factors[name])) for name in group))
        if allowed(_settings(factors, dict(zip(group, settings, strict=True))))
    }
    cases = []
    while missing:
        group, settings = min(missing)
        chosen = dict(zip(group, settings, strict=True))
        others = [name for name in factors if name not in chosen]
        generator.shuffle(others)
        for name in others:
            chosen[name] = _best(factors, groups, missing, chosen, name, allowed, generator)
        covered = {(group, tuple(chosen[name] for name in group)) for group in groups}
        missing -= covered
        cases.append(_settings(factors, {name: chosen[name] for name in factors}))
    return cases


def _best(factors, groups, missing, chosen, name, allowed, generator):
    """The setting of `name` that covers most with what is chosen; at random among equals."""
    related = [
        group for group in groups if name in group and all(n == name or n in chosen for n in group)
    ]
    options = []
    for setting in range(len(factors[name])):
        trial = {**chosen, name: setting}
        if allowed(_settings(factors, trial)):
            gain = sum((group, tuple(trial[n] for n in group)) in missing for group in related)
            options.append((gain, generator.random(), setting))
    return max(options)[2]


def _settings(factors, indices):
    return {name: factors[name][index] for name, index in indices.items()}
