"""A naive model of the block manager, and every check that must hold between two calls.

The model keeps plain lists: each sequence's tokens, blocks and progress. References, free blocks
and fragmentation are counted from them anew whenever they are needed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fake_cache import FakeCache, PrefixNames
from prefix_model import Entry, PrefixModel

from paged import BlockSpaceManager, CacheConfig, Sequence


def ceil_div(a: int, b: int) -> int:
    """Blocks for so many tokens."""
    return -(-a // b)


class Live:
    """One live sequence and what we know about it."""

    def __init__(self, seq: Sequence, root: int) -> None:
        self.seq = seq
        self.root = root
        self.values: list[int] = []  # the name of every token's prefix
        self.slotted = 0  # tokens that have a slot
        self.written = 0  # tokens whose K/V are in the fake cache
        self.computed = 0  # tokens the manager was told are written
        self.dropped = 0  # leading blocks given back behind the window
        self.blocks: list[int] = []  # -1 behind the window; lookahead blocks included
        self.cpu: list[int] | None = None  # the blocks while swapped out
        self.published = 0  # leading full blocks that were offered to the prefix cache
        self.parent: Entry | None = None  # the last one's entry
        self.publishes = True  # until the content before it is forgotten

    @property
    def swapped(self) -> bool:
        """Whether the blocks are on the CPU."""
        return self.cpu is not None


class ManagerModel:
    """The manager under test, the model of it, and the fake cache they both describe."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.manager = BlockSpaceManager(config)
        self.block_size = config.block_size
        self.total = config.num_gpu_blocks
        self.reserve = int(config.watermark * self.total)
        self.names = PrefixNames()
        self.cache = FakeCache(self.total, config.num_cpu_blocks, self.block_size)
        self.prefix = PrefixModel(config.max_cached_blocks)
        self.live: dict[Any, Live] = {}
        self.next_id = 0
        self.queried = self.hit = 0
        self.calls: Counter[str] = Counter()
        self.sound = True  # False while a call is under way, and for good once one has failed

    # --- reading the model ----------------------------------------------------------------------

    def running(self) -> list[Live]:
        """Live sequences on the GPU."""
        return [h for h in self.live.values() if not h.swapped]

    def swapped(self) -> list[Live]:
        """Live sequences on the CPU."""
        return [h for h in self.live.values() if h.swapped]

    def refs(self) -> Counter[int]:
        """References per GPU block, counted from the tables."""
        return Counter(b for h in self.running() for b in h.blocks if b >= 0)

    def num_free(self) -> int:
        """GPU blocks without a reference."""
        return self.total - len(self.refs())

    def num_cpu_free(self) -> int:
        """CPU blocks without a reference."""
        return self.config.num_cpu_blocks - len(
            {b for h in self.swapped() for b in h.cpu if b >= 0}
        )

    def contents(self, values: list[int]) -> list[int]:
        """The names of the full blocks of a sequence with these token values."""
        return values[self.block_size - 1 :: self.block_size]

    def window_drops(self, num_tokens: int) -> int:
        """Leading blocks that no query at or past `num_tokens` can see."""
        window = self.config.sliding_window
        return 0 if window is None else max(0, (num_tokens - window + 1) // self.block_size)

    # --- changing the model ---------------------------------------------------------------------

    def take(self, blocks: list[int], refs: Counter[int]) -> None:
        """These blocks were handed out as new: were they the right ones? Their content is gone."""
        assert len(set(blocks)) == len(blocks)
        assert not [b for b in blocks if refs[b]], "a block in use was handed out"
        plain = set(range(self.total)) - set(+refs) - set(self.prefix.lru)
        plain = self.prefix.make_plain(len(blocks), plain)
        assert set(blocks) <= plain, "evicted out of order"
        self.cache.poison(blocks)

    def release(self, blocks: list[int], before: Counter[int]) -> None:
        """Table entries in logical order were given up; those without a holder become free."""
        after = self.refs()
        gone = [b for b in dict.fromkeys(reversed(blocks)) if b >= 0 and before[b] and not after[b]]
        self.prefix.release(gone)

    def leave(self, h: Live, before: Counter[int], blocks: list[int]) -> None:
        """A sequence gives back its GPU blocks for good, those dropped behind the window anew."""
        heads = self.prefix.chain(h.parent)[: h.dropped] if h.publishes else []
        self.prefix.hold(heads)
        self.release(heads + blocks, before + Counter(heads))

    # --- after every call -----------------------------------------------------------------------

    def full_blocks(self, h: Live) -> list[int]:
        """The manager's table of a live sequence, lookahead blocks included."""
        return self.full_blocks_of(h.seq)

    def full_blocks_of(self, seq: Sequence) -> list[int]:
        """See full_blocks."""
        tables = {t["seq_id"]: t["blocks"] for t in self.manager.snapshot()["sequences"]}
        return list(tables[seq.seq_id])

    def check_batch(
        self, batch: Any, handles: list[Live], query_lens: list[int], context_lens: list[int]
    ) -> None:
        """Every array of a batch, from the tables."""
        seq_lens = [c + q for c, q in zip(context_lens, query_lens, strict=True)]
        cu_seqlens_q, slots = [0], []
        for h, q, c in zip(handles, query_lens, context_lens, strict=True):
            cu_seqlens_q.append(cu_seqlens_q[-1] + q)
            slots += [
                h.blocks[i // self.block_size] * self.block_size + i % self.block_size
                for i in range(c, c + q)
            ]
        assert batch.seq_lens.tolist() == seq_lens
        assert batch.cu_seqlens_q.tolist() == cu_seqlens_q
        assert batch.slot_mapping.tolist() == slots
        for row, h, seq_len in zip(batch.block_table.tolist(), handles, seq_lens, strict=True):
            width = ceil_div(seq_len, self.block_size)
            first = h.dropped
            assert row[first:width] == h.blocks[first:width]

    def check(self) -> None:
        """Everything that must hold between calls."""
        self.sound = False
        self.manager.check_invariants()
        refs = self.refs()
        for h in self.running():
            width = ceil_div(h.slotted, self.block_size)
            assert self.manager.block_table(h.seq)[:width] == h.blocks[:width], "table changed"
            assert h.blocks[: h.dropped] == [-1] * h.dropped and -1 not in h.blocks[h.dropped :]
            self.check_contents(h, h.blocks, self.cache.gpu)
        for h in self.swapped():
            self.check_contents(h, h.cpu, self.cache.cpu)
        self.check_stats(refs)
        self.sound = True

    def check_contents(self, h: Live, blocks: list[int], tier: list[list[int | None]]) -> None:
        """A sequence reads back exactly its own tokens."""
        for k in range(ceil_div(h.written, self.block_size)):
            if blocks[k] >= 0:
                want = h.values[k * self.block_size : min((k + 1) * self.block_size, h.written)]
                assert tier[blocks[k]][: len(want)] == want, f"foreign tokens in {h.seq.seq_id}"

    def check_stats(self, refs: Counter[int]) -> None:
        """Counters equal those counted from scratch."""
        stats = self.manager.stats()
        cpu_used = self.config.num_cpu_blocks - self.num_cpu_free()
        for tier, total, used, cached in (
            (stats.gpu, self.total, len(refs), len(self.prefix.lru)),
            (stats.cpu, self.config.num_cpu_blocks, cpu_used, 0),
        ):
            assert (tier.num_total, tier.num_used, tier.num_free) == (total, used, total - used)
            assert tier.num_cached == cached <= tier.num_free, (tier, cached)
            assert tier.usage == (used / total if total else 0.0)
        assert stats.prefix_queried_tokens == self.queried
        assert stats.prefix_hit_tokens == self.hit
        held = {
            (h.blocks[i // self.block_size], i % self.block_size)
            for h in self.running()
            for i in range(h.slotted)
            if h.blocks[i // self.block_size] >= 0
        }
        slots = len(refs) * self.block_size
        empty = (slots - len(held)) / slots if slots else 0.0
        assert abs(stats.internal_fragmentation - empty) < 1e-12
