"""Chained block digests: a block's digest covers everything before it.

    digest[k] = hash(digest[k - 1] + tokens of block k as int32),   digest[-1] = hash(seed, keys)

so that salt and extra key, hashed into the root, reach every later block.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Any

from .config import HashFn
from .prefix_index import Entry, PrefixIndex
from .sequence import SequenceLike, checked_tokens


class DigestChain:
    """The digests of one sequence's full blocks, extended as it grows and never computed twice."""

    __slots__ = ("digests", "hasher", "hits", "hits_key", "root", "tokens")

    def __init__(self, hasher: Hasher, root: Entry) -> None:
        self.hasher = hasher
        self.root = root
        self.digests: list[bytes] = []
        self.tokens: list[bytes] = []  # of each block, as compared on a hit
        self.hits: list[Entry] = []  # the last lookup's answer,
        self.hits_key: tuple[int, int] | None = None  # and what it depended on

    def copy(self) -> DigestChain:
        twin = DigestChain(self.hasher, self.root)
        twin.digests = self.digests.copy()
        twin.tokens = self.tokens.copy()
        return twin

    def truncate(self, num_blocks: int) -> None:
        del self.digests[num_blocks:]
        del self.tokens[num_blocks:]
        self.hits_key = None


class Hasher:
    """Digests for one manager: the hash function, its seed and the roots of all chains."""

    def __init__(self, block_size: int, hash_fn: HashFn | None, hash_seed: int | None) -> None:
        self.index = PrefixIndex()
        self._block_size = block_size
        self._pack_block = struct.Struct(f"={block_size}i").pack
        self._hash_fn = hash_fn if hash_fn is not None else _default_hash_fn()
        self._seed = secrets.token_bytes(16) if hash_seed is None else b"%d" % hash_seed

    def chain_of(self, seq: SequenceLike) -> DigestChain:
        """The chain that is kept on the sequence, or a new one.

        An object that refuses the attribute `digests` is served as well; its digests are then
        computed at every admission.
        """
        chain = getattr(seq, "digests", None)
        if isinstance(chain, DigestChain) and chain.hasher is self and self._ends_in(seq, chain):
            return chain
        root = self.root(getattr(seq, "salt", None), getattr(seq, "extra_key", None))
        chain = DigestChain(self, root)
        self.keep(seq, chain)
        return chain

    def _ends_in(self, seq: SequenceLike, chain: DigestChain) -> bool:
        """Whether the chain's last block is where its tokens are: a guard against edits by hand."""
        end = len(chain.tokens) * self._block_size
        last = seq.token_ids[max(0, end - self._block_size) : end]
        return not end or pack(last) == chain.tokens[-1]

    def keep(self, seq: SequenceLike, chain: DigestChain) -> None:
        try:
            seq.digests = chain  # type: ignore[attr-defined]
        except AttributeError:
            return

    def root(self, salt: Any, extra_key: Any) -> Entry:
        """Where chains with this salt and extra key start."""
        key = _key_bytes("salt", salt) + _key_bytes("extra_key", extra_key)
        root = self.index.root(key)
        if root is None:
            root = self.index.add_root(key, self.digest(self._seed + key))
        return root

    def digest(self, data: bytes) -> bytes:
        digest = self._hash_fn(data)
        if not isinstance(digest, bytes):
            raise TypeError(f"hash_fn returned {digest!r}; it must return bytes")
        return digest

    def extend(self, chain: DigestChain, token_ids: list[int], num_blocks: int) -> None:
        """Compute the digests of blocks that are missing up to `num_blocks`."""
        done = len(chain.digests)
        if num_blocks <= done:
            return
        size, pack_block, hash_fn = self._block_size, self._pack_block, self._hash_fn
        digest = chain.digests[-1] if done else chain.root.digest
        for start in range(done * size, num_blocks * size, size):
            try:
                tokens = pack_block(*token_ids[start : start + size])
            except struct.error:
                tokens = pack_block(*checked_tokens(token_ids)[start : start + size])
            digest = hash_fn(digest + tokens)
            chain.digests.append(digest)
            chain.tokens.append(tokens)


def pack(token_ids: Sequence[int]) -> bytes:
    """Tokens as int32, as the digests see them: equal bytes exactly for equal tokens."""
    return struct.pack(f"={len(token_ids)}i", *token_ids)


def _default_hash_fn() -> HashFn:
    import xxhash

    return xxhash.xxh3_128_digest


def _key_bytes(name: str, value: Any) -> bytes:
    """An injective encoding: values that differ in type or value give different bytes."""
    if value is None:
        return b"n"
    if isinstance(value, tuple):
        return b"t%d:" % len(value) + b"".join(_key_bytes(name, item) for item in value)
    if isinstance(value, bool | int):
        text = b"%s%d" % (b"b" if isinstance(value, bool) else b"i", value)
    elif isinstance(value, str):
        text = b"s" + value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        text = b"y" + value
    elif isinstance(value, float):
        text = b"f" + value.hex().encode()
    else:
        wanted = "None, an int, float, str, bytes or a tuple of these"
        raise TypeError(f"{name} is {value!r}; it must be {wanted}")
    return b"%d:" % len(text) + text
