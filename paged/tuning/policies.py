"""How good a cache's choice is: hits of eviction policies on a trace, beside the offline optimum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paged.config import check_int
from paged.sequence import as_list
from paged.trace import HASH_BLOCK_TOKENS

from .eviction import POLICIES, Policy, Prompts, count_hits, optimum
from .prefixes import hit_tokens, shared_prefixes
from .tables import text_table
from .traffic import Traffic, TuningError, as_requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paged.plots.style import FilePath

RESERVED = ("optimum", "pool_tokens")  # names in the tables beside the policies'
POOL_TOKENS = (131_072, 524_288, 2_097_152)


@dataclass(frozen=True)
class PoolHits:
    """What each policy finds in a pool of one size, in tokens. Prompts beyond the pool are left out."""

    pool_tokens: int
    prompt_tokens: int  # of the prompts that fit
    left_out: int  # prompts
    hits: dict[str, int]
    optimum: int

    def share_of_optimum(self, policy: str) -> float:
        """Hits of a policy over those of the optimum, 0..1; 1 when there is nothing to find."""
        return self.hits[policy] / self.optimum if self.optimum else 1.0


@dataclass(frozen=True)
class PolicyComparison:
    """The answer of `compare_policies`; lengths in tokens.

    shared_tokens  what a pool without a limit finds
    best           the policy with the most hits over all pools together
    """

    requests: int
    prompt_tokens: int
    shared_tokens: int
    block_size: int
    pools: tuple[PoolHits, ...]
    best: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def plot(self, path: FilePath | None = None) -> Figure:
        """Hits against the size of the pool, the optimum on top."""
        from paged.plots.policies import hits_against_pool_size

        return hits_against_pool_size(
            [
                {"pool_tokens": pool.pool_tokens, "optimum": pool.optimum, **pool.hits}
                for pool in self.pools
            ],
            prompt_tokens=self.prompt_tokens,
            path=path,
        )

    def __str__(self) -> str:
        rows = [
            [
                f"{pool.pool_tokens:,}",
                f"{pool.optimum / self.prompt_tokens:.1%}",
                *(f"{hits / self.prompt_tokens:.1%}" for hits in pool.hits.values()),
            ]
            for pool in self.pools
        ]
        return "\n".join(
            [
                text_table(["pool, tokens", "optimum", *self.pools[0].hits], rows),
                f"of {self.prompt_tokens:,} prompt tokens; without a limit"
                f" {self.shared_tokens / self.prompt_tokens:.1%} could hit."
                f" Most hits in all: {self.best}",
            ]
        )


def compare_policies(
    trace: Traffic,
    policies: Mapping[str, Policy] | Iterable[Policy] | None = None,
    *,
    pool_tokens: Sequence[int] = POOL_TOKENS,
    max_cached_tokens: int | None = None,
    block_size: int = HASH_BLOCK_TOKENS,
    limit: int | None = None,
    progress: bool = False,
) -> PolicyComparison:
    """Hit tokens of each policy at each pool size, and of the optimum, which knows the future.

    trace: requests with hash_ids. They run one after the other: admitted, computed, freed.
    policies: functions of a `CachedBlock` by name, or any functions, which have names; None: all of
        `POLICIES`. See `paged.tuning.eviction` for how they read. A manager's `eviction_policy` is
        of another kind: it is given all cached blocks and names the one to forget, see
        `PrefixCachingBlockAllocator` for how a value like this becomes one.
    max_cached_tokens: most tokens kept while nothing runs (the manager's `max_cached_blocks`).
    block_size: a divisor of 512, the tokens of one hash id. Smaller blocks change hits by less than
        a tenth of a percent on Mooncake's trace and take 512 / block_size times as long.
    TuningError for a trace without hash_ids.
    """
    from tqdm import tqdm

    named = _named(policies)
    check_int("block_size", block_size, minimum=1)
    pool_tokens = as_list("pool_tokens", pool_tokens, "ints")
    if not pool_tokens:
        raise TuningError("pool_tokens is empty; it must hold the size of a pool in tokens")
    for size in pool_tokens:
        check_int("pool_tokens", size, minimum=block_size)
    check_int("max_cached_tokens", max_cached_tokens, minimum=0, optional=True)
    requests = as_requests(trace, limit=limit)
    prompts = Prompts(requests, block_size)
    most = None if max_cached_tokens is None else max_cached_tokens // block_size

    pools = []
    with tqdm(total=len(pool_tokens) * (len(named) + 1), disable=not progress) as bar:
        for size in sorted(pool_tokens):
            fitting = [
                length
                for length in prompts.lengths
                if -(-length // block_size) <= size // block_size
            ]
            found = {}
            for name, policy in [*named.items(), (None, optimum)]:
                bar.set_description(f"{size:,} tokens, {name or 'optimum'}")
                found[name] = count_hits(prompts, policy, size // block_size, most)
                bar.update()
            best_possible = found.pop(None)
            hits = {name: number for name, number in found.items() if name is not None}
            left_out = len(requests) - len(fitting)
            pools.append(PoolHits(size, sum(fitting), left_out, hits, best_possible))
    return PolicyComparison(
        requests=len(requests),
        prompt_tokens=sum(prompts.lengths),
        shared_tokens=hit_tokens(requests, shared_prefixes(requests), block_size),
        block_size=block_size,
        pools=tuple(pools),
        best=max(named, key=lambda name: sum(pool.hits[name] for pool in pools)),
    )


def _named(policies: Mapping[str, Policy] | Iterable[Policy] | None) -> dict[str, Policy]:
    if policies is None:
        return dict(POLICIES)
    if isinstance(policies, Mapping):
        named = dict(policies)
    else:
        listed = as_list("policies", policies, "functions of a block")
        named = {getattr(policy, "__name__", type(policy).__name__): policy for policy in listed}
        if len(named) < len(listed):
            raise TuningError(f"policies have equal names: {', '.join(named)}; give a dict instead")
    for name, policy in named.items():
        if not isinstance(name, str) or name in RESERVED:
            raise TuningError(
                f"policies has the name {name!r}; it must be a string, and none of"
                f" {', '.join(RESERVED)}"
            )
        if not callable(policy):
            raise TypeError(f"policies[{name!r}] is {policy!r}; it must be a function of a block")
    if not named:
        raise TuningError("policies is empty; it must hold a function of a block")
    return named
