"""One attention problem, contiguous and in blocks: to check the two against each other and time them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from paged.config import check_int, is_cpu
from paged.replay import device_wait, torch_threads
from paged.replay_config import TOLERANCES, final_length
from paged.synthetic import exact_row
from paged.trace import Request

from .timing import GROUPS, Ratio, lower_quartile, ratio, time_in_turns

if TYPE_CHECKING:
    from torch import Tensor

ROWS_CHECKED = 4  # of each sequence, its last ones


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one layer and the dtype of Q, K and V."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}, {self.dtype}"

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_int(name, getattr(self, name), minimum=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, which is"
                f" {self.num_kv_heads}"
            )
        if self.dtype not in TOLERANCES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(TOLERANCES)}")


@dataclass(frozen=True)
class Blocks:
    """The K and V of a problem in blocks, and where each token is."""

    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor
    block_table: Tensor  # int32 [num_seqs, max_blocks_per_seq]
    slots: Tensor  # int64 [num_keys], sequence by sequence


class Problem:
    """Sequences of `seq_lens` tokens, of which the last `query_lens` are queries; seeded values."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        shape: AttentionShape,
        *,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        import torch

        self.seq_lens, self.query_lens, self.shape = tuple(seq_lens), tuple(query_lens), shape
        device_wait(device)  # refuses one that is absent
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)

        def normal(tokens: int, heads: int) -> Tensor:
            values = torch.randn(tokens, heads, shape.head_dim, generator=generator)
            return values.to(device, dtype)

        self.query = normal(sum(query_lens), shape.num_heads)
        self.key, self.value = (normal(sum(seq_lens), shape.num_kv_heads) for _ in range(2))
        starts = [[0, *accumulate(lens)] for lens in (self.query_lens, self.seq_lens)]
        self.cu_q, self.cu_k = (
            torch.tensor(start, dtype=torch.int32, device=device) for start in starts
        )
        self._lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)

    def in_blocks(self, block_size: int, *, shuffled: bool, seed: int = 0) -> Blocks:
        """K and V written into blocks: in order, or at random places of the pool."""
        import torch
        from paged_kernels import reshape_and_cache

        device = self.key.device
        blocks_of = [-(-length // block_size) for length in self.seq_lens]
        order = torch.arange(sum(blocks_of))
        if shuffled:
            order = torch.randperm(sum(blocks_of), generator=torch.Generator().manual_seed(seed))
        rows = torch.split(order, blocks_of)
        table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        positions = [torch.arange(length) for length in self.seq_lens]
        slots = torch.cat(
            [
                row[position // block_size] * block_size + position % block_size
                for row, position in zip(rows, positions, strict=True)
            ]
        ).to(device)
        caches = [
            self.key.new_zeros(sum(blocks_of), block_size, *self.key.shape[1:]) for _ in range(2)
        ]
        reshape_and_cache(self.key, self.value, caches[0], caches[1], slots)
        return Blocks(caches[0], caches[1], table.int().to(device), slots)

    def paged(self, blocks: Blocks) -> Tensor:
        """Attention over blocks: [num_tokens, num_heads, head_dim]."""
        from paged_kernels import paged_attention

        return paged_attention(  # type: ignore[return-value]  # no lse was asked for
            self.query,
            blocks.key_cache,
            blocks.value_cache,
            blocks.block_table,
            self._lens,
            cu_seqlens_q=self.cu_q,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
        )

    def dense(self) -> Tensor:
        """The same by torch's SDPA over contiguous K and V."""
        return self._dense(self.key, self.value)

    def gathered(self, blocks: Blocks) -> Tensor:
        """The same without a paged kernel: K and V copied out of their blocks, then SDPA."""
        key, value = (
            cache.flatten(0, 1).index_select(0, blocks.slots)
            for cache in (blocks.key_cache, blocks.value_cache)
        )
        return self._dense(key, value)

    def _dense(self, key: Tensor, value: Tensor) -> Tensor:
        from paged_kernels import dense_attention

        return dense_attention(  # type: ignore[return-value]
            self.query, key, value, cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k
        )

    def error(self, out: Tensor) -> float:
        """Largest difference from float64 over the largest value, of the last rows of each sequence."""
        worst = largest = 0.0
        ends = zip(self.cu_q[1:].tolist(), self.cu_k.tolist(), self.cu_k[1:].tolist(), strict=False)
        for query_len, (end, first, last) in zip(self.query_lens, ends, strict=True):
            for back in range(min(ROWS_CHECKED, query_len)):
                seen, row = slice(first, last - back), end - 1 - back
                exact = exact_row(self.query[row], self.key[seen], self.value[seen])
                worst = max(worst, float((out[row].double() - exact).abs().max()))
                largest = max(largest, float(exact.abs().max()))
        return worst / largest


def default_device() -> str:
    """A GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_shape(device: str) -> AttentionShape:
    """Llama 3 8B's heads, in the dtype that such a device is used with."""
    return AttentionShape(dtype="float32" if is_cpu(device) else "bfloat16")


def typical_lengths(requests: Sequence[Request], number: int, longest: int) -> list[int]:
    """Final lengths at evenly spaced ranks, none above `longest`: the traffic as one small batch."""
    lengths = sorted(min(final_length(request), longest) for request in requests)
    return [lengths[(2 * rank + 1) * len(lengths) // (2 * number)] for rank in range(number)]


def times(
    calls: Mapping[str, Callable[[], Any]], *, device: str, threads: int, seconds: float, seed: int
) -> dict[str, list[float]]:
    """Seconds of each call, measured in turns: CPU time where one thread does all the work."""
    wait = device_wait(device)
    on_cpu_alone = is_cpu(device) and threads == 1
    with torch_threads(threads):
        return time_in_turns(
            {name: partial(_finish, call, wait) for name, call in calls.items()},
            seconds=seconds,
            seed=seed,
            clock=time.process_time if on_cpu_alone else time.perf_counter,
            least_rounds=GROUPS,
        )


def _finish(call: Callable[[], Any], wait: Callable[[], None]) -> None:
    call()
    wait()


def kernel_time_ratios(
    requests: Sequence[Request],
    block_sizes: Sequence[int],
    base: int,
    shape: AttentionShape,
    *,
    device: str = "cpu",
    threads: int = 1,
    seconds: float = 4.0,
    seed: int = 0,
) -> dict[int, Ratio]:
    """Time of a decode step over shuffled blocks of each size, over that of size `base`."""
    lengths = typical_lengths(requests, number=8, longest=4096)
    problem = Problem(lengths, [1] * len(lengths), shape, device=device, seed=seed)
    calls = {
        str(size): partial(problem.paged, problem.in_blocks(size, shuffled=True))
        for size in {*block_sizes, base}
    }
    series = times(calls, device=device, threads=threads, seconds=seconds, seed=seed)
    return {
        size: ratio(series[str(size)], series[str(base)], lower_quartile) for size in block_sizes
    }
