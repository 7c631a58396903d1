"""Everything that must be true between two calls, counted from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .allocators import BlockAllocator, PrefixCachingBlockAllocator
from .block_table import DROPPED, BlockTable
from .digests import pack
from .errors import InvariantError

if TYPE_CHECKING:
    from .block_manager import BlockSpaceManager


def check_invariants(manager: BlockSpaceManager) -> None:
    """Raise InvariantError, naming block and owner, at the first contradiction."""
    for table in manager.tables.values():
        _check_table(manager, table, manager.gpu, "GPU")
    for table in manager.swapped.values():
        _check_table(manager, table, manager.cpu, "CPU")
    for seq_id, table in (*manager.tables.items(), *manager.swapped.items()):
        if seq_id != table.seq_id:
            raise InvariantError(f"the table of sequence {seq_id!r} says it is {table.seq_id!r}'s")
    both = manager.tables.keys() & manager.swapped.keys()
    if both:
        raise InvariantError(f"sequences {sorted(map(repr, both))} are on the GPU and swapped out")
    _check_pool(manager, manager.gpu, manager.tables, "GPU")
    _check_pool(manager, manager.cpu, manager.swapped, "CPU")
    _check_content(manager, manager.tables)
    _check_content(manager, manager.swapped)
    if manager.cache is not None:
        _check_cache(manager, manager.cache)


def _check_table(
    manager: BlockSpaceManager, table: BlockTable, pool: BlockAllocator, tier: str
) -> None:
    block_size, owner = manager.config.block_size, f"sequence {table.seq_id!r}"
    for index, block in enumerate(table.blocks):
        if (block == DROPPED) != (index < table.num_dropped):
            raise InvariantError(
                f"{owner}: entry {index} is block {block}, {table.num_dropped} are dropped"
            )
        if block != DROPPED and not 0 <= block < pool.num_blocks:
            raise InvariantError(f"{owner}: entry {index} is block {block}, no {tier} block")
    held = Counter(table.held())
    if held and max(held.values()) > 1:
        block = held.most_common(1)[0][0]
        raise InvariantError(f"{owner} names block {block} twice")
    if not 0 <= table.num_computed <= table.num_tokens <= len(table.blocks) * block_size:
        raise InvariantError(
            f"{owner}: {table.num_computed} computed <= {table.num_tokens} tokens <= "
            f"{len(table.blocks)} blocks of {block_size} does not hold"
        )
    if table.num_tokens > len(table.seq):
        raise InvariantError(
            f"{owner}: slots for {table.num_tokens} tokens, it has {len(table.seq)}"
        )
    if not table.num_dropped <= table.num_computed // block_size >= table.num_published:
        raise InvariantError(
            f"{owner}: {table.num_dropped} blocks dropped and {table.num_published} published "
            f"of {table.num_computed // block_size} computed"
        )
    if tier == "GPU":
        _check_writable(manager, table, pool, owner)


def _check_writable(
    manager: BlockSpaceManager, table: BlockTable, pool: BlockAllocator, owner: str
) -> None:
    """Slots that will be written without another look must be the sequence's own."""
    block_size = manager.config.block_size
    if table.writable_until > len(table.blocks) * block_size:
        raise InvariantError(
            f"{owner}: writable until {table.writable_until}, {len(table.blocks)} blocks"
        )
    if table.quiet_until and (
        table.num_pending != 1 or table.quiet_until > min(table.writable_until, table.work_at)
    ):
        raise InvariantError(
            f"{owner}: {table.num_pending} tokens pending, a step may pass it over until "
            f"{table.quiet_until} tokens, it is writable until {table.writable_until}"
        )
    first, last = table.num_tokens // block_size, -(-table.writable_until // block_size)
    for block in table.blocks[first:last]:
        if pool.ref_counts[block] != 1:
            raise InvariantError(
                f"{owner} would write block {block}, which has {pool.ref_counts[block]} references"
            )
        if manager.cache is not None and manager.cache.entry_of(block) is not None:
            raise InvariantError(f"{owner} would write block {block}, which is published")


