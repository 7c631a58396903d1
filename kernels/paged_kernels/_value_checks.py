"""What only the numbers inside tensors can tell: for CPU tensors, and everywhere under PAGED_DEBUG=1."""

from __future__ import annotations

import torch
from torch import Tensor

from ._backends import debugging
from ._known import known, known_of
from .options import AttentionCall


def check_attention_values(call: AttentionCall) -> None:
    """Lengths, block ids and promises of an attention call; ValueError names the first offender."""
    limits = len(call.query), len(call.key_cache), call.max_query_len, call.max_seq_len
    mask_side = None if call.draft_mask is None else call.draft_mask.shape[1]
    options = mask_side, call.common_prefix_len, call.variant.sliding_window, call.dims.block_size
    known_of(call).once(("checked", *limits, *options), lambda: _check_numbers(call))
    _check_scale_values("k_scale", call.k_scale, call.key_cache)
    _check_scale_values("v_scale", call.v_scale, call.value_cache)


def check_write_values(
    key_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> None:
    """Slots lie in the pool; under PAGED_DEBUG=1 no slot is written twice."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    known("slots", slot_mapping).once(
        ("checked", num_slots, debugging()), lambda: _check_slots(slot_mapping, num_slots)
    )
    _check_scale_values("k_scale", k_scale, key_cache)
    _check_scale_values("v_scale", v_scale, key_cache)


def _check_numbers(call: AttentionCall) -> None:
    query_lens = _check_query_lens(call)
    seq_lens = _host(call.seq_lens)
    _refuse_first(
        (seq_lens < 0) | (seq_lens > call.max_seq_len),
        seq_lens,
        "seq_lens",
        f"in 0..{call.max_seq_len}, what max_seq_len and the width of block_table allow",
    )
    block_ids, is_read = _entries_read(call, seq_lens, query_lens)
    num_blocks = len(call.key_cache)
    _refuse_first(
        is_read & ((block_ids < 0) | (block_ids >= num_blocks)),
        block_ids,
        "block_table",
        f"in 0..{num_blocks - 1} where a sequence has tokens to read",
    )
    if call.common_prefix_len > 0:
        _check_prefix(call, block_ids, is_read, seq_lens, query_lens)


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    slots = _host(slot_mapping)
    _refuse_first(
        (slots < -1) | (slots >= num_slots),
        slots,
        "slot_mapping",
        f"in 0..{num_slots - 1}, or -1 for padding",
    )
    if debugging():
        distinct, counts = slots[slots >= 0].unique(return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                "slot_mapping must name each slot once, got slot "
                f"{int(distinct[counts > 1][0])} {int(counts.max())} times"
            )


def _check_query_lens(call: AttentionCall) -> Tensor:
    num_tokens = len(call.query)
    if call.cu_seqlens_q is None:
        return torch.ones(num_tokens, dtype=torch.int64)
    starts = _host(call.cu_seqlens_q)
    query_lens = starts.diff()
    if starts[0] != 0 or starts[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens_q must start at 0 and end at most at the {num_tokens} rows of query, "
            f"got {int(starts[0])} .. {int(starts[-1])}"
        )
    mask, limit = call.draft_mask, "max_query_len"
    if mask is not None and mask.shape[1] == call.max_query_len:
        limit = f"draft_mask of shape {list(mask.shape)}"
    _refuse_first(
        (query_lens < 0) | (query_lens > call.max_query_len),
        query_lens,
        "the differences of cu_seqlens_q",
        f"in 0..{call.max_query_len}, what {limit} allows",
    )
    return query_lens


def _entries_read(
    call: AttentionCall, seq_lens: Tensor, query_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """The leading columns of the table, and which of their entries some query looks up."""
    block_size = call.key_cache.shape[1]
    width = -(-int(seq_lens.max()) // block_size) if len(seq_lens) else 0
    block_ids = _host(call.block_table[:, :width])
    first_token = torch.arange(width) * block_size
    is_read = (first_token < seq_lens[:, None]) & (query_lens > 0)[:, None]
    if call.variant.sliding_window is not None:
        oldest_seen = seq_lens - query_lens - call.variant.sliding_window + 1
        is_read &= first_token + block_size > oldest_seen[:, None]
    return block_ids, is_read


def _check_prefix(
    call: AttentionCall, block_ids: Tensor, is_read: Tensor, seq_lens: Tensor, query_lens: Tensor
) -> None:
    prefix = call.common_prefix_len
    active = (query_lens > 0).nonzero().flatten()
    if len(active) == 0:
        return
    first_query = seq_lens - query_lens
    _refuse_first(
        (first_query < prefix) & (query_lens > 0),
        first_query,
        "the first query position",
        f">= common_prefix_len {prefix}",
    )
    columns = prefix // call.key_cache.shape[1]
    shared = block_ids[:, :columns]
    _refuse_first(
        is_read[:, :columns] & is_read[active[0], :columns] & (shared != shared[active[0]]),
        shared,
        "block_table",
        f"the same in all rows for the first {columns} entries, which common_prefix_len promises",
    )


def _check_scale_values(name: str, scale: float | Tensor | None, cache: Tensor) -> None:
    if isinstance(scale, Tensor) and cache.dtype != torch.int8:  # int8 scales: unwritten slots
        values = scale.cpu()  # may hold anything
        _refuse_first(~((values > 0) & values.isfinite()), values, name, "finite and > 0")


def _refuse_first(wrong: Tensor, values: Tensor, name: str, want: str) -> None:
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        at = ", ".join(map(str, place))
        raise ValueError(f"{name} must be {want}, got {values[place].item()} at [{at}]")


def _host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.int64)
