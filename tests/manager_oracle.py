"""A manager, a model of it and a fake cache, moved together; every call is checked in full.

`CheckedManager` has one method per manager call. Each predicts the answer from plain lists, asks
`can_X`, makes the call, moves the fake cache as the contract says, and then checks everything:
tables, contents, counters, invariants, and that a refused call changed nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from manager_model import Live, ManagerModel, ceil_div

from paged import AllocStatus, NoFreeBlocksError, Sequence, SequenceGroup


class CheckedManager(ManagerModel):
    """See the module's docstring."""

    def attempt(self, possible: bool | None, call: Any, *seqs: Sequence) -> Any:
        """Make a call that must succeed (True), must be refused (False) or may do either (None)."""
        tokens = [list(seq.token_ids) for seq in seqs]
        before = self.manager.snapshot()
        try:
            result = call()
        except NoFreeBlocksError as error:
            assert possible is not True, f"refused though it fits: {error}"
            assert error.needed > error.available >= 0, error
            assert self.manager.snapshot() == before, "a refused call changed something"
            assert [list(seq.token_ids) for seq in seqs] == tokens
            return None
        assert possible is not False, "succeeded though it cannot fit"
        return result

    def begin(self, call: str) -> None:
        """Count a call; until `check` has passed, the model and the manager may disagree."""
        self.calls[call] += 1
        self.sound = False

    def ask(self, question: Any, *args: Any) -> Any:
        """Ask a can_X; asking must change nothing."""
        before = self.manager.snapshot()
        answer = question(*args)
        assert self.manager.snapshot() == before, "asking changed something"
        return answer

    def new_sequences(
        self, tokens: list[int], num_seqs: int, salt: Any, extra_key: Any
    ) -> list[Sequence]:
        """Equal sequences under new ids, not yet known to the manager."""
        first = self.next_id
        self.next_id += num_seqs
        return [
            Sequence(seq_id, tokens, salt=salt, extra_key=extra_key)
            for seq_id in range(first, self.next_id)
        ]

    def allocate(self, seqs: list[Sequence]) -> list[Live]:
        """Admit a group of equal sequences; [] when it was refused."""
        self.begin("allocate")
        target = seqs[0] if len(seqs) == 1 else SequenceGroup("group", seqs)
        tokens = list(seqs[0].token_ids)
        root = self.names.root(seqs[0].salt, seqs[0].extra_key)
        values = self.names.extend(root, tokens)

        refs = self.refs()
        most = max(0, (len(tokens) - 1) // self.block_size)
        hits = self.prefix.hits(self.contents(values)[:most])
        status = self.ask(self.manager.can_allocate, target)
        assert status is self.admission(len(tokens), hits)
        if len(seqs) == 1:
            lookahead = self.block_size + 1
            answer = self.ask(self.manager.can_allocate, target, lookahead)
            assert answer is self.admission(len(tokens) + lookahead, hits)
        possible = status is AllocStatus.OK
        if not self.attempt(possible, lambda: self.manager.allocate(target) is None):
            self.check()
            return []

        self.prefix.hold(hits)
        table = self.manager.block_table(seqs[0])
        assert table[: len(hits)] == hits, "hit blocks differ"
        held = refs + Counter(hits)
        self.take(table[len(hits) :], held)
        new = []
        for seq in seqs:
            h = Live(seq, root)
            h.values, h.blocks = list(values), list(table)
            h.slotted = len(tokens)
            h.written = h.computed = len(hits) * self.block_size
            h.publishes = self.config.enable_prefix_caching
            h.published = len(hits)
            h.parent = self.prefix.by_block[hits[-1]] if hits else None
            self.queried, self.hit = self.queried + len(tokens), self.hit + h.written
            assert self.manager.num_cached_tokens(seq) == h.written
            self.live[seq.seq_id] = h
            new.append(h)
        self.check()
        return new

    def admission(self, num_tokens: int, hits: list[int]) -> AllocStatus:
        """The contract's answer for a sequence of that many tokens and these cached blocks."""
        refs, num_blocks = self.refs(), ceil_div(num_tokens, self.block_size)
        if num_blocks > self.total:
            return AllocStatus.NEVER
        left = self.num_free() - sum(not refs[b] for b in hits) - (num_blocks - len(hits))
        return AllocStatus.OK if left >= (self.reserve if refs else 0) else AllocStatus.LATER

    def slots_needed(self, h: Live, num_tokens: int, refs: Counter[int]) -> tuple[int, int]:
        """Fewest and most blocks that slots for `num_tokens` can take; `refs` then follows."""
        new = max(0, ceil_div(num_tokens, self.block_size) - len(h.blocks))
        fewest = most = new
        tail = h.slotted // self.block_size
        if num_tokens > h.slotted and tail < len(h.blocks):
            for block in h.blocks[tail:]:
                if refs[block] > 1:
                    refs[block] -= 1
                    # Only what holds tokens must be copied; lookahead blocks may be shared or not.
                    most += 1
                    fewest += block == h.blocks[tail] and h.slotted % self.block_size > 0
                elif block in self.prefix.by_block:
                    most += 1  # a published tail, shared when it was trimmed: copied or withdrawn
        return fewest, most

    def possible(self, needed: tuple[int, int], free: int) -> bool | None:
        """Whether the free blocks suffice; None where the contract leaves it open."""
        fewest, most = needed
        return True if most <= free else False if fewest > free else None

    def append(self, h: Live, tokens: list[int], lookahead: int) -> list[tuple[int, int]] | None:
        """Append tokens and give them slots; None when refused (the tokens stay, without slots)."""
        self.begin("append")
        for token in tokens:
            h.seq.append_token(token)
        h.values += self.names.extend(h.values[-1] if h.values else h.root, tokens)
        needed = self.slots_needed(h, len(h.seq) + lookahead, self.refs())
        possible = self.possible(needed, self.num_free())
        answer = self.ask(self.manager.can_append_slots, h.seq, lookahead)
        assert possible is None or answer is possible, (answer, needed, self.num_free())
        copies = self.attempt(
            answer, lambda: self.manager.append_slots(h.seq, num_lookahead_slots=lookahead), h.seq
        )
        if copies is not None:
            self.adopt([h], copies, lookahead)
            before = self.manager.snapshot()
            assert self.manager.append_slots(h.seq) == [], "appending again is no no-op"
            assert self.manager.snapshot() == before
        self.check()
        return copies

    def adopt(self, handles: list[Live], copies: list[tuple[int, int]], lookahead: int = 0) -> None:
        """Follow successful appends to `handles`, whose copies came back in one list."""
        before, targets = self.refs(), dict(copies)
        assert len(copies) == len({destination for _, destination in copies})
        fresh, given_up = [], []
        sources = Counter(source for source, _ in copies)
        destinations = {destination for _, destination in copies}
        own = []
        for h in handles:
            blocks = self.full_blocks(h)
            first = h.slotted // self.block_size
            assert blocks[:first] == h.blocks[:first], "blocks that hold tokens changed"
            for k, block in enumerate(blocks[first:], first):
                old = h.blocks[k] if k < len(h.blocks) else None
                if block == old:
                    continue
                fresh.append(block)
                if old is not None:
                    assert sources[old] and block in destinations, "replaced without a copy"
                    given_up.append(old)
            if len(h.seq) + lookahead > h.slotted:
                own += blocks[first : ceil_div(len(h.seq) + lookahead, self.block_size)]
            h.blocks = blocks
            h.slotted = len(h.seq)
        assert sources == Counter(given_up), (copies, given_up)
        assert targets.keys() == set(given_up)
        self.take_and_copy(fresh, copies, before)
        self.release(given_up, before)
        after = self.refs()
        for block in own:
            assert after[block] == 1, "a new slot lies in a shared block"
            self.prefix.withdraw(block)

    def take_and_copy(
        self, fresh: list[int], copies: list[tuple[int, int]], before: Counter[int]
    ) -> None:
        """Poison what is new, then copy: a copy's source is never a new block."""
        assert not {source for source, _ in copies} & set(fresh)
        self.take(fresh, before)
        self.cache.copy(copies)

    def step(self, handles: list[Live], tokens: list[int]) -> bool:
        """One decode step over sequences whose tokens are all written."""
        self.begin("step")
        refs, before = self.refs(), self.refs()
        fewest = most = freed = 0
        for h in handles:
            for block in h.blocks[: self.window_drops(len(h.seq))]:
                if block >= 0:
                    refs[block] -= 1
                    freed += refs[block] == 0
        for h in handles:
            low, high = self.slots_needed(h, len(h.seq) + 1, refs)
            fewest, most = fewest + low, most + high
        free = self.num_free()
        possible = self.possible((fewest, most), free + freed)  # what it drops it may use
        seqs = [h.seq for h in handles]
        done = self.attempt(possible, lambda: self.manager.step(seqs, tokens), *seqs)
        if done is None:
            self.check()
            return False
        copies, batch = done
        for h, token in zip(handles, tokens, strict=True):
            assert list(h.seq.token_ids)[-1] == token
            self.note_computed(h, len(h.seq) - 1, before)
            h.values += self.names.extend(h.values[-1] if h.values else h.root, [token])
        self.adopt(handles, copies)
        self.check_batch(batch, handles, [1] * len(handles), [len(h.seq) - 1 for h in handles])
        self.cache.write(batch.slot_mapping.tolist(), [h.values[-1] for h in handles])
        for h in handles:
            h.written = len(h.seq)
        self.check()
        return True

    def compute(self, h: Live, num_tokens: int) -> None:
        """Write K/V of the next tokens through build_batch's slots, as a prefill chunk does."""
        self.begin("compute")
        start, end = h.written, h.written + num_tokens
        batch = self.manager.build_batch([h.seq], [num_tokens], context_lens=[start])
        self.check_batch(batch, [h], [num_tokens], [start])
        self.cache.write(batch.slot_mapping.tolist(), h.values[start:end])
        h.written = end
        self.check()

    def mark(self, h: Live, num_tokens: int) -> None:
        """Say that K/V of the first tokens are written."""
        self.begin("mark_computed")
        before = self.refs()
        self.manager.mark_computed(h.seq, num_tokens)
        self.note_computed(h, num_tokens, before)
        self.check()

    def note_computed(self, h: Live, num_tokens: int, before: Counter[int]) -> None:
        """Publish full blocks, then give back what fell behind the window."""
        if num_tokens < h.computed:
            return  # nothing new was said
        h.computed = num_tokens
        contents = self.contents(h.values[: h.computed])
        for k in range(h.published, len(contents)):
            h.publishes = h.publishes and self.prefix.is_live(h.parent)
            if h.publishes:
                h.parent = self.prefix.publish(contents[k], h.parent, h.blocks[k])
        h.published = max(h.published, len(contents))
        drops = self.window_drops(num_tokens)
        gone = h.blocks[:drops]
        h.blocks[:drops] = [-1] * len(gone)
        h.dropped = max(h.dropped, len(gone))
        self.release(gone, before)

    def fork(self, h: Live) -> Live:
        """A child that shares every block."""
        self.begin("fork")
        seq = h.seq.fork(self.next_id)
        self.next_id += 1
        self.manager.fork(h.seq, seq)
        child = Live(seq, h.root)
        child.values, child.blocks = list(h.values), self.full_blocks_of(seq)
        assert (
            child.blocks[: ceil_div(h.slotted, self.block_size)]
            == (h.blocks[: ceil_div(h.slotted, self.block_size)])
        )
        child.slotted, child.written, child.computed = h.slotted, h.written, h.computed
        child.dropped = h.dropped
        child.published, child.parent, child.publishes = h.published, h.parent, h.publishes
        self.live[seq.seq_id] = child
        self.check()
        return child

    def branch(self, h: Live, tokens: list[int], num_tokens: int) -> Live | None:
        """A child with other tokens after the first `num_tokens`, whose blocks it shares."""
        self.begin("branch")
        seq = Sequence(
            self.next_id,
            list(h.seq.token_ids)[:num_tokens] + tokens,
            salt=h.seq.salt,
            extra_key=h.seq.extra_key,
        )
        self.next_id += 1
        full, computed = num_tokens // self.block_size, min(h.computed, num_tokens)
        dropped = min(h.dropped, full)
        if num_tokens > h.slotted or dropped > self.window_drops(computed):
            before = self.manager.snapshot()
            try:
                self.manager.fork(h.seq, seq, num_tokens)
            except ValueError:
                assert self.manager.snapshot() == before
                self.check()
                return None
            raise AssertionError("shared blocks without slots, or behind the window")
        num_new = ceil_div(len(seq), self.block_size) - full
        before = self.refs()
        possible = num_new <= self.num_free()
        if not self.attempt(possible, lambda: self.manager.fork(h.seq, seq, num_tokens) is None):
            self.check()
            return None
        child = Live(seq, h.root)
        child.values = h.values[:num_tokens]
        child.values += self.names.extend(child.values[-1] if num_tokens else h.root, tokens)
        child.blocks = self.full_blocks_of(seq)
        assert child.blocks[:full] == h.blocks[:full]
        self.take(child.blocks[full:], before)
        child.slotted, child.dropped = len(seq), dropped
        child.computed, child.written = computed, min(h.written, num_tokens)
        child.published = min(h.published, full)
        child.parent, child.publishes = h.parent, h.publishes
        for _ in range(child.published, h.published):
            child.publishes = child.publishes and self.prefix.is_live(child.parent)
            child.parent = child.parent.parent if child.publishes else None
        self.live[seq.seq_id] = child
        self.check()
        return child

    def trim(self, h: Live, num_tokens: int) -> bool:
        """Cut a sequence short; False when that needs a block dropped behind the window."""
        self.begin("trim")
        before, kept = self.refs(), ceil_div(num_tokens, self.block_size)
        dropped = sum(block < 0 for block in h.blocks[:kept])
        if num_tokens < len(h.seq) and dropped > self.window_drops(num_tokens):
            snapshot, tokens = self.manager.snapshot(), list(h.seq.token_ids)
            try:
                self.manager.trim(h.seq, num_tokens)
            except ValueError:
                assert self.manager.snapshot() == snapshot and list(h.seq.token_ids) == tokens
                self.check()
                return False
            raise AssertionError("trimmed into blocks that were dropped behind the window")
        self.manager.trim(h.seq, num_tokens)
        del h.values[num_tokens:]
        old, h.blocks = h.blocks, self.full_blocks(h)  # lookahead blocks may be kept or not
        assert h.blocks[:kept] == old[:kept] and len(h.blocks) <= len(old)
        h.slotted = min(h.slotted, num_tokens)
        h.written = min(h.written, num_tokens)
        h.computed = min(h.computed, num_tokens)
        h.dropped = min(h.dropped, kept)
        tail = num_tokens // self.block_size
        while h.published > tail:
            h.published -= 1
            h.publishes = h.publishes and h.parent is not None and self.prefix.is_live(h.parent)
            h.parent = h.parent.parent if h.publishes else None
        if num_tokens % self.block_size and tail < len(h.blocks) and before[h.blocks[tail]] == 1:
            self.prefix.withdraw(h.blocks[tail])
        self.release(old[len(h.blocks) :], before)
        self.check()
        return True

    def swap_out(self, handles: list[Live]) -> bool:
        """Move a group to the CPU tier."""
        self.begin("swap_out")
        group = SequenceGroup("swap", [h.seq for h in handles])
        distinct = {b for h in handles for b in h.blocks if b >= 0}
        least = {
            b for h in handles for b in h.blocks[: ceil_div(h.slotted, self.block_size)] if b >= 0
        }
        free = self.num_cpu_free()
        answer = self.ask(self.manager.can_swap_out, group)
        assert answer or len(distinct) > free
        assert not answer or len(least) <= free
        pairs = self.attempt(answer, lambda: self.manager.swap_out(group))
        if pairs is not None:
            moved = dict(pairs)
            assert len(moved) == len(pairs) and least <= moved.keys() <= distinct
            assert len(set(moved.values())) == len(pairs)
            in_use = {b for h in self.swapped() for b in h.cpu}
            assert not in_use & set(moved.values()), "a CPU block in use was overwritten"
            assert all(0 <= b < self.config.num_cpu_blocks for b in moved.values())
            self.cache.swap_out(pairs)
            for h in handles:
                before, blocks = self.refs(), h.blocks
                kept = [b for b in blocks if b < 0 or b in moved]
                h.cpu, h.blocks = [moved.get(b, -1) for b in kept], []
                self.leave(h, before, blocks)
        self.check()
        return pairs is not None

    def swap_in(self, handles: list[Live]) -> bool:
        """Move a group back to the GPU."""
        self.begin("swap_in")
        group = SequenceGroup("swap", [h.seq for h in handles])
        distinct = {b for h in handles for b in h.cpu if b >= 0}
        refs, free = self.refs(), self.num_free()
        status = self.ask(self.manager.can_swap_in, group)
        assert (status is AllocStatus.NEVER) == (len(distinct) > self.total), status
        if status is not AllocStatus.OK:
            assert len(distinct) > free - (self.reserve if refs else 0)
        pairs = self.attempt(status is AllocStatus.OK, lambda: self.manager.swap_in(group))
        if pairs is not None:
            moved = dict(pairs)
            assert moved.keys() == distinct and len(pairs) == len(distinct)
            self.take([gpu for _, gpu in pairs], refs)
            self.cache.swap_in(pairs)
            for h in handles:
                h.blocks, h.cpu = [moved.get(b, -1) for b in h.cpu], None
        self.check()
        return pairs is not None

    def resize(self, num_blocks: int) -> bool:
        """Grow or shrink the GPU pool; blocks in use above the new end move below it."""
        self.begin("resize")
        before = self.refs()
        possible = len(before) <= num_blocks
        pairs = self.attempt(possible, lambda: self.manager.resize(num_blocks))
        if pairs is not None:
            moved = dict(pairs)
            assert len(moved) == len(pairs)
            assert set(moved) == {block for block in before if block >= num_blocks}
            for block in range(num_blocks, self.total):
                if not before[block]:
                    self.prefix.withdraw(block)
            self.total = num_blocks
            self.reserve = int(self.config.watermark * num_blocks)
            kept = Counter({block: n for block, n in before.items() if block < num_blocks})
            self.cache.resize(max(len(self.cache.gpu), num_blocks))
            self.take(list(moved.values()), kept)
            self.cache.copy(pairs)
            self.cache.resize(num_blocks)
            self.prefix.move(moved)
            for h in self.running():
                h.blocks = [moved.get(block, block) for block in h.blocks]
        self.check()
        return pairs is not None

    def free(self, h: Live) -> None:
        """End a sequence at whatever stage it is."""
        self.begin("free")
        before = self.refs()
        self.manager.free(h.seq)
        del self.live[h.seq.seq_id]
        if not h.swapped:
            self.leave(h, before, h.blocks)
        self.check()

    def reset(self) -> None:
        """Forget all shareable content."""
        self.begin("reset_prefix_cache")
        self.manager.reset_prefix_cache()
        self.prefix.clear()
        for h in self.live.values():
            h.publishes = False
        self.check()

    def finish(self) -> None:
        """Free everything: nothing may stay used."""
        for h in list(self.live.values()):
            self.free(h)
        stats = self.manager.stats()
        assert stats.gpu.num_used == stats.cpu.num_used == 0
        assert stats.gpu.num_free == self.total
