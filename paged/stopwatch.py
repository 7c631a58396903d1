"""Time by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """Adds up seconds by part: `with clock("write"): ...`.

    `wait` returns when the device has finished what it was given; it is called at both ends, so
    that a part is charged for its own work alone.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wait = wait

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Charge the seconds of the body to `part`."""
        self._wait()
        start = perf_counter()
        yield
        self._wait()
        self.seconds[part] += perf_counter() - start
