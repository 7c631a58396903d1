"""Which sequences hold blocks, and what to say about one that does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .block_table import BlockTable
from .errors import AlreadyAllocatedError, NotAllocatedError, NotOnGpuError
from .history import History
from .sequence import SequenceLike, check_sequence, sequence_list


class Registry:
    """The block tables of all sequences by their `seq_id`. Every look-up raises a typed error."""

    def __init__(self, history: History) -> None:
        self.tables: dict[Any, BlockTable] = {}  # sequences on the GPU
        self.swapped: dict[Any, BlockTable] = {}  # sequences whose blocks are CPU blocks
        self._history = history

    def check_new(self, seq: SequenceLike) -> None:
        """AlreadyAllocatedError when the name is taken."""
        if seq.seq_id in self.tables or seq.seq_id in self.swapped:
            last = self._history.last_of_sequence(seq.seq_id)
            raise AlreadyAllocatedError(f"sequence {seq.seq_id!r} already holds blocks: {last}")

    def on_gpu(self, seq: SequenceLike) -> BlockTable:
        """The table of a sequence whose blocks are GPU blocks."""
        try:
            table = self.tables[seq.seq_id]
        except (KeyError, AttributeError, TypeError):  # no such name, no name, or unhashable
            raise self.missing(seq) from None
        if table.seq is not seq:
            raise self.missing(seq)
        return table

    def all_on_gpu(self, seqs: Iterable[SequenceLike]) -> list[BlockTable]:
        """The tables of a batch, in which no sequence comes twice."""
        seqs = seqs if type(seqs) is list else sequence_list("seqs", seqs)
        try:
            tables = [self.on_gpu(seq) for seq in seqs]
        except TypeError:
            sequence_list("seqs", seqs)  # says which of them
            raise
        if len(set(tables)) != len(tables):
            raise ValueError("seqs names a sequence twice")
        return tables

    def swapped_out(self, seq: SequenceLike) -> BlockTable:
        """The table of a sequence whose blocks are CPU blocks."""
        table = self.swapped.get(seq.seq_id)
        if table is None:
            if seq.seq_id in self.tables:
                raise AlreadyAllocatedError(f"sequence {seq.seq_id!r} is not swapped out")
            raise self.missing(seq)
        return table

    def anywhere(self, seq: SequenceLike) -> BlockTable:
        """The table of a sequence on the GPU or swapped out, by its name alone."""
        check_sequence("seq", seq)
        table = self.tables.get(seq.seq_id) or self.swapped.get(seq.seq_id)
        if table is None:
            raise self.missing(seq)
        return table

    def missing(self, seq: SequenceLike) -> Exception:
        """Why `seq` has no table on the GPU; a TypeError of its own when it is no sequence."""
        check_sequence("seq", seq)
        if seq.seq_id in self.tables:
            return ValueError(f"sequence {seq.seq_id!r} was allocated as another object")
        if seq.seq_id in self.swapped:
            return NotOnGpuError(f"sequence {seq.seq_id!r} is swapped out; swap it in first")
        last = self._history.last_of_sequence(seq.seq_id)
        known = f"; last operation: {last}" if last else ""
        return NotAllocatedError(f"sequence {seq.seq_id!r} holds no blocks{known}")
