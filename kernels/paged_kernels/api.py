"""The public functions: write new K and V into the pages, attend over them."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from ._backends import backend_module
from ._checks import check_attention, check_write
from .options import AttentionCall


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Store row `i` of `key` and `value` in slot `slot_mapping[i]` of the caches, in place.

    Slot `s` is offset `s % block_size` of block `s // block_size`.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, any strides with the last one 1 (a slice of a
            fused QKV will do), in the dtype of the cache unless that is quantised. Rows beyond
            `len(slot_mapping)` are ignored.
        value: `[num_tokens, num_kv_heads, head_dim_v]`, as `key`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides with the last
            one 1: float32, float16 or bfloat16, or quantised: float8_e4m3fn, float8_e5m2 or int8.
        value_cache: `[num_blocks, block_size, num_kv_heads, head_dim_v]`, dtype of `key_cache`.
        slot_mapping: int32 or int64 `[num_tokens]`. -1 is padding and never written; naming a
            slot twice is undefined.
        k_scale: None for a plain cache. fp8: a float > 0 or float32 `[num_kv_heads]`, None means
            1. int8: float32 `[num_blocks, block_size, num_kv_heads]`, filled here.
        v_scale: as `k_scale`.
        backend: "triton", "torch" or "reference". None: triton for GPU tensors, else torch.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a wrong shape, device, stride or option; a slot outside the pool (CPU tensors,
            and everywhere under PAGED_DEBUG=1, which also reports a slot that is named twice).

    The name and the layout are those of vLLM (Kwon et al. 2023, "Efficient Memory Management for
    Large Language Model Serving with PagedAttention").
    """
    arguments = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, backend)
    # A subclass of Tensor, a fake one say, and a trace need the operator.
    if (type(key) is not Tensor and isinstance(key, Tensor)) or is_compiling():
        from .library import traced_write

        return traced_write(*arguments)
    k_scale, v_scale, backend = check_write(*arguments)
    return run_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, backend)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    common_prefix_len: int | None = None,
    draft_mask: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over the K and V that each sequence keeps in its blocks.

    Query token `j` of a sequence with `q` query tokens sits at position `seq_len - q + j`, so a
    causal mask is aligned bottom-right. With `q = 3` and `seq_len = 5`, rows queries, columns keys:

        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1

    With `q = 5` and `seq_len = 3` the first two queries lie before the sequence and see nothing:

        0 0 0
        0 0 0
        1 0 0
        1 1 0
        1 1 1

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32, float16 or bfloat16, any strides with
            the last one 1. Heads `h * group_size ..` share KV head `h`. Rows at or past
            `cu_seqlens_q[-1]` are padding: output 0, lse -inf.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` in the dtype of `query`, or
            quantised; any strides with the last one 1, so other layouts come as permuted views.
        value_cache: `[num_blocks, block_size, num_kv_heads, head_dim_v]`, dtype of `key_cache`.
        block_table: int32 or int64 `[num_seqs, max_blocks_per_seq]`, block ids. Entries past the
            last token, and those wholly before the sliding window, may hold anything.
        seq_lens: int32 or int64 `[num_seqs]`, tokens in the cache, the new ones included.
        cu_seqlens_q: int32 or int64 `[num_seqs + 1]`, prefix sums of the query lengths. None:
            decode, one query token per sequence.
        max_query_len: upper bound of the query lengths, a promise; default the rows of `query`.
        max_seq_len: upper bound of `seq_lens`, a promise; default what `block_table` can hold.
            Both are read on the host, so that no call waits for the device.
        scale: factor of `q . k`; default `head_dim ** -0.5`.
        causal: a query sees the keys up to its own position; False: every key of its sequence.
        sliding_window: `w` >= 1: only keys at positions > query position - w, the query's own
            included. With `causal=False` only the past is bounded.
        softcap: > 0: scores become `softcap * tanh(scores / softcap)`, before bias and mask.
        alibi_slopes: float32 `[num_heads]`: adds `slope * (key position - query position)`.
        sinks: float32 `[num_heads]`: the natural logit of one more key per head, without a value.
        k_scale: as written by `reshape_and_cache`; None for a plain cache.
        v_scale: as `k_scale`.
        num_splits: parts that each KV sequence is read in, at once, and merged; None: chosen.
            The result agrees within rounding; for a fixed value a row's bits depend on it alone.
        split_size: tokens per split, instead of `num_splits`: a row's bits depend on it alone too.
        common_prefix_len: tokens, a multiple of `block_size`: the promise that the table entries
            of these are equal in all rows, and that no query lies before their end.
        draft_mask: bool `[num_seqs, max_query_len, max_query_len]`: query `i` sees new token `j`.
            It replaces the causal rule among the new tokens; earlier ones are all seen. The window
            bounds both, by the positions of storage. Only `[:q, :q]` is read.
        out: `[num_tokens, num_heads, head_dim_v]` in the dtype of `query`, last stride 1, to fill.
        return_lse: also return the log-sum-exp of each row.
        backend: "triton", "torch" or "reference". None: triton for GPU tensors, else torch.

    Returns:
        `[num_tokens, num_heads, head_dim_v]` in the dtype of `query`. With `return_lse` also
        float32 `[num_tokens, num_heads]`: the natural logarithm of the sum over all keys seen, the
        sink included. A row that sees no key gets output 0 and lse -inf, or the sink.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a wrong shape, device, stride or head ratio; an option that the backend cannot
            honour; an input that requires grad (there is no backward pass); for CPU tensors, and
            everywhere under PAGED_DEBUG=1, also lengths, block ids and promises that do not hold.

    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention"; splits as in Dao et al. 2023, "Flash-Decoding"; the shared prefix as in Ye et
    al. 2024, "Cascade Inference"; sinks as in Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks"; slopes as in Press et al. 2021, "Train Short, Test Long".
    """
    arguments = (
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_query_len,
        max_seq_len,
        scale,
        causal,
        sliding_window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        num_splits,
        split_size,
        common_prefix_len,
        draft_mask,
        out,
        return_lse,
        backend,
    )
    # A subclass of Tensor, a fake one say, and a trace need the operator.
    if (type(query) is not Tensor and isinstance(query, Tensor)) or is_compiling():
        from .library import traced_attention

        return traced_attention(*arguments)
    call, backend = check_attention(*arguments)
    run_attention(call, backend)
    return call.out if call.lse is None else (call.out, call.lse)


def run_attention(call: AttentionCall, backend: str) -> None:
    """Fill the outputs of a validated call."""
    if len(call.query) > 0 and len(call.seq_lens) > 0 and call.max_query_len > 0:
        backend_module(backend).attend(call)
    else:  # nothing but padding: no launch
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))


def run_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    backend: str,
) -> None:
    """Make a validated write."""
    if len(slot_mapping) > 0:
        backend_module(backend).reshape_and_cache(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
        )
