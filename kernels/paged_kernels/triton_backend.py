"""The Triton backend: plans the launches of one call as data, then runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ._heuristics import Tile, choose_num_splits, device_of, padded, power_of_two, tiles_for
from ._launch import Launch, Strided, strided
from .attention import attention_kernel
from .merge import merge_kernel
from .options import AttentionCall, Dims, Variant
from .write import write_kernel

ANY_LENGTH = 2**31 - 1
MAX_SPLITS = 65535  # of a grid's last axis
MAX_LENGTH = 2**30  # positions are int32

Tiles = tuple[Tile, Tile]  # of decode, of prefill


class KV(NamedTuple):
    """Both caches, and the scales [num_blocks, block_size, num_kv_heads] of what they store."""

    key: Strided
    value: Strided
    key_scale: Strided | None
    value_scale: Strided | None


class Store(NamedTuple):
    """A cache to write, and the scale of what it stores: one number, or per slot and head."""

    cache: Strided
    scale: float
    scales: Strided | None


class Extras(NamedTuple):
    """Optional tensors; None is compiled away."""

    alibi_slopes: Tensor | None
    sinks: Tensor | None
    draft_mask: Strided | None


class Rows(NamedTuple):
    """Which sequences a launch serves, and where it puts their rows. Baked into the kernel."""

    prefill: bool  # find the sequence of each query tile; False: program i is sequence i
    shortest: int  # query lengths served
    longest: int
    packed: bool  # output row = query token; False: sequence * longest + token


def attend(call: AttentionCall) -> None:
    """Fill call.out and call.lse."""
    if call.cu_seqlens_q is not None:  # rows past the last query token are padding
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
    for launch in plan(call):
        launch.run()


def plan(call: AttentionCall) -> list[Launch]:
    """The launches of a call, in order."""
    window = call.variant.sliding_window
    if window is not None and window > MAX_LENGTH:
        call = call._replace(variant=replace(call.variant, sliding_window=MAX_LENGTH))
    tiles = _tiles(call)
    step = max(tile.n for tile in tiles)
    shared = call.common_prefix_len // step * step
    if shared > 0 and call.reads_prefix_once:
        return _plan_cascade(call, tiles, shared)
    return _plan_batch(call, tiles)


def _plan_batch(call: AttentionCall, tiles: Tiles, first_key: int = 0) -> list[Launch]:
    """Every sequence over its keys from first_key on: decodes, and prefills if there may be any."""
    decode, prefill = tiles
    launches = _plan_decode(call, decode, first_key)
    decode_tokens = _tokens(call, decode)
    if call.max_query_len > decode_tokens:
        rows = Rows(prefill=True, shortest=decode_tokens + 1, longest=ANY_LENGTH, packed=True)
        programs = call.query.shape[0] // _tokens(call, prefill) + call.seq_lens.shape[0]
        launches.append(_attention(call, prefill, rows, (programs, 1), first_key))
    return launches


def _plan_decode(call: AttentionCall, tile: Tile, first_key: int) -> list[Launch]:
    """One query tile per sequence, perhaps split along its keys and merged again."""
    num_seqs = call.seq_lens.shape[0]
    tokens = 1 if call.cu_seqlens_q is None else min(_tokens(call, tile), call.max_query_len)
    rows = Rows(prefill=False, shortest=1, longest=tokens, packed=True)

    keys = call.max_seq_len - first_key
    if call.variant.sliding_window is not None:
        keys = min(keys, call.variant.sliding_window + tokens + tile.n)
    split_size = 0  # even parts of each sequence
    if call.split_size is not None:
        split_size = _round_up(min(call.split_size, MAX_LENGTH), tile.n)
        num_splits = -(-keys // split_size)
        if num_splits > MAX_SPLITS:
            raise ValueError(
                f"split_size must give at most {MAX_SPLITS} splits, got {call.split_size} for "
                f"sequences of up to {keys} tokens: pass max_seq_len, or a larger split_size"
            )
    elif call.num_splits is not None:
        num_splits = min(call.num_splits, -(-keys // tile.n), MAX_SPLITS)
    else:
        num_splits = _choose_splits(call, num_seqs, keys, tile)
    # Whether parts are merged must not follow from the other rows, or a row's bits would too.
    if (call.num_splits or num_splits) == 1 and call.split_size is None:
        return [_attention(call, tile, rows, (num_seqs, 1), first_key)]
    out, lse = _parts(call, max(1, num_splits), num_seqs * tokens)
    part = call._replace(out=out, lse=lse, sinks=None)
    rows = rows._replace(packed=False)
    grid = (num_seqs, out.shape[0])
    return [
        _attention(part, tile, rows, grid, first_key, split_size),
        _merge(call, out, lse, tokens=tokens),
    ]


def _plan_cascade(call: AttentionCall, tiles: Tiles, shared: int) -> list[Launch]:
    """All queries over the first `shared` keys, read once; over the rest; then a merge."""
    num_tokens, tile = call.query.shape[0], tiles[1]
    query_tiles = num_tokens // _tokens(call, tile) + 1
    num_splits = _choose_splits(call, query_tiles, shared, tile)
    out, lse = _parts(call, num_splits + 1, num_tokens)
    lse.fill_(float("-inf"))  # padding rows have no part

    if call.cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(2, dtype=torch.int32, device=out.device) * num_tokens
    else:
        cu_seqlens_q = call.cu_seqlens_q[:: call.seq_lens.shape[0]].contiguous()
    # a padded row 0 has no entries; the longest sequence has them all, and no sync finds it
    longest = call.seq_lens.argmax().view(1)
    prefix = call._replace(
        block_table=call.block_table.index_select(0, longest),
        seq_lens=torch.full_like(call.seq_lens[:1], shared),
        cu_seqlens_q=cu_seqlens_q,
        variant=Variant(causal=False, softcap=call.variant.softcap),
        sinks=None,  # they join once, with the suffix
        draft_mask=None,  # every query sees the whole prefix
        out=out[:-1],
        lse=lse[:-1],
    )
    rows = Rows(prefill=True, shortest=1, longest=ANY_LENGTH, packed=True)
    suffix = call._replace(out=out[-1], lse=lse[-1])
    return [
        _attention(prefix, tile, rows, (query_tiles, num_splits)),
        *_plan_batch(suffix, tiles, first_key=shared),
        _merge(call._replace(sinks=None, cu_seqlens_q=None), out, lse, tokens=1),
    ]


def _attention(
    call: AttentionCall,
    tile: Tile,
    rows: Rows,
    grid: tuple[int, int],
    first_key: int = 0,
    split_size: int = 0,
) -> Launch:
    """attention_kernel on a grid of (query tiles, splits)."""
    draft_mask = None
    if call.draft_mask is not None:  # its rows are read with stride 1
        draft_mask = strided(call.draft_mask.contiguous().view(torch.uint8))
    args = (
        _in_parts(call.out, 4),
        None if call.lse is None else _in_parts(call.lse, 3),
        strided(call.query),
        KV(
            strided(call.key_cache),
            strided(call.value_cache),
            _scales(call.k_scale),
            _scales(call.v_scale),
        ),
        call.block_table,
        call.block_table.stride(0),
        call.seq_lens,
        call.cu_seqlens_q,
        call.seq_lens.shape[0],
        Extras(call.alibi_slopes, call.sinks, draft_mask),
        call.scale * _factor(call.k_scale),
        _factor(call.v_scale),
        first_key,
        split_size,
    )
    constants = {"DIMS": call.dims, "VARIANT": call.variant, "TILE": tile, "ROWS": rows}
    tiles, splits = grid
    grid3 = (tiles, call.dims.num_kv_heads, splits)
    device = call.query.device
    return Launch(attention_kernel, grid3, args, constants, device, tile.num_warps, tile.num_stages)


def _in_parts(x: Tensor, dims: int) -> Strided:
    """A result with its axis of parts; a whole one is the only part."""
    return strided(x) if x.dim() == dims else Strided(x, (0, *x.stride()))


def _scales(scale: float | Tensor | None) -> Strided | None:
    """Scales per slot and head; per head, as a view. One number is folded into the launch's own."""
    if not isinstance(scale, Tensor):
        return None
    return strided(scale) if scale.dim() == 3 else Strided(scale, (0, 0, 1))


