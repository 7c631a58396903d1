"""What a waiting or swapped group needs to run, and how it gets its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from .admission import AllocStatus
from .block_manager import BlockSpaceManager
from .job import Job
from .prefix_index import Entry
from .sequence import SequenceLike
from .swap import distinct_blocks


@dataclass
class Demand:
    """Blocks and tokens that a group needs to run.

    num_blocks  in all, lookahead slots included
    num_tokens  to be computed
    hits        cached blocks of the first sequence, in order
    """

    num_blocks: int
    num_tokens: int
    hits: list[Entry] = field(default_factory=list)

    def status(self, manager: BlockSpaceManager, freed: Set[int] = frozenset()) -> AllocStatus:
        """Whether the blocks are there, or would be if `freed` were given back."""
        return manager.admission.room_for(self.num_blocks, self.hits, freed)


def demand_of_waiting(job: Job, manager: BlockSpaceManager, lookahead: int) -> Demand:
    """The first sequence takes what the cache does not have, the others what is theirs alone."""
    block_size = manager.config.block_size
    hits = manager.admission.hits(job.seqs[0])
    num_tokens = len(job.seqs[0]) - len(hits) * block_size
    num_blocks = -(-(len(job.seqs[0]) + lookahead) // block_size)
    for _, seq, num_shared in branches(job, block_size):
        num_tokens += len(seq) - num_shared
        if lookahead or num_shared < len(seq):
            num_blocks += -(-(len(seq) + lookahead) // block_size) - num_shared // block_size
    return Demand(num_blocks, num_tokens, hits)


def demand_of_swapped(job: Job, manager: BlockSpaceManager, lookahead: int) -> Demand:
    """Its blocks of before, and those for the tokens that have no slot yet."""
    block_size, tables = manager.config.block_size, manager.swapped
    group = [tables[seq.seq_id] for seq in job.seqs]
    num_blocks = len(distinct_blocks(group, block_size))
    num_tokens = 0
    tails: Counter[int] = Counter()  # partial blocks that will be written
    for seq, table in zip(job.seqs, group, strict=True):
        num_tokens += len(seq) - job.start(seq, tables)
        target = len(seq) + lookahead
        num_blocks += max(0, -(-target // block_size) - len(table.blocks))
        if target > table.num_tokens and table.num_tokens % block_size:
            tails[table.blocks[-1]] += 1
    copies = sum(tails.values()) - len(tails)  # the last holder writes in place
    return Demand(num_blocks + copies, num_tokens)


def branches(job: Job, block_size: int) -> Iterable[tuple[SequenceLike, SequenceLike, int]]:
    """Of each sequence but the first: the earlier one that it has most in common with, itself,
    and the tokens whose blocks they share: all if they are equal, else full blocks.
    """
    for index, seq in enumerate(job.seqs[1:], 1):
        best, most = job.seqs[0], -1
        for other in job.seqs[:index]:
            num_shared = _num_shared(other.token_ids, seq.token_ids, block_size)
            if num_shared > most:
                best, most = other, num_shared
        yield best, seq, most


def _num_shared(tokens: list[int], others: list[int], block_size: int) -> int:
    if tokens == others:
        return len(tokens)
    # The last token of either is its own, so that each is computed by its own sequence.
    most = min(len(tokens), len(others)) - 1
    end = 0
    while (
        end + block_size <= most
        and tokens[end : end + block_size] == others[end : end + block_size]
    ):
        end += block_size
    return end


def take_blocks(job: Job, manager: BlockSpaceManager) -> None:
    """Allocate a waiting group whose demand can be met."""
    first, rest = job.seqs[0], list(branches(job, manager.config.block_size))
    if all(num_shared == len(seq) == len(first) for _, seq, num_shared in rest):
        manager.allocate(job.as_group())
    else:
        manager.allocate(first)
        for lead, seq, num_shared in rest:
            manager.fork(lead, seq, None if num_shared == len(seq) else num_shared)
    equals = {first.seq_id: [first]}  # as rows they follow each other
    for lead, seq, num_shared in rest:
        if num_shared > manager.tables[seq.seq_id].num_computed:
            job.follow(seq, lead, num_shared)
        equals.setdefault(lead.seq_id if num_shared == len(seq) else seq.seq_id, []).append(seq)
    job.seqs = [seq for seqs in equals.values() for seq in seqs]


def held_alone(jobs: Iterable[Job], manager: BlockSpaceManager) -> set[int]:
    """The blocks that nobody but these groups holds."""
    held = Counter(
        block for job in jobs for seq in job.seqs for block in manager.tables[seq.seq_id].held()
    )
    ref_counts = manager.gpu.ref_counts
    return {block for block, count in held.items() if count == ref_counts[block]}
