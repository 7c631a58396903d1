"""What eviction policies find again, against the size of the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .style import HEADROOM, OWNER_COLOURS, FilePath, curve_style, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTIMUM = "optimum"


def hits_against_pool_size(
    rows: Sequence[Mapping[str, int]],
    *,
    prompt_tokens: int,
    title: str | None = None,
    path: FilePath | None = None,
) -> Figure:
    """Share of the prompt tokens that each policy finds in the cache; the optimum is the black line.

    rows: one mapping per pool size: `pool_tokens`, `optimum`, and hit tokens under the name of each
        policy.
    Raises ValueError without rows, or when one lacks what another has.
    """
    names = list(rows[0]) if rows else []
    if not {"pool_tokens", OPTIMUM} <= set(names) or any(set(row) != set(names) for row in rows):
        raise ValueError(
            "rows must hold a mapping per pool size, with pool_tokens, optimum and the same"
            f" policies; got {list(rows)}"
        )
    ordered = sorted(rows, key=lambda row: row["pool_tokens"])
    sizes = [row["pool_tokens"] for row in ordered]
    figure = new_figure(8, 4.2)
    axes = figure.add_subplot()
    policies = [name for name in names if name not in ("pool_tokens", OPTIMUM)]
    for position, name in enumerate([OPTIMUM, *policies]):
        is_optimum = name == OPTIMUM
        axes.plot(
            sizes,
            [100 * row[name] / prompt_tokens for row in ordered],
            color="black" if is_optimum else OWNER_COLOURS[(position - 1) % len(OWNER_COLOURS)],
            **curve_style(position),
            label="optimum, which knows the future" if is_optimum else name.replace("_", " "),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="pool, tokens", ylabel="prompt tokens found, %", title=title or "")
    highest = max(row[name] for row in rows for name in (OPTIMUM, *policies))
    axes.set_ylim(0, HEADROOM * 100 * highest / prompt_tokens or 1)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.legend(frameon=False)
    return saved(figure, path)