def _factor(scale: float | Tensor | None) -> float:
    return scale if isinstance(scale, float) else 1.0


def _choose_splits(call: AttentionCall, query_tiles: int, keys: int, tile: Tile) -> int:
    device, dims = device_of(call.query.device), call.dims
    programs = query_tiles * dims.num_kv_heads
    return choose_num_splits(programs, keys, dims.group_size, tile, device)


def _merge(call: AttentionCall, out: Tensor, lse: Tensor, *, tokens: int) -> Launch:
    """merge_kernel over parts [num_parts, num_rows, ...] into call.out and call.lse."""
    num_parts, num_rows, num_heads, width = out.shape
    args = (
        strided(call.out),
        None if call.lse is None else strided(call.lse),
        strided(out),
        strided(lse),
        num_parts,
        call.cu_seqlens_q,
        call.sinks,
    )
    constants = {"TOKENS": tokens, "WIDTH": width, "PADDED": padded(width)}
    return Launch(merge_kernel, (num_rows, num_heads), args, constants, out.device, num_warps=1)


def _parts(call: AttentionCall, num_parts: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Room for partial results, float32: out [num_parts, num_rows, H, Dv], lse [..., H]."""
    _, num_heads, head_dim_v = call.out.shape
    shape = (num_parts, num_rows, num_heads)
    new = partial(torch.empty, dtype=torch.float32, device=call.query.device)
    # Triton compiles anew when a stride stops being a multiple of 16: the rows of lse are padded.
    lse = new((num_parts, num_rows, _round_up(num_heads, 16)))
    return new((*shape, head_dim_v)), lse[:, :, :num_heads]


def _tiles(call: AttentionCall) -> Tiles:
    """The tiles of decode and of prefill."""
    quantised = call.key_cache.dtype != call.query.dtype
    return tiles_for(call.dims, call.query.element_size(), quantised, device_of(call.query.device))


def _tokens(call: AttentionCall, tile: Tile) -> int:
    """Query tokens in one tile."""
    return tile.m // call.dims.group_size


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> None:
    """Write each token's K and V to its slot."""
    plan_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale).run()


def plan_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Launch:
    """The launch of write_kernel."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    head_dim_v = value_cache.shape[3]
    dims = Dims(num_kv_heads, num_kv_heads, head_dim, head_dim_v, block_size)
    # all heads of a token in one program, as far as registers allow
    heads = min(power_of_two(num_kv_heads), 4096 // padded(max(head_dim, head_dim_v)))
    stored = str(key_cache.dtype).removeprefix("torch.")
    if stored.startswith("float8"):  # the kernel makes the bytes itself
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    elif stored != "int8":
        stored = "plain"
    args = (
        Store(strided(key_cache), _factor(k_scale), _scales(k_scale)),
        Store(strided(value_cache), _factor(v_scale), _scales(v_scale)),
        strided(key),
        strided(value),
        slot_mapping,
    )
    constants = {"DIMS": dims, "HEADS": heads, "STORED": stored}
    grid = (slot_mapping.shape[0], -(-num_kv_heads // heads))
    return Launch(write_kernel, grid, args, constants, key.device)
