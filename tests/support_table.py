"""The README's table of what works where, from the lists that the tests run over.

`python tests/support_table.py` prints it. A cell says that the matrix, which runs on every backend,
holds a case that turns the option on in that phase.
"""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import BACKENDS, DTYPES, OPTIONS, PHASES, SIZES, matrix

TITLES = {"causal": "`causal=False`", "return_lse": "`return_lse=True`"}


def support_table() -> str:
    """The table and its legend, as Markdown."""
    header = ["option", *PHASES, "dtypes"]
    rows = [header, ["---"] * len(header)]
    for option, (_, *settings) in OPTIONS.items():
        if option == "quantised cache":
            rows += [_row(f"{_name(dtype)} cache", option, [dtype]) for dtype in settings]
        else:
            rows.append(_row(TITLES.get(option, f"`{option}`"), option, settings))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", _legend()])


def _row(title: str, option: str, settings: list[Any]) -> list[str]:
    cases = [case for case in matrix() if case[option] in settings]
    phases = {case["phase"] for case in cases}
    dtypes = {case["dtype"] for case in cases}
    return [
        title,
        *("all backends" if phase in phases else "not tested" for phase in PHASES),
        ", ".join(_name(dtype) for dtype in DTYPES if dtype in dtypes),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _legend() -> str:
    widths = [max(widths) for widths in SIZES["head dims"]]
    groups, blocks = SIZES["group_size"], SIZES["block_size"]
    return (
        f"Tested means: in all pairs with the other options, over head dims {min(widths)} to "
        f"{max(widths)} (V's own too), {groups[0]} to {groups[-1]} query heads per KV head, block "
        f"sizes {blocks[0]} to {blocks[-1]} and {len(SIZES['layout'])} memory layouts "
        f"({len(matrix())} cases on each of {' and '.join(BACKENDS[1:])}), against the float64 "
        "reference, in poisoned caches with garbage in every table tail; triton in the "
        "interpreter, and compiled ahead of time for sm_80, sm_90, sm_100 and gfx942. `num_splits` "
        "and `split_size` make the split decode. What a backend cannot honour raises ValueError."
    )


if __name__ == "__main__":
    print(support_table())
