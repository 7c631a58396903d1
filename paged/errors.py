"""Errors that a caller can handle. After any of them nothing has changed."""

from __future__ import annotations


class PagedError(Exception):
    """Base of every error that this package defines."""


class NoFreeBlocksError(PagedError):
    """A pool has too few blocks for the request. `needed` and `available` count blocks."""

    def __init__(self, needed: int, available: int, detail: str = "") -> None:
        super().__init__(
            f"{needed} blocks needed, {available} available{detail and f' ({detail})'}"
        )
        self.needed = needed
        self.available = available


class NotAllocatedError(PagedError):
    """A sequence without blocks, or a block without a reference, was named as if it had one."""


class AlreadyAllocatedError(PagedError):
    """The sequence already holds blocks."""


class NotOnGpuError(PagedError):
    """The sequence is swapped out: its blocks are CPU blocks until `swap_in`."""


class UnsupportedModelError(PagedError, ValueError):
    """The model does something that pages cannot do; the message says what."""


class PromptTooLongError(PagedError, ValueError):
    """The prompt can never fit into the model or into the pool."""


class InvariantError(PagedError):
    """The bookkeeping contradicts itself: a bug, never a full pool or a wrong argument."""
