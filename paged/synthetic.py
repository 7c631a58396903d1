"""A stand-in for a model: q, k and v of every token, attended to in pages and, to compare, densely.

The vectors of a token at a position are row `(A * token + B * position) mod ROWS` of seeded random
tables, three per layer. So K and V depend on (seed, layer, token, position) alone, and a token that
is found in the prefix cache, or computed again after a preemption, has the K and V it had before.
(A model's also depend on all tokens before it; an equal prefix keeps those equal.)
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from paged.config import block_bytes
from paged.replay_config import ReplayConfig, ReplayError
from paged.stopwatch import Stopwatch

if TYPE_CHECKING:
    from paged_kernels import KVCache
    from torch import Tensor

    from paged.batch import Batch
    from paged.scheduler_output import SchedulerOutput

ROWS, A, B = 4093, 7919, 104_729  # primes: neighbours in text or position get unlike rows
ROWS_CHECKED_PER_STEP = 2  # in every layer, against float64


class Layer(NamedTuple):
    """Tables of one layer: query [ROWS, num_heads, head_dim], key and value with KV heads."""

    query: Tensor
    key: Tensor
    value: Tensor


class SyntheticModel:
    """Runs the attention of a step in pages and densely, timed, and compares sampled rows."""

    def __init__(self, config: ReplayConfig, num_blocks: int, clock: Stopwatch) -> None:
        import numpy as np

        self.config, self.clock = config, clock
        self.cache = _make_cache(config, num_blocks)
        try:
            self.layers = _make_layers(config, like=self.cache.key[0])
        except (RuntimeError, MemoryError) as error:
            raise ReplayError(
                f"no memory for the vectors of {ROWS:,} stand-in tokens:"
                " lower heads, kv_heads, head_dim or layers"
            ) from error
        self.rng = np.random.default_rng(config.seed)
        self.rows_checked = 0
        self.max_error = self.max_error_dense = 0.0

    def step(self, output: SchedulerOutput, batch: Batch) -> None:
        """Move blocks, write what the step computes into pages and attend, layer by layer."""
        import torch

        with self.clock("write"):
            self.cache.swap_out(output.swap_out)
            self.cache.swap_in(output.swap_in)
            self.cache.copy_blocks(output.copies)
        rows, new_rows = [], []
        for seq, query_len, context_len in zip(
            output.seqs, output.query_lens, output.context_lens, strict=True
        ):
            rows.append(table_rows(seq.token_ids[: context_len + query_len]))
            new_rows.append(rows[-1][context_len:])
        new = torch.cat(new_rows).to(self.config.device)
        everything = torch.cat(rows).to(self.config.device)
        starts_q = list(accumulate(map(len, new_rows), initial=0))
        starts_k = list(accumulate(map(len, rows), initial=0))
        for number, layer in enumerate(self.layers):
            query, key, value = (table.index_select(0, new) for table in layer)
            with self.clock("write"):
                self.cache.write(number, key, value, batch, backend=self.config.backend)
            with self.clock("attention"):
                out = self.cache.attend(number, query, batch, backend=self.config.backend)
            assert not isinstance(out, tuple)  # no lse was asked for
            dense_key, dense_value = (
                table.index_select(0, everything) for table in (layer.key, layer.value)
            )
            self._compare(out, query, dense_key, dense_value, starts_q, starts_k)

    def _compare(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts_q: list[int],
        starts_k: list[int],
    ) -> None:
        """The same attention over keys in one piece per sequence, which never were in a page."""
        import torch
        from paged_kernels import dense_attention

        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(starts, dtype=torch.int32, device=query.device)
            for starts in (starts_q, starts_k)
        )
        with self.clock("dense"):
            dense = dense_attention(
                query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
            )
        for row in self.rng.integers(len(query), size=ROWS_CHECKED_PER_STEP).tolist():
            number = bisect_right(starts_q, row) - 1
            stop = starts_k[number + 1] - (starts_q[number + 1] - row) + 1  # bottom-right causal
            seen = slice(starts_k[number], stop)
            exact = exact_row(query[row], key[seen], value[seen])
            self.max_error = _larger(self.max_error, out[row] - exact)
            self.max_error_dense = _larger(self.max_error_dense, dense[row] - exact)
            self.rows_checked += 1


def table_rows(token_ids: list[int]) -> Tensor:
    """The table row of each token of a sequence: int64 [len(token_ids)]."""
    import torch

    return (torch.tensor(token_ids) * A + torch.arange(len(token_ids)) * B) % ROWS


def exact_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one query [num_heads, head_dim] over all of `key` and `value`, in float64."""
    import torch

    groups = query.double().reshape(key.shape[1], -1, query.shape[1])  # by KV head
    scores = torch.einsum("kgd,nkd->kgn", groups, key.double()) * query.shape[-1] ** -0.5
    return torch.einsum("kgn,nkd->kgd", scores.softmax(-1), value.double()).flatten(0, 1)


def _larger(error: float, difference: Tensor) -> float:
    """The larger of `error` and the largest absolute difference; a NaN stays one."""
    new = difference.abs().max().item()
    return error if error != error or new <= error else new


def _make_layers(config: ReplayConfig, *, like: Tensor) -> list[Layer]:
    """Standard normal tables; a layer's depend on the seed and its number alone."""
    import torch

    def make_layer(number: int) -> Layer:
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + number) % 2**63)
        query, key, value = (
            torch.randn(ROWS, heads, config.head_dim, generator=generator).to(like)
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        )
        return Layer(query, key, value)

    return [make_layer(number) for number in range(config.layers)]


def _make_cache(config: ReplayConfig, num_blocks: int) -> KVCache:
    import torch
    from paged_kernels import KVCache

    shape = (config.block_size, config.kv_heads, config.head_dim)
    dtype = getattr(torch, config.dtype)
    try:
        return KVCache(
            config.layers,
            num_blocks,
            *shape,
            num_cpu_blocks=config.num_cpu_blocks,
            dtype=dtype,
            device=config.device,
        )
    except (RuntimeError, MemoryError) as error:
        bytes_per_block = block_bytes(*shape, dtype, config.layers)
        sizes = [
            f"{number:,} blocks ({number * bytes_per_block / 2**30:,.1f} GiB) on {place}"
            for number, place in ((num_blocks, config.device), (config.num_cpu_blocks, "the CPU"))
            if number
        ]
        raise ReplayError(
            f"no memory for {' and '.join(sizes)}: lower num_blocks"
            f"{' or num_cpu_blocks' if config.num_cpu_blocks else ''}"
        ) from error
