"""The allocator that remembers what free blocks contain, until it needs them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from warnings import warn

from paged.config import HashFn, check_int
from paged.digests import DigestChain, Hasher, pack
from paged.errors import NoFreeBlocksError
from paged.prefix_index import Entry
from paged.sequence import checked_tokens

from .base import BlockAllocator
from .free_list import make_free_list

EvictionPolicy = Callable[[Mapping[int, Entry]], int]


class PrefixCachingBlockAllocator(BlockAllocator):
    """Mutable blocks from `allocate`; full, immutable ones once they are published.

    A published block that loses its last reference stays findable. Free blocks without content
    are handed out first; then the least recently used content is forgotten. `free` receives a
    sequence's blocks tail first, so that of one chain the tail is forgotten before its head.

    max_cached_blocks: most unreferenced blocks that keep their content; None: all.

    The attribute `eviction_policy` may be set to a function that chooses instead: it is given
    {block: entry}, least recently used first, and returns the block to forget next, which takes
    along what is cached behind it. One that fails is dropped with a warning. No journal holds it.
    (The policies of `paged.tuning` are of another kind: they give one block a value. With a value
    of entries the policy here is lambda cached: min(cached, key=lambda b: value(cached[b])).)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        free_order: str = "fifo",
        max_cached_blocks: int | None = None,
        hash_fn: HashFn | None = None,
        hash_seed: int | None = None,
    ) -> None:
        super().__init__(num_blocks)
        check_int("block_size", block_size, minimum=1)
        check_int("max_cached_blocks", max_cached_blocks, minimum=0, optional=True)
        self.block_size = block_size
        self.eviction_policy: EvictionPolicy | None = None
        self.hasher = Hasher(block_size, hash_fn, hash_seed)
        self.index = self.hasher.index
        self._root = self.hasher.root(None, None)
        self._max_cached = max_cached_blocks
        self._version = 0  # changes whenever a lookup may answer differently
        self._free = make_free_list(free_order, range(num_blocks))
        self._entries: list[Entry | None] = [None] * num_blocks  # of each published block
        self._evictable: OrderedDict[int, Entry] = OrderedDict()  # unreferenced, oldest first

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._evictable)

    @property
    def max_cached_blocks(self) -> int:
        """Most blocks that `num_cached` may count."""
        return self.num_blocks if self._max_cached is None else self._max_cached

    def entry_of(self, block: int) -> Entry | None:
        """What the block is published as, None for a mutable block."""
        return self._entries[block]

    def free_blocks(self) -> list[int]:
        return [*self._free.in_order(), *self._evictable]

    def cached_blocks(self) -> list[int]:
        """The unreferenced blocks with content, least recently used first."""
        return list(self._evictable)

    # Content

    def lookup(self, chain: DigestChain, num_blocks: int) -> list[Entry]:
        """Entries of the longest cached prefix among a chain's first `num_blocks` blocks."""
        key = (self._version, num_blocks)
        if chain.hits_key != key:
            contents = islice(zip(chain.digests, chain.tokens, strict=True), num_blocks)
            chain.hits = self.index.walk(chain.root, contents)
            chain.hits_key = key
        return chain.hits

    def num_unreferenced(self, entries: Sequence[Entry]) -> int:
        """How many of these entries' blocks count as free now."""
        ref_counts = self.ref_counts
        return sum([not ref_counts[entry.block] for entry in entries])

    def acquire(self, entries: Sequence[Entry]) -> list[int]:
        """One more reference to the block of each entry, evictable or in use."""
        ref_counts, evictable = self.ref_counts, self._evictable
        blocks = [entry.block for entry in entries]
        revived = 0
        for block in blocks:
            count = ref_counts[block]
            ref_counts[block] = count + 1
            if not count:
                del evictable[block]
                revived += 1
        self.num_free -= revived
        return blocks

    def publish(
        self, chain: DigestChain, blocks: Sequence[int], parent: Entry, first: int, last: int
    ) -> Entry:
        """Make blocks [first, last) of a sequence, full and in use, findable behind `parent`.

        Returns the entry of the last one. Where the same content is there already, that entry is
        taken and the block stays as it is: two sequences that computed the same block at the same
        time each keep their own.
        """
        find, add = self.index.find, self.index.add
        for index in range(first, last):
            digest, tokens = chain.digests[index], chain.tokens[index]
            entry = find(parent, digest, tokens)
            if entry is None:
                block = blocks[index]
                entry = self._entries[block] = add(parent, digest, tokens, block)
            parent = entry
        self._version += 1
        return parent

    def withdraw(self, block: int) -> None:
        """Forget the content of a block in use, which is about to be written again."""
        entry = self._entries[block]
        if entry is not None:
            self._forget(entry)

    def reset(self) -> None:
        """Forget all content. References stay."""
        for block in range(self.num_blocks):
            self.withdraw(block)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """As every allocator; content above the new end stays only where it is in use."""
        moved = super().resize(num_blocks)
        for source, target in moved.items():
            entry = self._entries[target] = self._entries[source]
            if entry is not None:
                entry.block = target
        self._entries = self._entries[:num_blocks]
        self._version += 1
        return moved

    def allocate_immutable(self, parent: int | None, token_ids: Sequence[int]) -> int:
        """The block with exactly these tokens under that very parent block, or a new one.

        parent: a block this method returned, None for the first of a chain. The block can be
        shared at once, so its content must be written before anyone reads it.
        """
        token_ids = checked_tokens(token_ids, "token_ids")
        if len(token_ids) != self.block_size:
            raise ValueError(f"token_ids has {len(token_ids)} tokens, a block {self.block_size}")
        above = self._root if parent is None else self._immutable(parent)
        tokens = pack(token_ids)
        digest = self.hasher.digest(above.digest + tokens)
        entry = self.index.find(above, digest, tokens)
        if entry is not None:
            return self.acquire([entry])[0]
        if parent is None or self.ref_counts[parent]:
            (block,) = self.allocate(1)
        else:  # the parent is evictable, but not by this call
            if self.num_free < 2:
                raise NoFreeBlocksError(1, 0, f"the last free block is the parent, {parent}")
            self.acquire([above])
            (block,) = self.allocate(1)
            self.free([parent])
        self._entries[block] = self.index.add(above, digest, tokens, block)
        self._version += 1
        return block

    def _immutable(self, block: int) -> Entry:
        self.ref_count(block)  # a block of this pool
        entry = self._entries[block]
        if entry is None:
            raise ValueError(f"parent is block {block}, which is not immutable")
        return entry

    def _forget(self, entry: Entry) -> None:
        """Forget an entry and what is below it, which nobody could find any more."""
        self._version += 1
        for lost in (*reversed(entry.descendants()), entry):
            block = lost.block
            self.index.remove(lost)
            self._entries[block] = None
            if self._evictable.pop(block, None) is not None:
                self._free.give([block])

    # Free blocks

    def _take(self, n: int) -> list[int]:
        while len(self._free) < n:
            self._evict(n - len(self._free))
        return self._free.take(n)

    def _evict(self, n: int) -> None:
        """Forget the content of the `n` least recently used evictable blocks, or of one by policy."""
        if self.eviction_policy is not None:
            self._ask(self.eviction_policy)
            n = 1
        oldest, remove, entries = self._evictable.popitem, self.index.remove, self._entries
        self._version += 1
        blocks = []
        for _ in range(n):
            block, entry = oldest(False)
            blocks.append(block)
            if (
                entry.child is not None or entry.more is not None
            ):  # given back before its followers: a sliding window
                self._forget(entry)
                break
            remove(entry)
            entries[block] = None
        self._free.give(blocks)

    def _ask(self, policy: EvictionPolicy) -> None:
        """Make the block that the policy names the next to be evicted."""
        try:
            self._evictable.move_to_end(policy(MappingProxyType(self._evictable)), last=False)
        except Exception as error:  # a hint is not worth a call that fails halfway
            self.eviction_policy = None
            warn(
                f"eviction_policy must return one of the blocks it is given; it failed with"
                f" {error!r}, so the least recently used are forgotten from now on",
                RuntimeWarning,
                stacklevel=2,
            )

    def _give_back(self, blocks: list[int]) -> None:
        entries, evictable = self._entries, self._evictable
        clean = []
        for block in blocks:
            entry = entries[block]
            if entry is None:
                clean.append(block)
            else:
                evictable[block] = entry
        self._free.give(clean)
        while self.num_cached > self.max_cached_blocks:
            self._evict(self.num_cached - self.max_cached_blocks)

    def _move_end(self, num_blocks: int) -> None:
        for block in [block for block in self._evictable if block >= num_blocks]:
            entry = self._entries[block]
            if entry is not None:  # not forgotten together with one before it
                self._forget(entry)
        self._free.remove_from(num_blocks)
        self._free.give(range(self.num_blocks, num_blocks))
        self._entries += [None] * (num_blocks - self.num_blocks)
