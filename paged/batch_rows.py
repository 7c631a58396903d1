"""The memory behind batches: one row of block ids per table, gathered into alternating buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .block_table import NO_ROW, BlockTable

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Rows:
    """One row of block ids per table, and the two buffers that batches are gathered into."""

    def __init__(self) -> None:
        self.table: np.ndarray[Any, Any] = np.empty((0, 0), np.int32)
        self.owners: list[BlockTable | None] = []
        self._free: list[int] = []
        self._buffers = (Buffer(), Buffer())
        self._turn = 0
        self._counting = np.arange(0, dtype=np.int32)
        self._common: tuple[bytes, int] = (b"", 0)  # rows of the last batch, blocks they share

    def update(
        self, tables: Sequence[BlockTable], changes: list[tuple[int, int, int]]
    ) -> np.ndarray[Any, Any]:
        """Bring the rows of all tables up to date and return the rows of `tables`."""
        if changes:
            self._write_changes(changes)
        rows = np.array([table.row for table in tables], np.int64)
        for index in np.flatnonzero(rows == NO_ROW):
            rows[index] = self._add(tables[int(index)])
        return rows

    def _write_changes(self, changes: list[tuple[int, int, int]]) -> None:
        places = np.array(changes, np.int64).T
        rows, columns, blocks = places
        self._fit(len(self.owners), int(columns.max()) + 1)
        self.table[rows, columns] = blocks  # of several changes of one place the last one stays
        for buffer in self._buffers:
            buffer.late.append(places[:2])
        if self._common[1] and columns.min() < self._common[1]:
            self._common = (b"", 0)

    def _add(self, table: BlockTable) -> int:
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
        return row

    def give_back(self, table: BlockTable) -> None:
        self.owners[table.row] = None
        self._free.append(table.row)
        table.row = NO_ROW

    def _fit(self, num_rows: int, width: int) -> None:
        old_rows, old_width = self.table.shape
        if width > old_width:
            width = max(width + width // 4, 16)  # wide rows are copied when sequences move
        if num_rows > old_rows or width > old_width:
            wider = np.zeros((max(num_rows, old_rows), max(width, old_width)), np.int32)
            wider[:old_rows, :old_width] = self.table
            self.table = wider
            self._free += reversed(range(old_rows, num_rows))
            self.owners += [None] * (num_rows - old_rows)
            for buffer in self._buffers:
                buffer.fit_table(wider.shape)

    def next_buffer(self, num_seqs: int, num_tokens: int) -> Buffer:
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        buffer.fit_tokens(num_tokens)
        return buffer

    def counting(self, n: int) -> np.ndarray[Any, Any]:
        """[0, 1, .. n - 1]: cu_seqlens_q of a decode batch."""
        if n > len(self._counting):
            self._counting = np.arange(2 * n, dtype=np.int32)
        return self._counting[:n]

    def common_blocks(self, rows: np.ndarray[Any, Any], limit: int) -> int:
        """Leading blocks that all rows name, at most `limit`.

        The search goes on where it ended for the last batch of the same sequences in any order.
        """
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


class Buffer:
    """The memory of every second batch."""

    def __init__(self) -> None:
        self.late: list[np.ndarray[Any, Any]] = []  # [rows, columns] changed since last shown
        self._shown: np.ndarray[Any, Any] = np.empty(0, np.int64)  # row at each place, -1: none
        self._place: np.ndarray[Any, Any] = np.empty(0, np.int64)  # place of each row, -1: none
        self._allocate((0, 0), 0)

    def _allocate(self, shape: tuple[int, ...], num_tokens: int) -> None:
        self.block_table = np.zeros(shape, np.int32)
        self.seq_lens = np.zeros(shape[0], np.int32)
        self.cu_seqlens_q = np.zeros(shape[0] + 1, np.int32)
        self.slots = np.zeros(num_tokens, np.int64)
        self._tensors: Tensors = (
            torch.from_numpy(self.block_table),
            torch.from_numpy(self.seq_lens),
            torch.from_numpy(self.cu_seqlens_q),
            torch.from_numpy(self.slots),
        )
        self._views: tuple[tuple[int, int, int], Tensors] | None = None
        self._shown = np.full(shape[0], -1, np.int64)
        self._place = np.full(shape[0], -1, np.int64)
        self.late.clear()

    def fit_table(self, shape: tuple[int, ...]) -> None:
        self._allocate(shape, max(len(self.slots), shape[0]))

    def fit_tokens(self, num_tokens: int) -> None:
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

    def views(self, num_seqs: int, width: int, num_tokens: int) -> Tensors:
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


def check_device(device: Any) -> None:
    """TypeError or ValueError, naming the argument, unless torch can place tensors there."""
    try:
        if device is None:  # torch's default device, which a batch never asks for
            raise TypeError
        torch.empty(0, device=device)
    except TypeError:
        raise TypeError(f"device is {device!r}; it must be a torch.device or its name") from None
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}; torch has none like it: {error}") from error
