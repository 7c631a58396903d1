"""What the prefix cache holds, by the contract's rules, kept the slow and obvious way."""

from __future__ import annotations

from collections.abc import Iterable


class Entry:
    """One published block: its content's name, its parent entry, the block that holds it."""

    def __init__(self, content: int, parent: Entry | None, block: int) -> None:
        self.content, self.parent, self.block = content, parent, block


class PrefixModel:
    """Published contents that can still be reached, and the free ones among them, oldest first."""

    def __init__(self, max_cached_blocks: int | None) -> None:
        self.max_cached_blocks = max_cached_blocks
        self.entries: dict[int, Entry] = {}  # by content
        self.by_block: dict[int, Entry] = {}
        self.lru: list[int] = []  # unreferenced cached blocks, next victim first

    def hits(self, contents: Iterable[int]) -> list[int]:
        """Blocks of the longest cached chain of these contents."""
        blocks = []
        for content in contents:
            entry = self.entries.get(content)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def is_live(self, entry: Entry | None) -> bool:
        """Whether content can be published below this entry (None: at the root)."""
        return entry is None or self.by_block.get(entry.block) is entry

    def publish(self, content: int, parent: Entry | None, block: int) -> Entry:
        """Make a written block shareable, unless its content is cached already."""
        if content not in self.entries:
            self.entries[content] = self.by_block[block] = Entry(content, parent, block)
        return self.entries[content]

    def withdraw(self, block: int) -> None:
        """Forget a block's content, and with it all that can be reached through it alone."""
        doomed = [self.by_block[block]] if block in self.by_block else []
        while doomed:
            entry = doomed.pop()
            del self.entries[entry.content], self.by_block[entry.block]
            if entry.block in self.lru:
                self.lru.remove(entry.block)
            doomed += [child for child in self.by_block.values() if child.parent is entry]

    def make_plain(self, num_blocks: int, plain: set[int]) -> set[int]:
        """Evict until so many plain blocks are free; returns the plain blocks there are then."""
        while len(plain) < num_blocks:
            cached = set(self.lru)
            self.withdraw(self.lru[0])
            plain = plain | (cached - set(self.lru))
        return plain

    def release(self, blocks: Iterable[int]) -> None:
        """These blocks, in this order, lost their last reference."""
        self.lru += [block for block in blocks if block in self.by_block]
        while self.max_cached_blocks is not None and len(self.lru) > self.max_cached_blocks:
            self.withdraw(self.lru[0])

    def hold(self, blocks: Iterable[int]) -> None:
        """These cached blocks are referenced (again)."""
        for block in blocks:
            if block in self.lru:
                self.lru.remove(block)

    def chain(self, entry: Entry | None) -> list[int]:
        """The blocks from the root to this entry; none if they are forgotten."""
        blocks: list[int] = []
        if self.is_live(entry):
            while entry is not None:
                blocks.insert(0, entry.block)
                entry = entry.parent
        return blocks

    def move(self, moved: dict[int, int]) -> None:
        """Blocks in use got new ids, and took their content along."""
        entries = {block: self.by_block.pop(block) for block in moved if block in self.by_block}
        for block, entry in entries.items():
            entry.block = moved[block]
            self.by_block[entry.block] = entry

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.by_block.clear()
        self.lru.clear()
