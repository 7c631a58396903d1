"""The README's table of what works where, from the lists that the tests run over.

`python tests/support_table.py` prints it. A cell names the backends for which the matrix holds
a case that turns the option on in that phase, and those for which a test asks for the error.
"""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import BACKENDS, DTYPES, OPTIONS, PHASES, SIZES, matrix, refuses

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
    refusing = [backend for backend in BACKENDS if refuses(backend, option)]
    serving = [backend for backend in BACKENDS if backend not in refusing]
    tested = {
        backend: [case for case in _cases(backend) if case[option] in settings]
        for backend in serving
    }
    for phase in PHASES:
        for backend in serving:
            assert any(case["phase"] == phase for case in tested[backend]), (
                f"{title} in {phase} is served by {backend} and not tested"
            )
    cell = f"{', '.join(refusing)} raises" if refusing else "all backends"
    dtypes = [
        _name(dtype)
        for dtype in DTYPES
        if all(any(case["dtype"] == dtype for case in tested[backend]) for backend in serving)
    ]
    return [title, *[cell] * len(PHASES), ", ".join(dtypes)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cases(backend: str) -> list[dict]:
    # The reference is what the others are compared with: it runs the cases of both.
    return matrix("torch" if backend == "reference" else backend)


def _legend() -> str:
    counts = ", ".join(f"{len(matrix(backend))} cases on {backend}" for backend in BACKENDS[1:])
    widths = [max(widths) for widths in SIZES["head dims"]]
    groups, blocks = SIZES["group_size"], SIZES["block_size"]
    return (
        f"Tested means: in all pairs with the other options, over head dims {min(widths)} to "
        f"{max(widths)} (V's own too), {groups[0]} to {groups[-1]} query heads per KV head, block "
        f"sizes {blocks[0]} to {blocks[-1]} and {len(SIZES['layout'])} memory layouts ({counts}), "
        "against float64, in poisoned caches with garbage in every table tail; triton in the "
        "interpreter, and compiled ahead of time for sm_80, sm_90, sm_100 and gfx942. `num_splits` "
        "and `split_size` make the split decode. What a backend cannot honour raises ValueError."
    )


if __name__ == "__main__":
    print(support_table())
