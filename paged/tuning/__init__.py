"""Answers for a traffic of your own: which block size, what paging costs and saves, how it runs.

    from paged import tuning

    sweep = tuning.sweep_block_sizes("trace.jsonl")
    print(sweep.recommendation)

Each function takes a trace file, requests or bare lengths, and returns a frozen dataclass with
`to_dict()` and `plot()`. `python -m paged tune` and `python -m paged compare` ask the same.
"""

from .attention import AttentionShape
from .block_size_report import BlockSizeRow, BlockSizeSweep
from .block_sizes import BLOCK_SIZES, sweep_block_sizes
from .choice import Candidate, Recommendation, recommend
from .dense import compare_with_dense
from .dense_report import AttentionTime, DenseComparison
from .eviction import (
    POLICIES,
    CachedBlock,
    Policy,
    fifo,
    largest_first,
    lfu,
    lru,
    optimum,
    reused_last,
)
from .policies import POOL_TOKENS, PolicyComparison, PoolHits, compare_policies
from .prefixes import expected_loss, hit_tokens, shared_prefixes
from .replay_report import ReplayReport
from .replaying import Replay, replay
from .reservation import Reservation, reservations
from .timing import Ratio, lower_quartile, ratio, time_in_turns
from .traffic import Traffic, TuningError, as_requests
from .waste import Slots, slots_at_end, slots_over_life

__all__ = [
    "BLOCK_SIZES",
    "POLICIES",
    "POOL_TOKENS",
    "AttentionShape",
    "AttentionTime",
    "BlockSizeRow",
    "BlockSizeSweep",
    "CachedBlock",
    "Candidate",
    "DenseComparison",
    "Policy",
    "PolicyComparison",
    "PoolHits",
    "Ratio",
    "Recommendation",
    "Replay",
    "ReplayReport",
    "Reservation",
    "Slots",
    "Traffic",
    "TuningError",
    "as_requests",
    "compare_policies",
    "compare_with_dense",
    "expected_loss",
    "fifo",
    "hit_tokens",
    "largest_first",
    "lfu",
    "lower_quartile",
    "lru",
    "optimum",
    "ratio",
    "recommend",
    "replay",
    "reservations",
    "reused_last",
    "shared_prefixes",
    "slots_at_end",
    "slots_over_life",
    "sweep_block_sizes",
    "time_in_turns",
]
