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

    __slots__ = ("__weakref__", "block", "child", "digest", "more", "parent", "tokens")

    def __init__(self, parent: Entry | None, digest: bytes, tokens: bytes, block: int) -> None:
        self.parent = parent  # None: a root, or dead
        self.digest = digest
        self.tokens = tokens
        self.block = block
        self.child: Entry | None = None
        self.more: dict[bytes, list[Entry]] | None = None  # further children, by digest

    @property
    def is_live(self) -> bool:
        """Whether a lookup can still find this entry (roots can always be found)."""
        return self.block != _DEAD

    def children(self) -> list[Entry]:
        first = [] if self.child is None else [self.child]
        return first if self.more is None else first + [e for es in self.more.values() for e in es]

    def descendants(self) -> list[Entry]:
        """All entries below this one, parents first."""
        found = self.children()
        for entry in found:
            found += entry.children()
        return found


class PrefixIndex:
    """All live entries, as trees below one root per salt and extra key.

    Most blocks have one successor: it is `child`, and needs no digest to be found. Where a prefix
    branches, a digest says where to look among the `more`. Either way tokens are compared under
    that very parent, so a bad hash costs time and never correctness.
    """

    def __init__(self) -> None:
        # Held by the entries and chains below them: a salt that is no longer used costs nothing.
        self._roots: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()

    def root(self, key: bytes) -> Entry | None:
        return self._roots.get(key)

    def add_root(self, key: bytes, digest: bytes) -> Entry:
        root = self._roots[key] = Entry(None, digest, b"", block=0)
        return root

    def find(self, parent: Entry, digest: bytes, tokens: bytes) -> Entry | None:
        """The entry of these tokens under that very parent."""
        child = parent.child
        if child is not None and child.tokens == tokens:
            return child
        if parent.more is not None:
            for entry in parent.more.get(digest, ()):
                if entry.tokens == tokens:
                    return entry
        return None

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
        if parent.child is None:
            parent.child = entry
        else:
            if parent.more is None:
                parent.more = {}
            parent.more.setdefault(digest, []).append(entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry without children."""
        parent = entry.parent
        assert parent is not None
        if parent.child is entry:
            parent.child = None
        else:
            assert parent.more is not None
            same_digest = parent.more[entry.digest]
            same_digest.remove(entry)
            if not same_digest:
                del parent.more[entry.digest]
                if not parent.more:
                    parent.more = None
        entry.block = _DEAD
        entry.parent = None  # a table may still name a dead entry, which keeps no other alive

    def entries(self) -> list[Entry]:
        """Every live entry."""
        return [entry for root in self._roots.values() for entry in root.descendants()]
