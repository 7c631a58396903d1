"""Eviction policies of a prefix cache, and what each finds again on a trace.

A policy is a function of a cached block; the block with the least value is forgotten first:

    def lru(block):
        return block.last_used, -block.position

It is asked whenever a prompt uses the block, so the value must follow from that use; an object with
`__call__` may keep what it likes besides. Ties go to the block that has been in the cache longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from paged.trace import HASH_BLOCK_TOKENS, Request

from .traffic import TuningError

NEVER = 1 << 62


@dataclass(slots=True)
class CachedBlock:
    """What a policy may look at. Times count the requests of the trace."""

    position: int  # in its prompt; 0 is the first block
    computed_at: int
    last_used: int
    num_uses: int  # prompts that had it, the one that computed it included
    prompt_blocks: int  # of the last prompt that had it
    next_use: int  # the future, which no cache knows: the next prompt that may hit it, or NEVER
    ticket: int = 0  # the cache's own


Policy = Callable[[CachedBlock], Any]


def lru(block: CachedBlock) -> Any:
    """What was used last longest ago; of one prompt the tail first. The block manager's rule."""
    return block.last_used, -block.position


def fifo(block: CachedBlock) -> Any:
    """What was computed first, however often it was hit since."""
    return block.computed_at, -block.position


def lfu(block: CachedBlock) -> Any:
    """What the fewest prompts had; of those the least recently used."""
    return block.num_uses, block.last_used, -block.position


def largest_first(block: CachedBlock) -> Any:
    """The blocks of the longest prompt."""
    return -block.prompt_blocks, block.last_used, -block.position


def reused_last(block: CachedBlock) -> Any:
    """What only one prompt ever had, then the rest, least recently used first."""
    return block.num_uses > 1, block.last_used, -block.position


def optimum(block: CachedBlock) -> Any:
    """Belady's rule: what is needed again last. It looks into the future; no policy finds more."""
    return -block.next_use, -block.position


POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (lru, fifo, lfu, largest_first, reused_last)
}


class Prompts:
    """The prompts of a trace as chains of full blocks, numbered by content; the last may be partial.

    Equal chains of hash ids are equal numbers, part by part. TuningError without hash ids, or for a
    block size that does not divide the 512 tokens of an id.
    """

    def __init__(self, requests: Sequence[Request], block_size: int = HASH_BLOCK_TOKENS) -> None:
        if block_size < 1 or HASH_BLOCK_TOKENS % block_size:
            raise TuningError(
                f"block_size is {block_size}; to follow the trace's hash ids it must divide"
                f" {HASH_BLOCK_TOKENS}"
            )
        self.block_size = block_size
        self.lengths = [request.prompt_len for request in requests]
        self.blocks: list[list[int]] = []
        parts = HASH_BLOCK_TOKENS // block_size
        nodes: dict[tuple[int, int], int] = {}
        for request in requests:
            if request.hash_ids is None:
                raise TuningError("the trace has no hash_ids, so what its prompts share is unknown")
            node = 0
            blocks: list[int] = []
            for hash_id in request.hash_ids:
                node = nodes.setdefault((node, hash_id), len(nodes) + 1)
                blocks += range(node * parts, (node + 1) * parts)
            self.blocks.append(blocks[: request.prompt_len // block_size])

    def needed(self, number: int) -> int:
        """Blocks that a prompt holds while it runs."""
        return -(-self.lengths[number] // self.block_size)

    def can_hit(self, number: int) -> list[int]:
        """Blocks of a prompt that may be found in the cache: its last token is always computed."""
        return self.blocks[number][: (self.lengths[number] - 1) // self.block_size]

    def next_uses(self, num_blocks: int) -> list[list[int]]:
        """For each block of each prompt the next prompt that has it, of those that fit.

        NEVER where that one cannot hit it, but computes it again: until then it need not be kept.
        """
        next_uses: list[list[int]] = []
        coming: dict[int, int] = {}
        for number in reversed(range(len(self.blocks))):
            next_uses.append([coming.get(block, NEVER) for block in self.blocks[number]])
            if self.needed(number) <= num_blocks:
                coming.update(dict.fromkeys(self.blocks[number], NEVER))
                coming.update(dict.fromkeys(self.can_hit(number), number))
        return next_uses[::-1]


def count_hits(
    prompts: Prompts, policy: Policy, num_blocks: int, max_cached_blocks: int | None = None
) -> int:
    """Prompt tokens found in a pool of so many blocks, when prompts run one after the other.

    A prompt holds all its blocks while it runs; hits are an unbroken prefix of it and never its
    last token. Prompts longer than the pool are left out. max_cached_blocks: most blocks that stay
    in the cache when no prompt runs; None: all.
    """
    most = num_blocks if max_cached_blocks is None else max_cached_blocks
    cache, num_hits = _Cache(policy), 0
    for now, next_uses in enumerate(prompts.next_uses(num_blocks)):
        needed = prompts.needed(now)
        if needed > num_blocks:
            continue
        held = cache.hold(prompts.can_hit(now))
        num_hits += held
        cache.forget_down_to(num_blocks - needed + held)
        blocks = zip(prompts.blocks[now], next_uses, strict=True)
        for position, (block, next_use) in enumerate(blocks):
            record = cache.records.get(block)
            if record is None:
                record = CachedBlock(position, now, now, 1, needed, next_use)
                cache.records[block] = record
            elif position < held:
                record.last_used, record.num_uses = now, record.num_uses + 1
                record.prompt_blocks, record.next_use = needed, next_use
            else:  # computed again, which is no use of the copy in the cache
                record.next_use = next_use
            cache.rank(block, record)
        cache.forget_down_to(most)
    return num_hits * prompts.block_size


class _Cache:
    """Records by block, and a heap of their values; only a record's newest entry there counts."""

    def __init__(self, policy: Policy) -> None:
        self.records: dict[int, CachedBlock] = {}
        self._policy = policy
        self._heap: list[tuple[Any, int, int]] = []  # value, ticket, block
        self._ticket = 0

    def hold(self, blocks: Sequence[int]) -> int:
        """The leading blocks that are cached cannot be forgotten until they are ranked; how many."""
        find = self.records.get
        for number, block in enumerate(blocks):
            record = find(block)
            if record is None:
                return number
            record.ticket = 0
        return len(blocks)

    def rank(self, block: int, record: CachedBlock) -> None:
        """Ask the policy for the value of a block that was used."""
        self._ticket = record.ticket = self._ticket + 1
        heappush(self._heap, (self._policy(record), record.ticket, block))

    def forget_down_to(self, num_blocks: int) -> None:
        """Forget the blocks of the least value until so many are left."""
        records, heap = self.records, self._heap
        while len(records) > num_blocks:
            _, ticket, block = heappop(heap)
            record = records.get(block)
            if record is not None and record.ticket == ticket:
                del records[block]
