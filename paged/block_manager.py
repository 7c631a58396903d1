"""Which blocks each sequence needs, where they are, and which can be reclaimed.

A sequence's tokens live in blocks of fixed size anywhere in the pool; its block table lists them
in order (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). The manager keeps these tables and the reference count of each block.
It moves no data: calls that need a copy return pairs of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from .admission import Admission, AllocStatus
from .allocators import NaiveBlockAllocator, PrefixCachingBlockAllocator, gpu_allocator
from .batch import BatchBuilder, resolve_queries
from .block_table import BlockTable
from .config import CacheConfig
from .errors import NoFreeBlocksError
from .growth import Growth
from .history import History
from .invariants import check_invariants
from .journal import Journal
from .registry import Registry
from .retention import Retention
from .sequence import (
    Sequence,
    SequenceGroup,
    SequenceLike,
    as_count,
    check_sequence,
    checked_tokens,
    cut_tokens,
    members,
    sequence_list,
)
from .sharing import Sharing
from .snapshot import snapshot
from .stats import CacheStats, PrefixCounter, collect_stats
from .swap import distinct_blocks, move

if TYPE_CHECKING:
    from .batch import Batch

Pairs = list[tuple[int, int]]


class BlockSpaceManager:
    """Block tables of all sequences over one pool of GPU blocks and one of CPU blocks.

    A call that raises has changed nothing. `can_x` is true exactly when `x` would succeed.

    >>> manager = BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=8))
    >>> sequence = Sequence("a", [1, 2, 3, 4, 5])
    >>> manager.allocate(sequence)
    >>> manager.block_table(sequence)
    [0, 1]
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.gpu = gpu_allocator(config)
        self.cache = self.gpu if isinstance(self.gpu, PrefixCachingBlockAllocator) else None
        self.cpu = NaiveBlockAllocator(config.num_cpu_blocks, config.free_order)
        self.history = History()
        self._registry = Registry(self.history)
        self.tables = self._registry.tables  # sequences on the GPU
        self.swapped = self._registry.swapped  # sequences whose blocks are CPU blocks
        self.prefix_counter = PrefixCounter()
        self._batches = BatchBuilder(config.block_size)
        self._retention = Retention(config, self.gpu, self.cache, self._batches, self.history)
        self._growth = Growth(
            config, self.gpu, self.cache, self._retention, self._batches, self.history
        )
        self._sharing = Sharing(
            config.block_size, self.gpu, self.cache, self._retention, self.tables, self.history
        )
        self.admission = Admission(config, self.gpu, self.cache)

    # Admission

    def can_allocate(
        self, seq_or_group: SequenceLike | SequenceGroup, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """OK, LATER (not enough blocks now) or NEVER (more blocks than the pool has).

        Cached prefix blocks are counted as there. While any sequence holds GPU blocks,
        int(watermark * pool) blocks are left free.
        """
        num_lookahead_slots = as_count("num_lookahead_slots", num_lookahead_slots)
        seqs = members(seq_or_group)
        for seq in seqs:
            self._registry.check_new(seq)
        return self.admission.plan(seqs, num_lookahead_slots).status

    def allocate(self, seq_or_group: SequenceLike | SequenceGroup) -> None:
        """Give blocks to a sequence, or to all sequences of a group, which share them.

        NoFreeBlocksError exactly when `can_allocate` is not OK.
        """
        seqs = members(seq_or_group)
        for seq in seqs:
            self._registry.check_new(seq)
        status, hits, num_new, available = self.admission.plan(seqs)
        if status is AllocStatus.NEVER:
            total = len(hits) + num_new
            raise NoFreeBlocksError(total, available, f"the pool has {self.gpu.num_blocks}")
        if status is AllocStatus.LATER:
            raise NoFreeBlocksError(num_new, available, f"for sequence {seqs[0].seq_id!r}")

        first = seqs[0]
        blocks = self.cache.acquire(hits) if self.cache else []
        blocks += self.gpu.allocate(num_new)
        table = BlockTable(first, blocks, len(first))
        if self.cache:
            table.chain = self.cache.hasher.chain_of(first)
            table.parent = hits[-1] if hits else table.chain.root
            table.num_published = len(hits)
            table.num_cached = len(hits) * self.config.block_size
            table.num_computed = table.num_cached
        self._retention.schedule(table)
        self.tables[table.seq_id] = table
        self.prefix_counter.add(seqs, table.num_cached)
        self.history.add("allocate", table.seq_id, blocks)
        for other in seqs[1:]:
            self._sharing.share(table, other)
        if len(seqs) == 1:
            table.writable_until = len(blocks) * self.config.block_size

    def num_cached_tokens(self, seq: SequenceLike) -> int:
        """Tokens that the last allocate found in the prefix cache: a multiple of the block size."""
        return self._registry.anywhere(seq).num_cached

    # Growth

    def can_append_slots(
        self, seq_or_group: SequenceLike | SequenceGroup, num_lookahead_slots: int = 0
    ) -> bool:
        """Whether `append_slots` would succeed now, for a group one sequence after the other."""
        num_lookahead_slots = as_count("num_lookahead_slots", num_lookahead_slots)
        wanted = []
        for seq in members(seq_or_group):
            if seq.seq_id in self.swapped:
                return False
            table = self._registry.on_gpu(seq)
            if len(seq) < table.num_tokens:
                return False
            wanted.append((table, len(seq) + num_lookahead_slots))
        return self._growth.blocks_needed(wanted) <= self.gpu.num_free

    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int = 0) -> Pairs:
        """Give every token of `seq` a slot, and as many free slots behind them as asked.

        Returns the copies (source, destination) that must be made before the new slots are
        written: blocks shared with another sequence are replaced. On NoFreeBlocksError the table
        is as before; a second call returns [].
        """
        try:  # `on_gpu` without the call
            table = self.tables[seq.seq_id]
        except (KeyError, AttributeError, TypeError):
            raise self._registry.missing(seq) from None
        if table.seq is not seq:
            raise self._registry.missing(seq)
        num_tokens = target = len(seq.token_ids)
        if type(num_lookahead_slots) is not int or num_lookahead_slots:
            target += as_count("num_lookahead_slots", num_lookahead_slots)
        pairs: Pairs = []
        if target > table.writable_until or num_tokens < table.num_tokens:
            if num_tokens < table.num_tokens:
                raise ValueError(
                    f"sequence {seq.seq_id!r} has {num_tokens} tokens and slots for "
                    f"{table.num_tokens}; only trim may shorten it"
                )
            wanted = [(table, target)]
            pairs = self._growth.grow(wanted, self._growth.reserve(wanted))
        table.give_slots(num_tokens)
        return pairs

    def step(
        self, seqs: ListLike[SequenceLike], tokens: ListLike[int], *, device: Any = "cpu"
    ) -> tuple[Pairs, Batch]:
        """Append one token to each sequence, give it a slot, and describe the batch.

        The hot path: `mark_computed` of all earlier tokens, `append_token`, `append_slots` and
        `build_batch` in one call, all or nothing. Returns the copies and the batch.
        """
        self._batches.prepare(device)
        tokens = checked_tokens(tokens)
        if type(seqs) is not list:
            seqs = sequence_list("seqs", seqs)
        if len(tokens) != len(seqs):
            raise ValueError(f"tokens has {len(tokens)} tokens for {len(seqs)} sequences")
        find = self.tables.get
        tables: list[BlockTable] = []
        seq_lens: list[int] = []
        attention: list[BlockTable] = []  # at a block boundary, mostly: one in block_size
        foreign: list[tuple[SequenceLike, int]] = []
        try:
            for seq, token in zip(seqs, tokens, strict=True):
                table = find(seq.seq_id)
                if table is None or table.seq is not seq:
                    raise self._registry.missing(seq)
                num_tokens, token_ids = table.num_tokens, seq.token_ids
                if num_tokens != len(token_ids):
                    raise self._out_of_step(seq, table, tables)
                if type(seq) is Sequence:
                    token_ids.append(token)  # as append_token does with a token that is checked
                else:
                    foreign.append((seq, token))
                tables.append(table)
                seq_lens.append(num_tokens + 1)
                if num_tokens < table.quiet_until:
                    table.num_tokens = num_tokens + 1
                else:
                    attention.append(table)
            if len(set(tables)) != len(tables):
                raise ValueError("seqs names a sequence twice")
            wanted = [
                (table, table.num_tokens + 1)
                for table in attention
                if table.num_tokens >= table.writable_until
            ]
            needed = self._growth.reserve(wanted, attention)
            for seq, token in foreign:  # last: who knows whether it can be undone
                seq.append_token(token)
        except BaseException:
            for seq, table, seq_len in zip(seqs, tables, seq_lens, strict=False):
                table.num_tokens = seq_len - 1
                if len(seq.token_ids) == seq_len:
                    del seq.token_ids[-1:]
            sequence_list("seqs", seqs)  # a better error when one of them is no sequence
            raise

        for table in attention:
            table.num_computed = table.num_tokens
            if table.num_tokens >= table.work_at:
                self._retention.settle(table)
        pairs = self._growth.grow(wanted, needed)
        for table in attention:
            table.give_slots(table.num_tokens + 1)
            table.quiet_until = min(table.writable_until, table.work_at)
        return pairs, self._batches.build(tables, seq_lens, device=device)

    # Sharing

    def fork(
        self, parent: SequenceLike, child: SequenceLike, num_tokens: int | None = None
    ) -> None:
        """Let `child`, which has equal tokens, share every block of `parent`.

        Whoever appends first into the shared tail gets a copy of it.

        num_tokens  a multiple of the block size: the two have these first tokens in common and
                    share their blocks; the child gets new ones for the rest of its own tokens
        """
        table = self._registry.on_gpu(parent)
        check_sequence("child", child)
        self._registry.check_new(child)
        self.admission.check_keys(parent, child)
        if num_tokens is not None:
            self._sharing.branch(table, child, as_count("num_tokens", num_tokens))
            return
        if len(child) != len(parent):
            raise ValueError(
                f"child {child.seq_id!r} has {len(child)} tokens, parent {parent.seq_id!r} "
                f"{len(parent)}; they must be equal"
            )
        self._sharing.share(table, child)

    def trim(self, seq: SequenceLike, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`, and the blocks that only they needed.

        A cached last block that is now partial is withdrawn from the cache if this sequence alone
        holds it, else copied at the next append. ValueError when the shorter sequence would need a
        block that was dropped behind the sliding window.
        """
        table = self._registry.on_gpu(seq)
        num_tokens = as_count("num_tokens", num_tokens)
        if num_tokens > len(seq):
            raise ValueError(f"num_tokens is {num_tokens}; sequence {seq.seq_id!r} has {len(seq)}")
        block_size = self.config.block_size
        full, keep = num_tokens // block_size, -(-num_tokens // block_size)
        num_dropped = min(table.num_dropped, keep)
        if num_dropped > self._retention.num_droppable(num_tokens):
            raise ValueError(
                f"num_tokens is {num_tokens}; sequence {seq.seq_id!r} would need a block that was "
                f"dropped: its first {table.num_dropped * block_size} tokens are behind the window"
            )
        cut_tokens(seq, num_tokens)
        num_computed = min(table.num_computed, num_tokens)
        table.num_tokens = min(table.num_tokens, num_tokens)
        table.num_computed = num_computed
        released = table.blocks[max(keep, table.num_dropped) :]
        del table.blocks[keep:]
        table.num_dropped = num_dropped
        if self.cache:
            self._retention.unpublish(table, full)
        self._retention.release(released)
        table.writable_until = table.quiet_until = 0
        self._retention.schedule(table)
        self.history.add("trim", table.seq_id, released)

    # Content

    def mark_computed(self, seq: SequenceLike, num_tokens: int) -> None:
        """Say that K and V of the first `num_tokens` tokens are written.

        Full blocks among them become shareable; with a sliding window, blocks that no later query
        can see are given back.
        """
        try:  # `on_gpu` without the call
            table = self.tables[seq.seq_id]
        except (KeyError, AttributeError, TypeError):
            raise self._registry.missing(seq) from None
        if table.seq is not seq:
            raise self._registry.missing(seq)
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = as_count("num_tokens", num_tokens)
        if num_tokens > table.num_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens}; sequence {seq.seq_id!r} has slots for "
                f"{table.num_tokens} tokens"
            )
        num_pending = table.num_tokens - num_tokens
        if num_pending <= table.num_pending:
            table.num_pending = num_pending
            table.quiet_until = 0
            if num_tokens >= table.work_at:
                self._retention.settle(table)

    def reset_prefix_cache(self) -> None:
        """Forget all shareable content, also what live sequences have: they go on unshared."""
        if self.cache is None:
            return
        self.cache.reset()
        for table in (*self.tables.values(), *self.swapped.values()):
            table.parent = None
            self._retention.schedule(table)

    # Two tiers

    def can_swap_out(self, seq_or_group: SequenceLike | SequenceGroup) -> bool:
        """Whether the group is on the GPU and the CPU pool has a block for each of its blocks."""
        seqs = members(seq_or_group)
        if any(seq.seq_id in self.swapped for seq in seqs):
            return False
        tables = [self._registry.on_gpu(seq) for seq in seqs]
        return len(distinct_blocks(tables, self.config.block_size)) <= self.cpu.num_free

    def swap_out(self, seq_or_group: SequenceLike | SequenceGroup) -> Pairs:
        """Move a group to the CPU pool: (GPU block, CPU block) for each distinct block.

        Published blocks stay cached. The copies come first in a step, so the GPU blocks can be
        given to others at once.
        """
        tables = [self._registry.on_gpu(seq) for seq in members(seq_or_group)]
        num_blocks = len(distinct_blocks(tables, self.config.block_size))
        if num_blocks > self.cpu.num_free:
            raise NoFreeBlocksError(num_blocks, self.cpu.num_free, "CPU pool")
        held = [table.held() for table in tables]
        pairs = move(tables, self.gpu, self.cpu, self.config.block_size)
        for table, blocks in zip(tables, held, strict=True):
            self._retention.leave(table, blocks)
            self.swapped[table.seq_id] = self.tables.pop(table.seq_id)
            self.history.add("swap out", table.seq_id, blocks)
        return pairs

    def can_swap_in(self, seq_or_group: SequenceLike | SequenceGroup) -> AllocStatus:
        """As `can_allocate`, watermark included, for a group that is swapped out."""
        tables = [self._registry.swapped_out(seq) for seq in members(seq_or_group)]
        num_blocks = len(distinct_blocks(tables, self.config.block_size))
        return self.admission.status(num_blocks, num_blocks, self.gpu.num_free)

    def swap_in(self, seq_or_group: SequenceLike | SequenceGroup) -> Pairs:
        """Move a group back: (CPU block, GPU block) for each distinct block.

        NoFreeBlocksError exactly when `can_swap_in` is not OK.
        """
        tables = [self._registry.swapped_out(seq) for seq in members(seq_or_group)]
        num_blocks = len(distinct_blocks(tables, self.config.block_size))
        if self.can_swap_in(seq_or_group) is not AllocStatus.OK:
            raise NoFreeBlocksError(num_blocks, self.admission.available(self.gpu.num_free))
        held = [table.held() for table in tables]
        pairs = move(tables, self.cpu, self.gpu, self.config.block_size)
        for table, blocks in zip(tables, held, strict=True):
            self.cpu.free(blocks)
            table.writable_until = table.quiet_until = 0
            self.tables[table.seq_id] = self.swapped.pop(table.seq_id)
            self.history.add("swap in", table.seq_id, table.held())
        return pairs

    def resize(self, num_blocks: int) -> Pairs:
        """Make the GPU pool larger, or smaller to give memory back.

        Returns the moves (source, destination) of blocks in use that lay above the new end; they
        must be made before that memory goes. NoFreeBlocksError when more blocks are in use.
        """
        moved = self.gpu.resize(num_blocks)
        for table in self.tables.values():
            for index, block in enumerate(table.blocks):
                if block in moved:
                    table.blocks[index] = moved[block]
                    self._batches.changed(table, index)
        self.config = replace(self.config, num_gpu_blocks=num_blocks)
        self.history.add("resize", None, list(moved.values()))
        return list(moved.items())

    # The end, and looking

    def free(self, seq: SequenceLike) -> None:
        """Give back every block of a sequence, on the GPU or swapped out."""
        table = self._registry.anywhere(seq)
        if self.tables.pop(table.seq_id, None):
            self._retention.leave(table, table.held())
        else:
            del self.swapped[table.seq_id]
            self.cpu.free(table.held())
        self.history.add("free", table.seq_id, table.held())

    def block_table(self, seq: SequenceLike) -> list[int]:
        """The block ids of a sequence in order, ceil(len / block_size) of them."""
        table = self._registry.on_gpu(seq)
        return table.blocks[: -(-table.num_tokens // self.config.block_size)]

    def build_batch(
        self,
        seqs: ListLike[SequenceLike],
        query_lens: ListLike[int] | None = None,
        *,
        context_lens: ListLike[int] | None = None,
        device: Any = "cpu",
    ) -> Batch:
        """Describe a batch in which sequence i computes its tokens [c, c + q).

        query_lens    q of each sequence, default 1
        context_lens  c of each sequence, default len - q
        """
        tables = self._registry.all_on_gpu(seqs)
        ends, counts = resolve_queries(tables, query_lens, context_lens, self.config.block_size)
        return self._batches.build(tables, ends, counts, device=device)

    def stats(self) -> CacheStats:
        """Counters of both pools, the prefix cache and the waste inside blocks."""
        return collect_stats(self)

    def check_invariants(self) -> None:
        """Count everything again; InvariantError names the block and the owner that disagree."""
        check_invariants(self)

    def snapshot(self) -> dict[str, Any]:
        """All of the state as plain data: equal snapshots mean equal behaviour from here on."""
        return snapshot(self)

    def record(self, path: str | PathLike[str]) -> Journal:
        """Write every call from now on to a file, as JSON lines, until the journal is closed.

        `python -m paged debug FILE` replays it. The manager must not have been used yet.
        """
        return Journal(self, path)

    def __repr__(self) -> str:
        gpu, cpu = self.gpu, self.cpu
        cached = self.cache.num_cached if self.cache else 0
        return (
            f"BlockSpaceManager({len(self.tables)} sequences in {gpu.num_used} of "
            f"{gpu.num_blocks} GPU blocks of {self.config.block_size} tokens, {cached} cached; "
            f"{len(self.swapped)} in {cpu.num_used} of {cpu.num_blocks} CPU blocks)"
        )

    # How it is done

    def _out_of_step(
        self, seq: SequenceLike, table: BlockTable, earlier: list[BlockTable]
    ) -> ValueError:
        if table in earlier:
            return ValueError("seqs names a sequence twice")
        return ValueError(
            f"sequence {seq.seq_id!r} has {len(seq)} tokens and slots for {table.num_tokens}; "
            f"call append_slots first"
        )
