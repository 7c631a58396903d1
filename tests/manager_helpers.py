"""Small words the block manager's tests share: make a manager, admit a sequence, see free order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paged import Batch, BlockSpaceManager, CacheConfig, Sequence


def constant_hash(data: bytes) -> bytes:
    """The worst hash there is: every block of every sequence collides."""
    return bytes(16)


def make_manager(num_gpu_blocks: int, block_size: int = 4, **options: Any) -> BlockSpaceManager:
    """A manager without a watermark unless one is asked for: small pools stay exact."""
    options.setdefault("watermark", 0.0)
    config = CacheConfig(block_size=block_size, num_gpu_blocks=num_gpu_blocks, **options)
    return BlockSpaceManager(config)


def admit(
    manager: BlockSpaceManager,
    seq_id: Any,
    tokens: Iterable[int],
    *,
    computed: bool = True,
    **identity: Any,
) -> Sequence:
    """Allocate a new sequence and, unless told otherwise, call all of its tokens written."""
    seq = Sequence(seq_id, list(tokens), **identity)
    manager.allocate(seq)
    if computed:
        manager.mark_computed(seq, len(seq))
    return seq


def grow(manager: BlockSpaceManager, seq: Sequence, tokens: Iterable[int]) -> list[tuple[int, int]]:
    """Append tokens, give them slots and call them written; returns the copies."""
    for token in tokens:
        seq.append_token(token)
    copies = manager.append_slots(seq)
    manager.mark_computed(seq, len(seq))
    return copies


def cached_tokens(manager: BlockSpaceManager, tokens: Iterable[int], **identity: Any) -> int:
    """How many leading tokens a new sequence would find in the cache; the sequence is freed."""
    probe = Sequence("probe", list(tokens), **identity)
    manager.allocate(probe)
    found = manager.num_cached_tokens(probe)
    manager.free(probe)
    return found


def hand_out_order(manager: BlockSpaceManager) -> list[int]:
    """The order in which all free blocks would be handed out; takes them, so ask last."""
    block_size = manager.config.block_size
    order = []
    for k in range(manager.stats().gpu.num_free):
        taker = Sequence(f"taker-{k}", [-1 - k] * block_size)
        manager.allocate(taker)
        order += manager.block_table(taker)
    return order


@contextmanager
def refused(
    manager: BlockSpaceManager, error: type[Exception], match: str | None = None
) -> Iterator[Any]:
    """The body raises `error` (its text matches) and leaves the manager bit-identical."""
    before = manager.snapshot()
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert manager.snapshot() == before
    manager.check_invariants()


def check_rows(
    manager: BlockSpaceManager, batch: Batch, rows: list[Sequence], context_lens: list[int]
) -> None:
    """A decode batch says what the tables say, entries behind a window apart."""
    bs = manager.config.block_size
    assert batch.seq_lens.tolist() == [c + 1 for c in context_lens]
    assert batch.cu_seqlens_q.tolist() == list(range(len(rows) + 1))
    assert batch.slot_mapping.tolist() == [
        manager.block_table(seq)[c // bs] * bs + c % bs
        for seq, c in zip(rows, context_lens, strict=True)
    ]
    for row, seq in zip(batch.block_table.tolist(), rows, strict=True):
        table = manager.block_table(seq)
        seen = [k for k, block in enumerate(table) if block >= 0]
        assert [row[k] for k in seen] == [table[k] for k in seen]
