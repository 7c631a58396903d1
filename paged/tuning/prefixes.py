"""Prompt tokens that a prefix cache could find again, in closed form: with room for everything."""

from __future__ import annotations

from collections.abc import Sequence

from paged.trace import HASH_BLOCK_TOKENS, Request

from .traffic import TuningError


def shared_prefixes(requests: Sequence[Request]) -> list[int]:
    """Leading tokens of each prompt that an earlier one has, too, as far as the trace can tell.

    A trace tells it in steps of 512 tokens, one hash id each. TuningError without hash ids.
    """
    nodes: dict[tuple[int, int], int] = {}  # (node before, hash id) -> node; 0 is the start
    filled: dict[int, int] = {}  # node -> most of its tokens that a prompt has had
    shared = []
    for request in requests:
        if request.hash_ids is None:
            raise TuningError("the trace has no hash_ids, so what its prompts share is unknown")
        node = num_shared = 0
        is_shared, left = True, request.prompt_len
        for hash_id in request.hash_ids:
            node = nodes.setdefault((node, hash_id), len(nodes) + 1)
            size, known = min(left, HASH_BLOCK_TOKENS), filled.get(node, 0)
            if is_shared:
                num_shared += min(size, known)
                is_shared = known >= size
            filled[node] = max(size, known)
            left -= size
        shared.append(num_shared)
    return shared


def hit_tokens(requests: Sequence[Request], shared: Sequence[int], block_size: int) -> int:
    """Tokens found in the cache: whole blocks, and never a prompt's last token."""
    pairs = zip(requests, shared, strict=True)
    return sum(
        min(number, request.prompt_len - 1) // block_size * block_size for request, number in pairs
    )


def expected_loss(requests: Sequence[Request], shared: Sequence[int], block_size: int) -> float:
    """Tokens that blocks of this size are expected to miss, against blocks of one token.

    Two prompts that share an id and differ in the next part ways somewhere within those 512 tokens;
    every place is taken as equally likely. So blocks up to 512 miss (block_size - 1) / 2 tokens of
    each prompt that shares anything, though the hits counted at 512 cannot show it.
    """
    loss = 0.0
    for request, number in zip(requests, shared, strict=True):
        room = request.prompt_len - 1 - number  # more tokens that may be shared
        if number == 0:
            continue
        first = min(number, request.prompt_len - 1)
        places = max(1, min(HASH_BLOCK_TOKENS, room + 1))
        missed = _missed_up_to(first + places, block_size) - _missed_up_to(first, block_size)
        loss += missed / places
    return loss


def _missed_up_to(end: int, block_size: int) -> int:
    """The sum of n % block_size over 0 <= n < end."""
    full, rest = divmod(end, block_size)
    return full * block_size * (block_size - 1) // 2 + rest * (rest - 1) // 2
