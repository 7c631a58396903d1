"""Four ways of reserving memory for sequences that grow, in closed form.

longest       one piece as long as the longest sequence of the traffic, as a padded batch has it
power of two  one piece, the next power of two of the sequence's own final length
pages         blocks, taken when they are needed
oracle        one piece of exactly the final length, known beforehand

Only the first and the third can be had without knowing the future. Pieces are counted as if they
always found a place: the holes between them (external fragmentation) come on top, pages have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paged.replay_config import final_length
from paged.replay_memory import next_power_of_two
from paged.trace import Request

from .traffic import life
from .waste import Slots, slots_at_end, slots_over_life

LONGEST, POWER_OF_TWO, PAGES, ORACLE = "longest", "power of two", "pages", "oracle"


@dataclass(frozen=True)
class Reservation:
    """What one scheme reserves for a traffic. Shares in 0..1.

    use_at_end     reserved slots that carry a token when every sequence has its full length
    use_over_life  the same over all steps of all sequences, which begin with their prompts
    average        slots that a running sequence holds, over all steps
    sequences      how many of those fit into the memory at once; None without a memory
    """

    scheme: str
    use_at_end: float
    use_over_life: float
    average: float
    sequences: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def reservations(
    requests: Sequence[Request], block_size: int, memory_tokens: int | None = None
) -> list[Reservation]:
    """All four schemes; `memory_tokens` is how many tokens the memory has slots for."""
    longest = max(map(final_length, requests))
    num_steps = sum(len(life(request)) for request in requests)
    tokens = (
        Slots(0, slots_at_end(requests, 1).tokens),
        Slots(0, slots_over_life(requests, 1).tokens),
    )

    def reserved_once(scheme: str, slots: Sequence[int]) -> Reservation:
        over_life = sum(
            size * len(life(request)) for size, request in zip(slots, requests, strict=True)
        )
        return made(scheme, Slots(sum(slots), tokens[0].tokens), Slots(over_life, tokens[1].tokens))

    def made(scheme: str, at_end: Slots, over_life: Slots) -> Reservation:
        average = over_life.held / num_steps
        fit = None if memory_tokens is None else int(memory_tokens // average)
        return Reservation(scheme, 1 - at_end.waste, 1 - over_life.waste, average, fit)

    finals = [final_length(request) for request in requests]
    return [
        reserved_once(LONGEST, [longest] * len(finals)),
        reserved_once(POWER_OF_TWO, [next_power_of_two(length) for length in finals]),
        made(PAGES, slots_at_end(requests, block_size), slots_over_life(requests, block_size)),
        reserved_once(ORACLE, finals),
    ]
