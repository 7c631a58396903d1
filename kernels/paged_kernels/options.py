"""What travels from the public functions to a backend: plain, frozen, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ._require import require_int, require_number


@dataclass(frozen=True)
class Variant:
    """Which attention is computed. The Triton kernels bake it in: one compiled kernel per value."""

    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be a bool, got {self.causal!r}")
        if self.sliding_window is not None:
            require_int("sliding_window", self.sliding_window, 1)
        if self.softcap is not None:
            require_number("softcap", self.softcap)
            if self.softcap <= 0:
                raise ValueError(f"softcap must be > 0 or None, got {self.softcap}")
            # 30 and 30.0 are one kernel, and 2**70 is a number that kernels take
            object.__setattr__(self, "softcap", float(self.softcap))


@dataclass(frozen=True)
class Dims:
    """Sizes that a compiled kernel is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionCall(NamedTuple):
    """One validated `paged_attention` call. Every backend fills `out` (and `lse`) from it."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim_v]
    block_table: Tensor  # int32 or int64 [num_seqs, max_blocks_per_seq]
    seq_lens: Tensor  # int32 or int64 [num_seqs]
    cu_seqlens_q: Tensor | None  # int32 or int64 [num_seqs + 1]; None: decode, one token each
    max_query_len: int  # upper bounds, never read off the device
    max_seq_len: int
    scale: float
    variant: Variant
    alibi_slopes: Tensor | None  # float32 [num_heads]
    sinks: Tensor | None  # float32 [num_heads]
    k_scale: float | Tensor | None  # of a quantised cache
    v_scale: float | Tensor | None
    draft_mask: Tensor | None  # bool [num_seqs, max_query_len, max_query_len]
    num_splits: int | None  # at most one of num_splits and split_size
    split_size: int | None
    common_prefix_len: int  # 0: none
    out: Tensor  # [num_tokens, num_heads, head_dim_v]
    lse: Tensor | None  # float32 [num_tokens, num_heads]
    dims: Dims  # of the tensors above

    @property
    def fixes_splits(self) -> bool:
        """The caller says where sequences are split: each is then computed by itself."""
        return self.num_splits is not None or self.split_size is not None

    @property
    def reads_prefix_once(self) -> bool:
        """All query rows attend to a common prefix together.

        That is without query positions, which a window and ALiBi need, and with splits that follow
        from the batch, which fixed ones must not.
        """
        by_position = self.variant.sliding_window is not None or self.alibi_slopes is not None
        return self.common_prefix_len > 0 and not by_position and not self.fixes_splits
