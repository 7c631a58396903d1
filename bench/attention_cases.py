"""What `attention` runs on: cases along sweeps, and the tensors of a case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from paged_kernels import paged_attention, reshape_and_cache
from torch import Tensor

RANDOM, IN_ORDER, PREFIX = "shuffled blocks", "blocks in order", "shuffled, prefix told"


@dataclass(frozen=True)
class Case:
    """Sequences of `seq_lens` tokens, the last `query_lens` of which are queries."""

    what: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float32"
    prefix_len: int = 0  # leading tokens that all sequences have in common, in common blocks

    @property
    def heads(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"

    @property
    def name(self) -> str:
        """Says all sizes."""
        return f"{self.what}, {self.heads}, block {self.block_size}, {self.dtype}"


def decode(batch: int, context: int) -> Case:
    return Case(f"decode {batch} x {context:,}", (context,) * batch, (1,) * batch)


def small(case: Case) -> Case:
    """The heads of a model of 135 million parameters."""
    return replace(case, num_heads=9, num_kv_heads=3, head_dim=64)


# By sweep, by place in it; a case may stand in several.
Sweeps = dict[str, dict[str, Case]]


def sweeps(quick: bool) -> Sweeps:
    """One thing varied at a time, and the phases of serving."""
    base = decode(4, 256) if quick else decode(8, 2_048)
    batch, context = len(base.seq_lens), base.seq_lens[0]
    batches = (1, batch, 16) if quick else (1, 2, 4, batch, 16)
    contexts = (64, context, 1_024) if quick else (128, 512, context, 8_192)
    heads = ((32, 32, 128), (32, 8, 128), (32, 1, 128), (9, 3, 64))
    blocks = (1, 16, 64) if quick else (1, 4, 8, 16, 32, 64, 128)
    return {
        "batch": {str(n): decode(n, context) for n in batches},
        "context": {f"{n:,}": decode(batch, n) for n in contexts},
        "heads": {
            f"{h}/{k}\nx {d}": replace(base, num_heads=h, num_kv_heads=k, head_dim=d)
            for h, k, d in heads
        },
        "block size": {str(n): replace(base, block_size=n) for n in blocks},
        "dtype": {name: replace(base, dtype=name) for name in ("float32", "bfloat16", "float16")},
        "phase": _quick_phases(base) if quick else _phases(base),
    }


def _phases(base: Case) -> dict[str, Case]:
    mixed = Case(
        "mixed: 512 of 1,024 and 7 decodes", (1_024, *range(300, 1_700, 200)), (512, *(1,) * 7)
    )
    shared = replace(base, what="decode 8 x 2,048, 1,536 shared", prefix_len=1_536)
    ragged = Case("decode 16 x 16-196", tuple(range(16, 208, 12)), (1,) * 16)
    return {
        "decode": base,
        "decode,\nsmall": small(decode(64, 128)),
        "ragged,\nsmall": small(ragged),
        "prefill": Case("prefill 1,024", (1_024,), (1_024,)),
        "prefill,\nsmall": small(Case("prefill 4 x 256", (256,) * 4, (256,) * 4)),
        "chunk": Case("prefill 512 of 2,048", (2_048,), (512,)),
        "mixed": mixed,
        "prefix": shared,
    }


def _quick_phases(base: Case) -> dict[str, Case]:
    return {
        "decode": base,
        "ragged,\nsmall": small(Case("decode 8 x 16-128", tuple(range(16, 144, 16)), (1,) * 8)),
        "prefill": Case("prefill 256", (256,), (256,)),
        "chunk": Case("prefill 64 of 256", (256,), (64,)),
        "mixed": Case("mixed: 32 of 128 and 3 decodes", (128, 60, 100, 200), (32, 1, 1, 1)),
        "prefix": replace(base, what="decode 4 x 256, 192 shared", prefix_len=192),
    }


class Problem:
    """The tensors of a case: contiguous, and in blocks at shuffled places and in order.

    query [num_tokens, num_heads, head_dim]; key, value [keys, num_kv_heads, head_dim], packed.
    """

    def __init__(self, case: Case, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, case.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.case = case
        self.query = normal(sum(case.query_lens), case.num_heads, case.head_dim)
        self.key, self.value = normal(2, sum(case.seq_lens), case.num_kv_heads, case.head_dim)
        self.cu_q = torch.tensor([0, *accumulate(case.query_lens)], dtype=torch.int32)
        self.cu_k = torch.tensor([0, *accumulate(case.seq_lens)], dtype=torch.int32)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        for start in self.cu_k[1:-1].tolist():
            for rows in (self.key, self.value):
                rows[start : start + case.prefix_len] = rows[: case.prefix_len]
        self.order = torch.randperm(self._num_blocks, generator=generator)
        self.tables = {RANDOM: self._table(self.order), IN_ORDER: self._table()}
        self.caches = {name: self._caches(name) for name in self.tables}

    @cached_property
    def _num_blocks(self) -> int:
        case = self.case
        shared = case.prefix_len // case.block_size
        return shared + sum(-(-n // case.block_size) - shared for n in case.seq_lens)

    def _table(self, order: Tensor | None = None) -> Tensor:
        """int32 [num_seqs, max_blocks_per_seq]."""
        case = self.case
        ids = torch.arange(self._num_blocks) if order is None else order
        shared = case.prefix_len // case.block_size
        own = [-(-n // case.block_size) - shared for n in case.seq_lens]
        prefix, *rows = torch.split(ids.int(), [shared, *own])
        rows = [torch.cat([prefix, row]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def slots(self, order: str) -> Tensor:
        """int64 [keys]: the slot of each token."""
        size = self.case.block_size
        positions = [torch.arange(n) for n in self.case.seq_lens]
        rows = zip(self.tables[order].long(), positions, strict=True)
        return torch.cat([row[p // size] * size + p % size for row, p in rows])

    def _caches(self, order: str) -> tuple[Tensor, Tensor]:
        shape = (self._num_blocks, self.case.block_size, *self.key.shape[1:])
        caches = self.key.new_zeros(shape), self.key.new_zeros(shape)
        reshape_and_cache(self.key, self.value, *caches, self.slots(order), backend="torch")
        return caches

    def paged(self, order: str, common_prefix_len: int | None = None) -> Tensor:
        """Our attention, over blocks in one of both orders."""
        longest = max(self.case.query_lens)
        out = paged_attention(
            self.query,
            *self.caches[order],
            self.tables[order],
            self.seq_lens,
            cu_seqlens_q=None if longest == 1 else self.cu_q,
            max_query_len=longest,
            max_seq_len=max(self.case.seq_lens),
            common_prefix_len=common_prefix_len,
            backend="torch",
        )
        assert isinstance(out, Tensor)
        return out


def checked_rows(case: Case) -> Sequence[tuple[int, int]]:
    """(sequence, query of it) to compare with the reference: the first, a middle and the last."""
    seqs = range(len(case.seq_lens))
    return [
        (seq, query)
        for seq in sorted({*seqs[:4], *seqs[-4:]})
        for query in sorted({0, case.query_lens[seq] // 2, case.query_lens[seq] - 1})
    ]
