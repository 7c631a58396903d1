"""A KV cache that holds names instead of numbers: what block moves must keep true, made visible.

The K/V of a token depends on every token before it, so its stand-in here is a number that names the
whole prefix, salt and extra key included. Reading back the right number proves the right history.
"""

from __future__ import annotations

from collections.abc import Iterable

Pairs = Iterable[tuple[int, int]]


class PrefixNames:
    """Gives every distinct prefix of tokens, under every salt and extra key, a number of its own."""

    def __init__(self) -> None:
        self._names: dict[object, int] = {}

    def _name(self, key: object) -> int:
        return self._names.setdefault(key, len(self._names))

    def root(self, salt: object, extra_key: object) -> int:
        """The empty prefix. Types count: 1, True and "1" are three different keys."""
        return self._name(((type(salt), salt), (type(extra_key), extra_key)))

    def extend(self, prefix: int, tokens: Iterable[int]) -> list[int]:
        """The names of `prefix` followed by one token, two tokens, ..., all tokens."""
        names = []
        for token in tokens:
            prefix = self._name((prefix, token))
            names.append(prefix)
        return names


class FakeCache:
    """One value per (tier, block, offset); pairs of one call move as the contract says: staged."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.gpu: list[list[int | None]] = [[None] * block_size for _ in range(num_gpu_blocks)]
        self.cpu: list[list[int | None]] = [[None] * block_size for _ in range(num_cpu_blocks)]

    def write(self, slots: Iterable[int], values: Iterable[int]) -> None:
        """What reshape_and_cache does with slot_mapping."""
        for slot, value in zip(slots, values, strict=True):
            assert 0 <= slot < len(self.gpu) * self.block_size
            self.gpu[slot // self.block_size][slot % self.block_size] = value

    def copy(self, pairs: Pairs) -> None:
        """Copy-on-write, GPU to GPU."""
        _move(self.gpu, self.gpu, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """GPU to CPU; what the GPU blocks held stays there until it is overwritten."""
        _move(self.gpu, self.cpu, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """CPU to GPU."""
        _move(self.cpu, self.gpu, pairs)

    def resize(self, num_blocks: int) -> None:
        """Give memory back, or take some that holds nothing."""
        del self.gpu[num_blocks:]
        self.gpu += [[None] * self.block_size for _ in range(num_blocks - len(self.gpu))]

    def poison(self, blocks: Iterable[int]) -> None:
        """Newly handed out blocks hold nothing one may rely on."""
        for block in blocks:
            self.gpu[block] = [None] * self.block_size


def _move(sources: list[list], destinations: list[list], pairs: Pairs) -> None:
    staged = [(list(sources[source]), destination) for source, destination in pairs]
    assert len({destination for _, destination in staged}) == len(staged), "one target, two copies"
    for values, destination in staged:
        destinations[destination] = values
