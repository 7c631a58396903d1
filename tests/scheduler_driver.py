"""A scheduler, its manager and a fake cache, driven together; every step is checked in full.

`Driver.step` does what an engine does: schedule, move blocks in the contract's order, write what
the rows compute, sample, update. The cache holds the name of the whole prefix at every slot, so a
block that was moved late, twice or not at all shows. Whatever nobody holds is poisoned between
two steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fake_cache import FakeCache, PrefixNames

from paged import (
    BlockSpaceManager,
    CacheConfig,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
)


def ceil_div(a: int, b: int) -> int:
    """Blocks for so many tokens."""
    return -(-a // b)


class Driver:
    """See the module's docstring."""

    def __init__(self, cache_config: CacheConfig, config: SchedulerConfig) -> None:
        self.config = config
        self.manager = BlockSpaceManager(cache_config)
        self.scheduler = Scheduler(config, self.manager)
        self.block_size = cache_config.block_size
        self.num_blocks = cache_config.num_gpu_blocks
        self.names = PrefixNames()
        self.cache = FakeCache(self.num_blocks, cache_config.num_cpu_blocks, self.block_size)
        self.groups: dict[Any, SequenceGroup] = {}
        self.live: dict[Any, Sequence] = {}
        self.group_of: dict[Any, Any] = {}  # seq_id -> request_id
        self.preempted: Counter[str] = Counter()
        self.returning: set[Any] = set()  # request_ids that were preempted once
        self.rejected: dict[Any, str] = {}
        self.computed_tokens = 0
        self.steps = 0
        self.copies = 0

    # Requests

    def add(
        self,
        request_id: Any,
        tokens: list[int],
        n: int = 1,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        salt: Any = None,
    ) -> SequenceGroup:
        """A group of `n` equal sequences named (request_id, 0), (request_id, 1), ..."""
        seqs = [Sequence((request_id, i), tokens, salt=salt) for i in range(n)]
        group = SequenceGroup(request_id, seqs, priority=priority, arrival_time=arrival_time)
        self.scheduler.add(group)
        self.groups[request_id] = group
        for seq in seqs:
            self.live[seq.seq_id] = seq
            self.group_of[seq.seq_id] = request_id
        return group

    def abort(self, request_id: Any) -> None:
        """A request that nobody waits for any more."""
        self.scheduler.abort(request_id)
        self.forget(request_id)
        self.manager.check_invariants()

    def fork(self, parent: Sequence, seq_id: Any) -> Sequence:
        """A child of a live sequence."""
        child = parent.fork(seq_id)
        self.scheduler.fork(parent, child)
        self.live[seq_id] = child
        self.group_of[seq_id] = self.group_of[parent.seq_id]
        self.manager.check_invariants()
        return child

    def members(self, request_id: Any) -> list[Sequence]:
        """The live sequences of a group."""
        return [seq for seq in self.live.values() if self.group_of[seq.seq_id] == request_id]

    def forget(self, request_id: Any) -> None:
        """A group is gone."""
        for seq in self.members(request_id):
            del self.live[seq.seq_id]
        del self.groups[request_id]
        self.returning.discard(request_id)

    # Steps

    def begin(self) -> SchedulerOutput:
        """Schedule, move and write: all of a step that comes before sampling."""
        self.poison_what_nobody_holds()
        output = self.scheduler.schedule()
        self.manager.check_invariants()
        self.preempted.update(output.preempted.values())
        self.returning.update(output.preempted)
        self.check_rejections(output)
        self.check_movements(output)
        self.cache.swap_out(output.swap_out)
        self.cache.swap_in(output.swap_in)
        self.cache.copy(output.copies)
        self.copies += len(output.copies)
        self.check_rows(output)
        self.write(output)
        self.check_order()
        self.check_contents()
        self.steps += 1
        assert output.seqs or output.rejected or not self.scheduler.has_unfinished, "nothing moves"
        return output

    def end(
        self, output: SchedulerOutput, tokens: dict[Any, int], finished: list[Any] = ()
    ) -> None:
        """The step's tokens are known."""
        self.scheduler.update(output, tokens, finished)
        for seq_id in finished:
            seq = self.live.pop(seq_id, None)
            if seq is not None and not self.members(self.group_of[seq_id]):
                del self.groups[self.group_of[seq_id]]
        self.manager.check_invariants()
        self.check_contents()

    def step(self, finish_at: int | None = None, token: Any = len) -> SchedulerOutput:
        """A whole step; sequences with `finish_at` tokens, the new one included, are finished."""
        output = self.begin()
        at_end = self.at_end(output)
        tokens = {seq.seq_id: token(seq) for seq in at_end}
        finished = [seq.seq_id for seq in at_end if finish_at and len(seq) + 1 >= finish_at]
        self.end(output, tokens, finished)
        return output

    def run(self, until: Any, finish_at: int | None = None) -> SchedulerOutput | None:
        """Steps until a condition holds, at most 100; returns the last."""
        output = None
        for _ in range(100):
            if until():
                return output
            output = self.step(finish_at)
        raise AssertionError("100 steps were not enough")

    def finish(self, finish_at: int) -> None:
        """Steps until nobody is left."""
        self.run(lambda: not self.scheduler.has_unfinished, finish_at)
        self.check_nothing_is_left()

    def at_end(self, output: SchedulerOutput) -> list[Sequence]:
        """The live sequences of which a token is to be sampled."""
        return [
            seq
            for seq, query_len, context_len in zip(
                output.seqs, output.query_lens, output.context_lens, strict=True
            )
            if query_len + context_len == len(seq) and self.live.get(seq.seq_id) is seq
        ]

    # The cache

    def values(self, seq: Sequence) -> list[int]:
        """What the cache must hold for each token of a sequence."""
        return self.names.extend(self.names.root(seq.salt, seq.extra_key), seq.token_ids)

    def write(self, output: SchedulerOutput) -> None:
        """K and V of all rows."""
        slots, values = [], []
        for seq, query_len, context_len in zip(
            output.seqs, output.query_lens, output.context_lens, strict=True
        ):
            table = self.manager.block_table(seq)
            slots += [
                table[i // self.block_size] * self.block_size + i % self.block_size
                for i in range(context_len, context_len + query_len)
            ]
            values += self.values(seq)[context_len : context_len + query_len]
        assert len(set(slots)) == len(slots), "two rows write one slot"
        for slot in slots:
            assert self.manager.gpu.ref_counts[slot // self.block_size] > 0
        self.cache.write(slots, values)
        for seq, query_len, context_len in zip(
            output.seqs, output.query_lens, output.context_lens, strict=True
        ):
            self.check_blocks(seq, self.manager.tables, context_len + query_len)
        self.computed_tokens += len(slots)

    def poison_what_nobody_holds(self) -> None:
        """A free block without content may hold anything."""
        manager = self.manager
        cached = set(manager.cache.cached_blocks()) if manager.cache else set()
        self.cache.poison(
            block
            for block in range(self.num_blocks)
            if not manager.gpu.ref_counts[block] and block not in cached
        )
        for block in manager.cpu.free_blocks():
            self.cache.cpu[block] = [None] * self.block_size

    # Checks

    def check_contents(self) -> None:
        """Whoever has computed tokens reads back exactly these."""
        for seq in self.live.values():
            for tables in (self.manager.tables, self.manager.swapped):
                if seq.seq_id in tables:
                    self.check_blocks(seq, tables, tables[seq.seq_id].num_computed)

    def check_blocks(self, seq: Sequence, tables: Any, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a sequence are where its table says."""
        tier = self.cache.gpu if tables is self.manager.tables else self.cache.cpu
        table, values = tables[seq.seq_id], self.values(seq)[:num_tokens]
        for index in range(table.num_dropped, ceil_div(num_tokens, self.block_size)):
            wanted = values[index * self.block_size : (index + 1) * self.block_size]
            found = tier[table.blocks[index]][: len(wanted)]
            assert found == wanted, f"foreign tokens in block {index} of {seq.seq_id}"

    def check_rows(self, output: SchedulerOutput) -> None:
        """The limits, and that a group's sequences reach their end together."""
        seqs, query_lens, context_lens = output.seqs, output.query_lens, output.context_lens
        assert len(seqs) == len(query_lens) == len(context_lens) == len(output.reaches_end)
        assert len(seqs) <= self.config.max_num_seqs
        assert sum(query_lens) <= self.config.max_num_batched_tokens
        assert output.num_scheduled_tokens == sum(query_lens)
        assert len({seq.seq_id for seq in seqs}) == len(seqs)
        running = {group.request_id for group in self.scheduler.running}
        ends: dict[Any, int] = {}
        for row, seq in enumerate(seqs):
            assert self.live[seq.seq_id] is seq
            request_id = self.group_of[seq.seq_id]
            assert request_id in running
            end = query_lens[row] + context_lens[row]
            assert 0 < end <= len(seq)
            assert output.reaches_end[row] == (end == len(seq))
            ends[request_id] = ends.get(request_id, 0) + (end == len(seq))
            if query_lens[row] == 0:
                assert end == len(seq) and self.group_of[seqs[row - 1].seq_id] == request_id
                assert seqs[row - 1].token_ids == seq.token_ids
            elif context_lens[row] == len(seq) - 1 and len(self.members(request_id)) == 1:
                self.check_lookahead(seq)
            if not self.config.enable_chunked_prefill and request_id not in self.returning:
                assert end == len(seq), "a prompt in parts"
        for request_id, number in ends.items():
            assert number in (0, len(self.members(request_id))), "a group that comes apart"

    def check_lookahead(self, seq: Sequence) -> None:
        """A decoding sequence may append that many tokens without another block."""
        table = self.manager.tables[seq.seq_id]
        if len(seq) > 1 and table.num_computed > table.num_cached:
            target = len(seq) + self.config.num_lookahead_slots
            assert len(table.blocks) * self.block_size >= target

    def check_movements(self, output: SchedulerOutput) -> None:
        """The pairs of a step do not depend on each other, and none is idle."""
        manager = self.manager
        filled_out, filled_in, copied = (
            [destination for _, destination in pairs]
            for pairs in (output.swap_out, output.swap_in, output.copies)
        )
        assert not output.swap_out or not output.swap_in
        assert len(set(filled_out)) == len(filled_out)
        assert len(set(filled_in + copied)) == len(filled_in + copied)
        assert not set(filled_out) & {source for source, _ in output.swap_in}
        assert not set(filled_in + copied) & {source for source, _ in output.copies}
        assert all(manager.cpu.ref_counts[block] for block in filled_out)
        assert all(manager.gpu.ref_counts[block] for block in filled_in + copied)

    def check_order(self) -> None:
        """Queues are in order of urgency, and every live group is in one of them."""
        scheduler = self.scheduler
        queues = scheduler.waiting, scheduler.running, scheduler.swapped
        assert Counter(group.request_id for queue in queues for group in queue) == Counter(
            self.groups.keys()
        )
        if self.config.policy == "priority":
            for queue in queues:
                priorities = [group.priority for group in queue]
                assert priorities == sorted(priorities)
            urgencies = [[group.priority for group in queue] for queue in queues[1:]]
            assert max(urgencies[0], default=0) <= min(urgencies[1], default=9), "overtaken"
        for queue in queues[1:]:
            order = [
                (group.priority if self.config.policy == "priority" else 0, group.arrival_time)
                for group in queue
            ]
            assert order == sorted(order)

    def check_rejections(self, output: SchedulerOutput) -> None:
        """Only what can never run is rejected."""
        for request_id, reason in output.rejected.items():
            seqs = self.members(request_id)
            lookahead = self.config.num_lookahead_slots
            blocks = sum(ceil_div(len(seq) + lookahead, self.block_size) for seq in seqs)
            too_many = len(seqs) > min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
            too_long = not self.config.enable_chunked_prefill and (
                len(seqs[0]) > self.config.max_num_batched_tokens
            )
            assert blocks > self.num_blocks or too_many or too_long, reason
            assert any(character.isdigit() for character in reason)
            assert request_id not in output.preempted
            self.rejected[request_id] = reason
            self.forget(request_id)
        self.manager.check_invariants()

    def check_nothing_is_left(self) -> None:
        """All requests have ended."""
        assert not self.live and not self.groups and not self.scheduler.has_unfinished
        stats = self.manager.stats()
        assert stats.gpu.num_used == stats.cpu.num_used == 0
        assert not self.scheduler.waiting + self.scheduler.running + self.scheduler.swapped
        assert self.scheduler.num_preemptions == {
            kind: self.preempted[kind] for kind in ("swap", "recompute")
        }
        assert self.scheduler.num_rejected == len(self.rejected)


def drive(
    num_blocks: int = 8,
    *,
    block_size: int = 4,
    num_cpu_blocks: int = 0,
    caching: bool = True,
    watermark: float = 0.0,
    **config: Any,
) -> Driver:
    """A driver without a watermark unless one is asked for: small pools stay exact."""
    return Driver(
        CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=caching,
            watermark=watermark,
        ),
        SchedulerConfig(**config),
    )


def rows(output: SchedulerOutput) -> list[tuple[Any, int, int]]:
    """(request_id, query_len, context_len) of each row."""
    return [
        (seq.seq_id[0], query_len, context_len)
        for seq, query_len, context_len in zip(
            output.seqs, output.query_lens, output.context_lens, strict=True
        )
    ]
