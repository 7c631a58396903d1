"""Page tables as FlashInfer keeps them: the pages of all sequences in one list, and where each starts.

    sequence i has the pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], all full but the last,
    which holds kv_last_page_len[i] tokens

FlashInfer's log-sum-exp is to base 2, that of this package to base e.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._require import FLOAT_DTYPES, INT_DTYPES, require_int, require_tensor, require_vector


def csr_to_block_table(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    *,
    max_blocks_per_seq: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The block table and the lengths of what FlashInfer calls a page table.

    Args:
        kv_indptr: int32 or int64 `[num_seqs + 1]`, prefix sums of the page counts.
        kv_indices: int32 or int64, at least `[kv_indptr[-1]]`, page ids.
        kv_last_page_len: int32 or int64 `[num_seqs]`, tokens in each last page: 1 .. `page_size`,
            anything for a sequence without pages.
        page_size: tokens per page.
        max_blocks_per_seq: width of the table, a promise. None: read off the device, which waits.

    Returns:
        `block_table` `[num_seqs, max_blocks_per_seq]`, 0 past the last page, and `seq_lens`
        `[num_seqs]`, in the dtypes of `kv_indices` and `kv_indptr`.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.
    """
    require_tensor("kv_indptr", kv_indptr, INT_DTYPES, "[num_seqs + 1]", (None,), None)
    num_seqs, device = len(kv_indptr) - 1, kv_indptr.device
    if num_seqs < 0:
        raise ValueError("kv_indptr must be [num_seqs + 1], got no entry")
    require_tensor("kv_indices", kv_indices, INT_DTYPES, "[num_pages]", (None,), device)
    sizes = (num_seqs,)
    require_tensor("kv_last_page_len", kv_last_page_len, INT_DTYPES, "[num_seqs]", sizes, device)
    require_int("page_size", page_size, 1)
    pages = kv_indptr.diff()
    if max_blocks_per_seq is None:
        max_blocks_per_seq = int(pages.max()) if num_seqs else 0
    require_int("max_blocks_per_seq", max_blocks_per_seq, 0)
    column = torch.arange(max_blocks_per_seq, device=device)
    entry = kv_indptr[:-1, None] + column
    is_page = column < pages[:, None]
    # a place to look up for entries that are none
    indices = torch.cat((kv_indices, kv_indices.new_zeros(1)))
    block_table = indices[torch.where(is_page, entry, len(kv_indices))]
    seq_lens = torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)
    return block_table, seq_lens.to(kv_indptr.dtype)


def block_table_to_csr(
    block_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_indptr`, `kv_indices` and `kv_last_page_len`, int32, as FlashInfer plans with them.

    Args:
        block_table: int32 or int64 `[num_seqs, max_blocks_per_seq]`.
        seq_lens: int32 or int64 `[num_seqs]`. One without tokens has no page, and 0 for its last.
        page_size: tokens per page.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    How many pages there are is read off the device, which waits.
    """
    axes = "[num_seqs, max_blocks_per_seq]"
    require_tensor("block_table", block_table, INT_DTYPES, axes, (None, None), None)
    num_seqs, width = block_table.shape
    require_vector("seq_lens", seq_lens, INT_DTYPES, "[num_seqs]", num_seqs, block_table.device)
    require_int("page_size", page_size, 1)
    pages = (seq_lens + page_size - 1) // page_size
    is_page = torch.arange(width, device=block_table.device) < pages[:, None]
    kv_indices = block_table[is_page].int()
    kv_indptr = torch.zeros(num_seqs + 1, dtype=torch.int32, device=block_table.device)
    kv_indptr[1:] = pages.cumsum(0)
    if num_seqs and int(kv_indptr[-1]) != len(kv_indices):
        longest = int(seq_lens.max())
        raise ValueError(
            f"seq_lens must fit the {width} pages of {page_size} tokens in a row, got {longest}"
        )
    return kv_indptr, kv_indices, (seq_lens - (pages - 1) * page_size).where(pages > 0, 0).int()


def lse_to_base_2(lse: Tensor) -> Tensor:
    """A log-sum-exp of this package as FlashInfer states it."""
    require_tensor("lse", lse, FLOAT_DTYPES, "[...]", (None,) * lse.dim(), None)
    return lse * math.log2(math.e)


def lse_from_base_2(lse: Tensor) -> Tensor:
    """A log-sum-exp of FlashInfer as this package states it."""
    require_tensor("lse", lse, FLOAT_DTYPES, "[...]", (None,) * lse.dim(), None)
    return lse * math.log(2)
