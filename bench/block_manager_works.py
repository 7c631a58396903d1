"""The pieces of work of `block_manager`, and for each the barest Python that moves the same data.

Each is a generator: it prepares a round and yields what is to be timed of it.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count, repeat

import xxhash

from bench.records import Work
from paged import (
    BlockSpaceManager,
    CacheConfig,
    NaiveBlockAllocator,
    PrefixCachingBlockAllocator,
    Sequence,
    SequenceGroup,
)

BLOCK_SIZE = 16
CHUNK = 128  # blocks


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return rng.choices(range(128_000), k=n)


def freeze() -> None:
    """As a server does once it is set up: what lives now is not looked at again."""
    gc.collect()
    gc.freeze()


def manager_of(num_blocks: int, num_cpu_blocks: int = 0) -> BlockSpaceManager:
    return BlockSpaceManager(
        CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            watermark=0.0,
        )
    )


def admitted(manager: BlockSpaceManager, name: object, tokens: list[int]) -> Sequence:
    """A sequence whose tokens are all computed."""
    seq = Sequence(name, tokens)
    manager.allocate(seq)
    manager.mark_computed(seq, len(seq))
    return seq


# --- allocation ---------------------------------------------------------------------------------


def allocate(num_blocks: int) -> Work:
    """All blocks in chunks."""
    pool = NaiveBlockAllocator(num_blocks)
    while True:
        chunks: list[list[int]] = []
        yield lambda: chunks.extend([pool.allocate(CHUNK) for _ in range(num_blocks // CHUNK)])  # noqa: B023
        deque(map(pool.free, chunks), maxlen=0)


def slice_list(num_blocks: int) -> Work:
    ids = list(range(num_blocks))
    return repeat(lambda: [ids[i : i + CHUNK] for i in range(0, num_blocks, CHUNK)])


def free(num_blocks: int) -> Work:
    """The same chunks back."""
    pool = NaiveBlockAllocator(num_blocks)
    while True:
        chunks = [pool.allocate(CHUNK) for _ in range(num_blocks // CHUNK)]
        yield lambda: deque(map(pool.free, chunks), maxlen=0)  # noqa: B023


def extend_list(num_blocks: int) -> Work:
    chunks = [list(range(i, i + CHUNK)) for i in range(0, num_blocks, CHUNK)]
    while True:
        ids: list[int] = []
        yield lambda: deque(map(ids.extend, chunks), maxlen=0)  # noqa: B023


def evict(num_blocks: int) -> Work:
    """All blocks in chunks, where every block has content that is forgotten."""
    while True:
        cache = PrefixCachingBlockAllocator(num_blocks, 1)
        for number in range(num_blocks // CHUNK):  # a chain per chunk, given back tail first
            chain: list[int] = []
            for token in range(CHUNK):
                parent = chain[-1] if chain else None
                chain.append(cache.allocate_immutable(parent, [token or number]))
            cache.free(chain[::-1])
        freeze()
        yield lambda: [cache.allocate(CHUNK) for _ in range(num_blocks // CHUNK)]  # noqa: B023
        assert cache.num_cached == 0


def pop_dict(num_blocks: int) -> Work:
    while True:
        contents = {number.to_bytes(16, "little"): number for number in range(num_blocks)}
        yield lambda: [contents.popitem() for _ in range(num_blocks)]  # noqa: B023


# --- hashing and prefix hits --------------------------------------------------------------------


def hash_prompt(tokens: list[int]) -> Work:
    hasher = PrefixCachingBlockAllocator(1, BLOCK_SIZE).hasher
    while True:
        chain = hasher.chain_of(Sequence("prompt", ()))
        yield partial(hasher.extend, chain, tokens, len(tokens) // BLOCK_SIZE)


def hash_bytes(tokens: list[int]) -> Work:
    """Chained 128-bit digests of what is bytes already."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)

    def chained() -> bytes:
        digest, digest_of = b"", xxhash.xxh3_128_digest
        for start in range(0, len(data), 4 * BLOCK_SIZE):
            digest = digest_of(digest + data[start : start + 4 * BLOCK_SIZE])
        return digest

    return repeat(chained)


def _hits(num_blocks: int, tokens: list[int]) -> Iterator[tuple[BlockSpaceManager, Sequence]]:
    """A sequence whose prefix is cached and hashed, after the cache has changed."""
    manager = manager_of(num_blocks)
    manager.free(admitted(manager, "first", tokens))
    for number in count():
        seq = Sequence(number, tokens)
        manager.can_allocate(seq)  # computes the digests
        other = admitted(manager, f"other {number}", random_tokens(random.Random(number), 64))
        yield manager, seq
        manager.free(other)


def look_up(num_blocks: int, tokens: list[int]) -> Work:
    """A second can_allocate of a prefix hit."""
    for manager, seq in _hits(num_blocks, tokens):
        yield partial(manager.can_allocate, seq)


def look_up_dict(num_keys: int) -> Work:
    digests = [number.to_bytes(16, "little") for number in range(num_keys)]
    index = {digest: number for number, digest in enumerate(digests)}
    return repeat(lambda: [index[digest] for digest in digests])


def allocate_hit(num_blocks: int, tokens: list[int]) -> Work:
    """The allocation after it."""
    for manager, seq in _hits(num_blocks, tokens):
        manager.can_allocate(seq)
        yield partial(manager.allocate, seq)
        assert manager.num_cached_tokens(seq) == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        manager.free(seq)


def count_references(num_blocks: int) -> Work:
    """One reference more of each of `num_blocks` blocks, and their ids."""
    counts, table = [1] * num_blocks, list(range(num_blocks))

    def share() -> list[int]:
        for block in table:
            counts[block] += 1
        return table.copy()

    return repeat(share)


# --- swap and fork ------------------------------------------------------------------------------


def swap_out(num_blocks: int, num_swapped: int, rng: random.Random) -> Work:
    """A sequence of computed blocks to a CPU pool as large as the GPU's."""
    manager = manager_of(num_blocks, num_cpu_blocks=num_blocks)
    seq = admitted(manager, "a", random_tokens(rng, num_swapped * BLOCK_SIZE))
    group = SequenceGroup("g", [seq])
    while True:
        yield partial(manager.swap_out, group)
        manager.swap_in(group)


def pair_lists(num_swapped: int) -> Work:
    blocks, pool = list(range(num_swapped)), list(range(1000, 1000 + num_swapped))
    while True:
        free_ids = pool.copy()
        yield lambda: [(block, free_ids.pop()) for block in blocks]  # noqa: B023


def fork(num_blocks: int, tokens: list[int]) -> Work:
    manager = manager_of(num_blocks)
    parent = admitted(manager, "parent", tokens)
    for number in count():
        child = parent.fork(number)
        yield partial(manager.fork, parent, child)
        manager.free(child)
