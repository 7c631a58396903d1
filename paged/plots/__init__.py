"""Pictures. Each function returns a matplotlib Figure and writes it to `path` when one is given.

None needs a display or touches pyplot, and importing this package loads no matplotlib. Colours are
Okabe and Ito's, which colour-blind readers can tell apart; wherever a colour means something, so
does a lightness, a hatch, a marker or a word, so that a print in grey says the same.
"""

from .blocks import block_map, block_map_of, owners
from .dense import memory_and_time
from .policies import hits_against_pool_size
from .rates import roofline
from .sharing import prefix_sharing_tree
from .style import CACHED, FREE, OWNER_COLOURS, SHARED, STATE_COLOURS
from .usage import usage_over_time
from .waste import waste_against_block_size

__all__ = [
    "CACHED",
    "FREE",
    "OWNER_COLOURS",
    "SHARED",
    "STATE_COLOURS",
    "block_map",
    "block_map_of",
    "hits_against_pool_size",
    "memory_and_time",
    "owners",
    "prefix_sharing_tree",
    "roofline",
    "usage_over_time",
    "waste_against_block_size",
]