def _check_pool(
    manager: BlockSpaceManager, pool: BlockAllocator, tables: dict[Any, BlockTable], tier: str
) -> None:
    owners: dict[int, list[Any]] = {}
    for table in tables.values():
        for block in table.held():
            owners.setdefault(block, []).append(table.seq_id)
    free = pool.free_blocks()
    twice = [block for block, count in Counter(free).items() if count > 1]
    if twice:
        raise InvariantError(
            f"{tier} block {twice[0]} is twice in the free list; {_last(manager, twice[0])}"
        )
    foreign = [block for block in free if not 0 <= block < pool.num_blocks]
    if foreign:
        raise InvariantError(f"block {foreign[0]} is in the {tier} free list, and of no such pool")
    is_free = set(free)
    for block in range(pool.num_blocks):
        holders, count = owners.get(block, []), pool.ref_counts[block]
        if count != len(holders):
            raise InvariantError(
                f"{tier} block {block} has {count} references, its owners are {holders}; "
                f"{_last(manager, block)}"
            )
        if (count == 0) != (block in is_free):
            state = "free" if block in is_free else "lost"
            raise InvariantError(
                f"{tier} block {block} with {count} references is {state}, its owners are "
                f"{holders}; {_last(manager, block)}"
            )
    if pool.num_free != len(free):
        raise InvariantError(f"{tier} pool counts {pool.num_free} free blocks, it has {len(free)}")


def _check_content(manager: BlockSpaceManager, tables: dict[Any, BlockTable]) -> None:
    """Whoever names a block must have its tokens, at the same place of the sequence."""
    block_size, cache = manager.config.block_size, manager.cache
    seen: dict[int, tuple[BlockTable, int, list[int]]] = {}
    for table in tables.values():
        for index in range(table.num_dropped, len(table.blocks)):
            block, first = table.blocks[index], index * block_size
            tokens = list(table.seq.token_ids[first : min(first + block_size, table.num_tokens)])
            other, other_index, other_tokens = seen.setdefault(block, (table, index, tokens))
            both = min(len(tokens), len(other_tokens))
            if index != other_index or tokens[:both] != other_tokens[:both]:
                raise InvariantError(
                    f"block {block} holds other tokens for sequence {table.seq_id!r} (entry "
                    f"{index}) than for {other.seq_id!r} (entry {other_index}); "
                    f"{_last(manager, block)}"
                )
            entry = cache.entry_of(block) if cache and tables is manager.tables else None
            if entry is not None and not entry.tokens.startswith(pack(tokens)):
                owners = [other.seq_id for other in tables.values() if block in other.blocks]
                raise InvariantError(
                    f"block {block} is published with other tokens than its owners {owners} have "
                    f"at entry {index}; {_last(manager, block)}"
                )


def _check_cache(manager: BlockSpaceManager, cache: PrefixCachingBlockAllocator) -> None:
    entries = cache.index.entries()
    for entry in entries:
        if not 0 <= entry.block < cache.num_blocks or cache.entry_of(entry.block) is not entry:
            raise InvariantError(
                f"the prefix cache finds content in block {entry.block} that the block does not "
                f"have; {_last(manager, entry.block)}"
            )
        if entry.parent is None or not entry.parent.is_live:
            raise InvariantError(
                f"block {entry.block} is published behind a forgotten block; "
                f"{_last(manager, entry.block)}"
            )
    published = [block for block in range(cache.num_blocks) if cache.entry_of(block) is not None]
    if len(published) != len(entries):
        known = {entry.block for entry in entries}
        lost = next(block for block in published if block not in known)
        raise InvariantError(
            f"block {lost} is published but cannot be found; {_last(manager, lost)}"
        )
    for block in cache.cached_blocks():
        if cache.ref_counts[block] or cache.entry_of(block) is None:
            raise InvariantError(
                f"block {block} is evictable with {cache.ref_counts[block]} references and "
                f"{'' if cache.entry_of(block) else 'no '}content; {_last(manager, block)}"
            )
    evictable = set(cache.cached_blocks())
    for block in published:
        if cache.ref_counts[block] == 0 and block not in evictable:
            raise InvariantError(
                f"block {block} is published and unreferenced, but not evictable; "
                f"{_last(manager, block)}"
            )
    if cache.num_cached > cache.max_cached_blocks:
        raise InvariantError(
            f"{cache.num_cached} blocks are cached, at most {cache.max_cached_blocks} may be"
        )


def _last(manager: BlockSpaceManager, block: int) -> str:
    last = manager.history.last_of_block(block)
    return f"last operation: {last}" if last else "no operation on it is remembered"
