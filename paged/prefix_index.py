"""Which content is in which block: a tree of blocks, one level per block of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

_DEAD = -1


class Entry:
    """One published block: its tokens, after exactly the blocks that its parents stand for.

    Two entries are the same content when their tokens are equal and their parents are the same
    object; by induction all earlier tokens, the salt and the extra key are then equal as well.
    """

    __slots__ = (
        "__weakref__",
        "block",
        "child",
        "digest",
        "is_indexed",
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
        self.child: Entry | None = None  # the first of a list linked both ways
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None
        self.is_indexed = False
        self.same_digest: Entry | None = None  # the next entry of a list, if it is indexed

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
    """All live entries.

    Most blocks have one successor, so the first child of an entry is found by its pointer and only
    its siblings by digest. Either way parent and tokens are compared: a digest says where to look
    and never what is there, so a bad hash costs time and not correctness.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Entry] = {}
        # Held by the entries and chains below them: a salt that is no longer used costs nothing.
        self._roots: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()

    def root(self, key: bytes) -> Entry | None:
        return self._roots.get(key)

    def add_root(self, key: bytes, digest: bytes) -> Entry:
        root = self._roots[key] = Entry(None, digest, b"", block=0)
        return root

    def find(self, parent: Entry, digest: bytes, tokens: bytes) -> Entry | None:
        """The entry of these tokens under that very parent."""
        entry = parent.child
        if entry is None or entry.tokens == tokens:
            return entry
        entry = self._by_digest.get(digest)
        while entry is not None and not (entry.parent is parent and entry.tokens == tokens):
            entry = entry.same_digest
        return entry

    def walk(self, root: Entry, contents: Iterable[tuple[bytes, bytes]]) -> list[Entry]:
        """The entries of the longest known prefix of a chain of (digest, tokens)."""
        found: list[Entry] = []
        parent = root
        for digest, tokens in contents:
            entry = self.find(parent, digest, tokens)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def add(self, parent: Entry, digest: bytes, tokens: bytes, block: int) -> Entry:
        entry = Entry(parent, digest, tokens, block)
        first = parent.child
        if first is None:
            parent.child = entry
            return entry
        after = entry.next_sibling = first.next_sibling
        if after is not None:
            after.previous_sibling = entry
        entry.previous_sibling = first
        first.next_sibling = entry
        entry.is_indexed = True
        entry.same_digest = self._by_digest.get(digest)
        self._by_digest[digest] = entry
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
        if entry.is_indexed:
            self._remove_digest(entry)
        entry.block = _DEAD
        # A dead entry, which a table may still name, keeps no other alive.
        entry.parent = entry.next_sibling = entry.previous_sibling = None

    def _remove_digest(self, entry: Entry) -> None:
        head = self._by_digest.pop(entry.digest)
        if head is not entry:
            self._by_digest[entry.digest] = head
            while head.same_digest is not entry:
                assert head.same_digest is not None
                head = head.same_digest
            head.same_digest = entry.same_digest
        elif entry.same_digest is not None:
            self._by_digest[entry.digest] = entry.same_digest
        entry.same_digest = None

    def entries(self) -> list[Entry]:
        """Every live entry."""
        return [e for root in self._roots.values() for e in root.descendants() if e is not root]
