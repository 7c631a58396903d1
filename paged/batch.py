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
from typing import TYPE_CHECKING, Any

from .block_table import BlockTable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    _Tensors = tuple[Tensor, Tensor, Tensor, Tensor]

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


class BatchBuilder:
    """Builds the batches of one manager, which reports every changed table entry."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changes: list[tuple[BlockTable, int]] = []  # (table, index) since the last batch
        self._rows: _Rows | None = None

    def changed(self, table: BlockTable, index: int) -> None:
        """Entry `index` of a table is new or another block. (Entries cut off need no report.)"""
        if table.row is not None:
            self._changes.append((table, index))
            if len(self._changes) > _MAX_CHANGES:
                self._forget_all()

    def forget(self, table: BlockTable) -> None:
        """The table leaves the GPU; its row is free for another."""
        if table.row is not None:
            assert self._rows is not None
            self._rows.give_back(table)

    def _forget_all(self) -> None:
        assert self._rows is not None
        self._changes.clear()
        for table in self._rows.owners:
            if table is not None:
                self._rows.give_back(table)

    def prepare(self, device: Any = "cpu") -> None:
        """Raise whatever a missing library or device raises, before anything is changed."""
        if self._rows is None:
            self._rows = _Rows()
        if device != "cpu":
            import torch

            torch.empty(0, device=device)

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


class _Rows:
    """One row of block ids per table, and the two buffers that batches are gathered into."""

    def __init__(self) -> None:
        import numpy as np

        self.table: np.ndarray[Any, Any] = np.empty((0, 0), np.int32)
        self.owners: list[BlockTable | None] = []
        self._free: list[int] = []
        self._buffers = (_Buffer(), _Buffer())
        self._turn = 0
        self._counting = np.arange(0, dtype=np.int32)
        self._common: tuple[bytes, int] = (b"", 0)  # rows of the last batch, blocks they share

    def update(
        self, tables: Sequence[BlockTable], changes: list[tuple[BlockTable, int]]
    ) -> np.ndarray[Any, Any]:
        """Bring the rows of all tables up to date and return the rows of `tables`."""
        import numpy as np

        if changes:
            self._write_changes(changes)
        rows = [table.row for table in tables]
        if None in rows:
            for table in tables:
                if table.row is None:
                    self._add(table)
            rows = [table.row for table in tables]
        return np.array(rows, np.int64)

    def _write_changes(self, changes: list[tuple[BlockTable, int]]) -> None:
        import numpy as np

        # A table may have been freed, or its end cut off, after it reported the change.
        live = [
            (table.row, index, table.blocks[index])
            for table, index in changes
            if table.row is not None and index < len(table.blocks)
        ]
        if not live:
            return
        places = np.array(live, np.int64).T
        rows, columns, blocks = places
        self._fit(len(self.owners), int(columns.max()) + 1)
        self.table[rows, columns] = blocks
        for buffer in self._buffers:
            buffer.late.append(places[:2])
        if self._common[1] and columns.min() < self._common[1]:
            self._common = (b"", 0)

    def _add(self, table: BlockTable) -> None:
        if not self._free:
            self._fit(2 * len(self.owners) + 16, len(table.blocks))
        row = self._free.pop()
        self._fit(len(self.owners), len(table.blocks))
        self.owners[row] = table
        table.row = row
        self.table[row, : len(table.blocks)] = table.blocks
        for buffer in self._buffers:
            buffer.hide(row)
        self._common = (b"", 0)

    def give_back(self, table: BlockTable) -> None:
        assert table.row is not None
        self.owners[table.row] = None
        self._free.append(table.row)
        table.row = None

    def _fit(self, num_rows: int, width: int) -> None:
        import numpy as np

        old_rows, old_width = self.table.shape
        if width > old_width:
            width = max(width, 2 * old_width, 16)
        if num_rows > old_rows or width > old_width:
            wider = np.zeros((max(num_rows, old_rows), max(width, old_width)), np.int32)
            wider[:old_rows, :old_width] = self.table
            self.table = wider
            self._free += reversed(range(old_rows, num_rows))
            self.owners += [None] * (num_rows - old_rows)
            for buffer in self._buffers:
                buffer.fit_table(wider.shape)

    def next_buffer(self, num_seqs: int, num_tokens: int) -> _Buffer:
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        buffer.fit_tokens(num_tokens)
        return buffer

    def counting(self, n: int) -> np.ndarray[Any, Any]:
        """[0, 1, .. n - 1]: cu_seqlens_q of a decode batch."""
        import numpy as np

        if n > len(self._counting):
            self._counting = np.arange(2 * n, dtype=np.int32)
        return self._counting[:n]

    def common_blocks(self, rows: np.ndarray[Any, Any], limit: int) -> int:
        """Leading blocks that all rows name, at most `limit`.

        The search goes on where it ended for the last batch of the same sequences in any order.
        """
        import numpy as np

        if len(rows) < 2 or limit < 1:
            return 0
        first = self.table[rows, 0]
        if first[0] < 0 or (first != first[0]).any():
            return 0
        key = np.sort(rows).tobytes()
        common = self._common[1] if self._common[0] == key else 0
        while common < limit:
            part = self.table[rows, common : min(limit, 2 * common + 1)]
            same = (part == part[0]).all(axis=0) & (part[0] >= 0)
            if not same.all():
                common += int(same.argmin())
                break
            common += len(same)
        self._common = (key, common)
        return min(common, limit)


class _Buffer:
    """The memory of every second batch."""

    def __init__(self) -> None:
        import numpy as np

        self.late: list[np.ndarray[Any, Any]] = []  # [rows, columns] changed since last shown
        self._shown: np.ndarray[Any, Any] = np.empty(0, np.int64)  # row at each place, -1: none
        self._place: np.ndarray[Any, Any] = np.empty(0, np.int64)  # place of each row, -1: none
        self._allocate((0, 0), 0)

    def _allocate(self, shape: tuple[int, ...], num_tokens: int) -> None:
        import numpy as np
        import torch

        self.block_table = np.zeros(shape, np.int32)
        self.seq_lens = np.zeros(shape[0], np.int32)
        self.cu_seqlens_q = np.zeros(shape[0] + 1, np.int32)
        self.slots = np.zeros(num_tokens, np.int64)
        self._tensors: _Tensors = (
            torch.from_numpy(self.block_table),
            torch.from_numpy(self.seq_lens),
            torch.from_numpy(self.cu_seqlens_q),
            torch.from_numpy(self.slots),
        )
        self._views: tuple[tuple[int, int, int], _Tensors] | None = None
        self._shown = np.full(shape[0], -1, np.int64)
        self._place = np.full(shape[0], -1, np.int64)
        self.late.clear()

    def fit_table(self, shape: tuple[int, ...]) -> None:
        self._allocate(shape, max(len(self.slots), shape[0]))

    def fit_tokens(self, num_tokens: int) -> None:
        import numpy as np
        import torch

        if num_tokens > len(self.slots):
            self.slots = np.zeros(2 * num_tokens, np.int64)
            self._tensors = (*self._tensors[:3], torch.from_numpy(self.slots))
            self._views = None

    def hide(self, row: int) -> None:
        """The row belongs to another sequence now: show it anew."""
        place = self._place[row]
        if place >= 0:
            self._shown[place] = -1

    def show(self, rows: np.ndarray[Any, Any], table: np.ndarray[Any, Any], width: int) -> None:
        """Make the leading rows of `block_table` equal to `table[rows, :width]`."""
        import numpy as np

        shown = self._shown[: len(rows)]
        moved = np.flatnonzero(shown != rows)
        if len(moved):
            if 2 * len(moved) > len(rows):
                table.take(rows, axis=0, out=self.block_table[: len(rows)], mode="clip")
            else:
                self.block_table[moved] = table[rows[moved]]
            shown[:] = rows
            self._shown[len(rows) :] = -1
            self._place[:] = -1
            self._place[rows] = np.arange(len(rows))
        if self.late:
            late_rows, columns = np.concatenate(self.late, axis=1)
            self.late.clear()
            places = self._place[late_rows]
            if places.min() < 0:
                seen = np.flatnonzero(places >= 0)
                places, late_rows, columns = places[seen], late_rows[seen], columns[seen]
            self.block_table[places, columns] = table[late_rows, columns]

    def views(self, num_seqs: int, width: int, num_tokens: int) -> _Tensors:
        """block_table, seq_lens, cu_seqlens_q and slots, cut to size."""
        if self._views is None or self._views[0] != (num_seqs, width, num_tokens):
            block_table, seq_lens, cu_seqlens_q, slots = self._tensors
            views = (
                block_table[:num_seqs, :width],
                seq_lens[:num_seqs],
                cu_seqlens_q[: num_seqs + 1],
                slots[:num_tokens],
            )
            self._views = ((num_seqs, width, num_tokens), views)
        return self._views[1]
