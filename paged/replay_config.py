"""What a replay is asked to do, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from paged.config import check_int, check_threads
from paged.errors import PagedError
from paged.trace import Request

# The largest difference from float64 that is rounding: outputs are averages of standard normals.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}


class ReplayError(PagedError, ValueError):
    """A replay that cannot be run as asked; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """The pool, the shape of the attention and the load. Lengths in tokens."""

    max_length: int = 2048  # prompt and output together; longer requests are clipped
    block_size: int = 16
    num_blocks: int | None = None  # None: see `pool_size`
    num_cpu_blocks: int = 0  # to swap to when the pool is full; 0: compute again later
    max_num_seqs: int = 16  # running at once
    max_num_batched_tokens: int = 2048  # computed in a step; longer prompts take several
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 1
    dtype: str = "float32"
    backend: str | None = None  # None: triton on a GPU, torch on a CPU
    device: str = "cpu"
    prefix_cache: bool = True
    threads: int = 1  # of torch; more only pay on an idle machine
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("max_length", self.max_length, minimum=2)
        check_int("block_size", self.block_size, minimum=1)
        check_int("num_blocks", self.num_blocks, minimum=1, optional=True)
        check_int("num_cpu_blocks", self.num_cpu_blocks, minimum=0)
        check_int("max_num_seqs", self.max_num_seqs, minimum=1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1)
        check_int("heads", self.heads, minimum=1)
        check_int("kv_heads", self.kv_heads, minimum=1)
        check_int("head_dim", self.head_dim, minimum=1)
        check_int("layers", self.layers, minimum=1)
        check_threads(self.threads)
        check_int("seed", self.seed, minimum=0)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}; it must be a multiple of kv_heads, which is {self.kv_heads}"
            )
        if self.dtype not in TOLERANCES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(TOLERANCES)}")


def final_length(request: Request) -> int:
    """Tokens in the cache when a request ends: the last one it generates is never written."""
    return request.prompt_len + max(request.output_len - 1, 0)


def pool_size(requests: list[Request], config: ReplayConfig) -> int:
    """Blocks of the pool: `num_blocks`, or half of what `max_num_seqs` longest requests would take.

    Raises ReplayError when the longest request does not fit even alone.
    """
    needed = [-(-final_length(request) // config.block_size) for request in requests]
    longest = max(needed)
    num_blocks = config.num_blocks or longest * max(config.max_num_seqs // 2, 1)
    if longest > num_blocks:
        index = needed.index(longest)
        request = requests[index]
        raise ReplayError(
            f"request {index} ({request.prompt_len:,} prompt tokens, {request.output_len:,} to"
            f" generate) needs {longest:,} blocks of {config.block_size} tokens and can never fit"
            f" into {num_blocks:,}: raise num_blocks or lower max_length"
        )
    return num_blocks
