"""Which content is in which block: found by digest, proven by comparison."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

_DEAD = -1


class Entry:
    """One published block: its tokens, after exactly the blocks that its parents stand for.

    Two entries are the same content when their tokens are equal and their parents are the same
    object; by induction all earlier tokens, the salt and the extra key are then equal as well.
    A digest only says where to look, so a bad hash costs time and never correctness.
    """

    __slots__ = (
        "__weakref__",
        "block",
        "child",
        "digest",
        "next_sibling",
        "parent",
        "previous_sibling",
        "same_digest",
        "tokens",
    )

    def __init__(self, parent: Entry | None, digest: bytes, tokens: bytes, block: int) -> None:
        self.parent = parent  # None: a root, or dead
        self.digest = digest
        self.tokens = tokens
        self.block = block
        self.same_digest: Entry | None = None  # the next entry of a list
        self.child: Entry | None = None  # the first of a list linked both ways
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None

    @property
    def is_live(self) -> bool:
        """Whether a lookup can still find this entry (roots can always be found)."""
        return self.block != _DEAD

    def descendants(self) -> list[Entry]:
        """This entry and all below it, parents first."""
        found = [self]
        for entry in found:
            child = entry.child
            while child is not None:
                found.append(child)
                child = child.next_sibling
        return found


class PrefixIndex:
    """All live entries by digest."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Entry] = {}
        # Held by the entries and chains below them: a salt that is no longer used costs nothing.
        self._roots: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()
        self.version = 0  # changes whenever a lookup may answer differently

    def root(self, key: bytes) -> Entry | None:
        return self._roots.get(key)

    def add_root(self, key: bytes, digest: bytes) -> Entry:
        root = self._roots[key] = Entry(None, digest, b"", block=0)
        return root

    def find(self, parent: Entry, digest: bytes, tokens: bytes) -> Entry | None:
        """The entry of these tokens under that very parent."""
        entry = self._by_digest.get(digest)
        while entry is not None and not (entry.parent is parent and entry.tokens == tokens):
            entry = entry.same_digest
        return entry

    def walk(self, root: Entry, digests: Sequence[bytes], tokens: Sequence[bytes]) -> list[Entry]:
        """The entries of the longest known prefix of a chain."""
        found: list[Entry] = []
        get, parent = self._by_digest.get, root
        for digest, block_tokens in zip(digests, tokens, strict=True):
            entry = get(digest)
            while entry is not None and not (
                entry.parent is parent and entry.tokens == block_tokens
            ):
                entry = entry.same_digest
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def add(self, parent: Entry, digest: bytes, tokens: bytes, block: int) -> Entry:
        entry = Entry(parent, digest, tokens, block)
        entry.same_digest = self._by_digest.get(digest)
        self._by_digest[digest] = entry
        sibling = entry.next_sibling = parent.child
        if sibling is not None:
            sibling.previous_sibling = entry
        parent.child = entry
        self.version += 1
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry without children."""
        parent, before, after = entry.parent, entry.previous_sibling, entry.next_sibling
        if before is not None:
            before.next_sibling = after
        elif parent is not None:
            parent.child = after
        if after is not None:
            after.previous_sibling = before

        head = self._by_digest[entry.digest]
        if head is not entry:
            while head.same_digest is not entry:
                assert head.same_digest is not None
                head = head.same_digest
            head.same_digest = entry.same_digest
        elif entry.same_digest is not None:
            self._by_digest[entry.digest] = entry.same_digest
        else:
            del self._by_digest[entry.digest]

        entry.block = _DEAD  # and a dead entry keeps no other alive:
        entry.parent = entry.same_digest = entry.next_sibling = entry.previous_sibling = None
        self.version += 1

    def entries(self) -> list[Entry]:
        """Every live entry."""
        found = []
        for entry in self._by_digest.values():
            same: Entry | None = entry
            while same is not None:
                found.append(same)
                same = same.same_digest
        return found
