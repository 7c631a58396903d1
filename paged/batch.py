"""The arrays a step hands to the kernels, kept up to date by deltas.

Each sequence that takes part in batches has a row in one int32 table, and only entries that
changed are written to it. A batch is a selection of rows, gathered into one of two alternating
buffers; a buffer row that still shows the same sequence receives only the changed entries, so a
step costs nothing that grows with the context while sequences keep their places.

numpy and torch are imported with the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from .block_table import NO_ROW, BlockTable
from .sequence import as_count, as_list

if TYPE_CHECKING:
    from torch import Tensor

    from .batch_rows import Rows

_MAX_CHANGES = 1 << 16  # more between two batches than it pays to write one by one


@dataclass(slots=True)
class Batch:
    """One step's sequences. Valid until the second next batch of the same manager.

    block_table        int32 [num_seqs, max_blocks_per_seq], rows of one wider array
    seq_lens           int32 [num_seqs]
    cu_seqlens_q       int32 [num_seqs + 1]
    slot_mapping       int64 [num_tokens]
    max_query_len      tokens
    max_seq_len        tokens
    common_prefix_len  leading tokens, a multiple of block_size, in blocks that all sequences
                       share and no query lies before; 0 for a single sequence
    block_size         tokens
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    common_prefix_len: int
    block_size: int

    def clone(self) -> Batch:
        """A copy that stays valid."""
        return self._map(lambda tensor: tensor.clone())

    def to(self, device: Any) -> Batch:
        """A copy in fresh memory of that device."""
        return self._map(lambda tensor: tensor.to(device, copy=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            function(self.block_table),
            function(self.seq_lens),
            function(self.cu_seqlens_q),
            function(self.slot_mapping),
            self.max_query_len,
            self.max_seq_len,
            self.common_prefix_len,
            self.block_size,
        )

    def csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """The table as FlashInfer takes it: kv_indptr, kv_indices, kv_last_page_len, all int32.

        Sequence i has blocks kv_indices[kv_indptr[i] : kv_indptr[i + 1]], the last of which holds
        kv_last_page_len[i] tokens (1 .. block_size; 0 for an empty sequence).
        """
        import torch

        num_blocks = (self.seq_lens + self.block_size - 1) // self.block_size
        kv_indptr = torch.zeros_like(self.cu_seqlens_q)
        torch.cumsum(num_blocks, 0, dtype=torch.int32, out=kv_indptr[1:])
        columns = torch.arange(self.block_table.shape[1], device=self.seq_lens.device)
        kv_indices = self.block_table[columns < num_blocks[:, None]]
        return (
            kv_indptr,
            kv_indices,
            self.seq_lens - (num_blocks - 1).clamp(min=0) * self.block_size,
        )

    def token_slots(self) -> tuple[Tensor, Tensor]:
        """Every cached token's own slot, for kernels with a page size of 1.

        Returns (indptr int32 [num_seqs + 1], slots int64 [sum of seq_lens]). Slots of tokens that
        were dropped behind a sliding window are negative.
        """
        import torch

        indptr = torch.zeros_like(self.cu_seqlens_q)
        torch.cumsum(self.seq_lens, 0, dtype=torch.int32, out=indptr[1:])
        positions = torch.arange(self.max_seq_len, device=self.seq_lens.device)
        blocks = self.block_table[:, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        return indptr, slots[positions < self.seq_lens[:, None]]


def resolve_queries(
    tables: Sequence[BlockTable],
    query_lens: Sequence[int] | None,
    context_lens: Sequence[int] | None,
    block_size: int,
) -> tuple[list[int], list[int] | None]:
    """Where each sequence's computed tokens end, and how many they are (None: one each).

    ValueError names the sequence whose tokens do not exist, have no slot or were dropped.
    """
    ends = [len(table.seq) for table in tables]
    counts = None if query_lens is None else _counts("query_lens", query_lens, len(tables))
    if context_lens is not None:
        counts = [1] * len(tables) if counts is None else counts
        starts = _counts("context_lens", context_lens, len(tables))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
    for table, end, count in zip(tables, ends, counts or repeat(1), strict=False):
        if end > table.num_tokens:
            raise ValueError(
                f"sequence {table.seq_id!r} has {len(table.seq)} tokens and slots for "
                f"{table.num_tokens}; token {end - 1} has none"
            )
        if count > end:
            raise ValueError(
                f"query_lens has {count} for sequence {table.seq_id!r}, which has {end} tokens"
            )
        if count and end - count < table.num_dropped * block_size:
            raise ValueError(
                f"sequence {table.seq_id!r} cannot compute {count} tokens up to {end}: "
                f"{table.num_dropped} blocks of {block_size} are dropped behind the window"
            )
    return ends, counts


def _counts(name: str, values: Sequence[int], num_seqs: int) -> list[int]:
    values = as_list(name, values, "ints")
    if len(values) != num_seqs:
        raise ValueError(f"{name} has {len(values)} entries for {num_seqs} sequences")
    return [as_count(name, value) for value in values]


class BatchBuilder:
    """Builds the batches of one manager, which reports every changed table entry."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changes: list[tuple[int, int, int]] = []  # (row, index, block) since the last batch
        self._rows: Rows | None = None

    def changed(self, table: BlockTable, index: int) -> None:
        """Entry `index` of a table is new or another block. (Entries cut off need no report.)"""
        if table.row != NO_ROW:
            self._changes.append((table.row, index, table.blocks[index]))
            if len(self._changes) > _MAX_CHANGES:
                self._forget_all()

    def forget(self, table: BlockTable) -> None:
        """The table leaves the GPU; its row is free for another."""
        if table.row != NO_ROW:
            assert self._rows is not None
            self._rows.give_back(table)

    def _forget_all(self) -> None:
        assert self._rows is not None
        self._changes.clear()
        for table in self._rows.owners:
            if table is not None:
                self._rows.give_back(table)

    def prepare(self, device: Any = "cpu") -> None:
        """Raise what a missing library or a wrong device leads to, before anything is changed."""
        if self._rows is None:
            from .batch_rows import Rows

            self._rows = Rows()
        if type(device) is not str or device != "cpu":
            from .batch_rows import check_device

            check_device(device)

    def build(
        self,
        tables: Sequence[BlockTable],
        seq_lens: list[int],
        query_lens: Sequence[int] | None = None,
        *,
        device: Any = "cpu",
    ) -> Batch:
        """The batch of these tables. query_lens None: one query token each."""
        import numpy as np

        self.prepare(device)
        assert self._rows is not None
        store, block_size, num_seqs = self._rows, self._block_size, len(tables)
        rows = store.update(tables, self._changes)
        self._changes.clear()

        ends = np.array(seq_lens, np.int64)
        if query_lens is None:
            num_tokens, max_query_len = num_seqs, min(num_seqs, 1)
            positions, owners = ends - 1, rows
            context_lens = positions
        else:
            lens = np.array(query_lens, np.int64)
            starts = np.cumsum(lens) - lens
            num_tokens, max_query_len = int(lens.sum()), int(lens.max(initial=0))
            positions = np.arange(num_tokens) - np.repeat(starts - (ends - lens), lens)
            owners = np.repeat(rows, lens)
            context_lens = ends - lens
        max_seq_len = int(ends.max(initial=0))
        min_context = int(context_lens.min(initial=max_seq_len))
        width = -(-max_seq_len // block_size)

        buffer = store.next_buffer(num_seqs, num_tokens)
        buffer.show(rows, store.table, width)
        buffer.seq_lens[:num_seqs] = ends
        columns, offsets = np.divmod(positions, block_size)
        slots = buffer.slots[:num_tokens]
        np.multiply(store.table[owners, columns], block_size, out=slots)
        slots += offsets
        if query_lens is None:
            buffer.cu_seqlens_q[: num_seqs + 1] = store.counting(num_seqs + 1)
        else:
            np.cumsum(lens, out=buffer.cu_seqlens_q[1 : num_seqs + 1])
        batch = Batch(
            *buffer.views(num_seqs, width, num_tokens),
            max_query_len,
            max_seq_len,
            store.common_blocks(rows, min_context // block_size) * block_size,
            block_size,
        )
        return batch if device == "cpu" else batch.to(device)
