"""One-line faults for the Triton kernels, each of a kind that shipped somewhere once.

`test_mutants.py` puts them in, one at a time, and asks that the tests named here fail.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` stands once in `file`; with `new` in its place some test of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # "test_file.py::test_name", and for the triton backend only


EXACT, MATRIX = "test_exact_attention.py", "test_matrix.py"
INVARIANCE, QUANTISED = "test_invariance.py", "test_quantised_cache.py"

MUTANTS = [
    # what is loaded
    Mutant(
        "values past the end are loaded",
        "_tile.py",
        "v = load_rows(kv.value, row, exists, DIMS.head_dim_v, TILE.dv, MASKED)",
        "v = load_rows(kv.value, row, exists, DIMS.head_dim_v, TILE.dv, False)",
        f"{EXACT}::test_unwritten_slots_do_not_reach_a_decode",
    ),
    Mutant(
        "the last tile is not masked",
        "_tile.py",
        "outer = tl.maximum(inner, tl.minimum(whole[1], keys[1]) // TILE.n * TILE.n)",
        "outer = tl.cdiv(keys[1], TILE.n) * TILE.n",
        f"{EXACT}::test_unwritten_slots_do_not_reach_a_decode",
    ),
    Mutant(
        "block ids stay 32-bit",
        "_tile.py",
        "block, slot = block.to(tl.int64), (k_pos % DIMS.block_size).to(tl.int64)",
        "block, slot = block, k_pos % DIMS.block_size",
        "test_large_offsets.py::test_elements_past_two_to_the_31_are_reached",
    ),
    Mutant(
        "slots stay 32-bit",
        "write.py",
        "slot = tl.load(slot_mapping + token).to(tl.int64)",
        "slot = tl.load(slot_mapping + token).to(tl.int32)",
        "test_large_offsets.py::test_elements_past_two_to_the_31_are_reached",
    ),
    Mutant(
        "a head is read past its width",
        "_tile.py",
        "tile = tl.load(pointers, mask=rows[:, None] & (column < WIDTH), other=0.0)",
        "tile = tl.load(pointers, mask=rows[:, None] & (column < PADDED), other=0.0)",
        MATRIX,
    ),
    Mutant(
        "a head is stored past its width",
        "attention.py",
        "out_mask = rows[:, None] & (dv < DIMS.head_dim_v)",
        "out_mask = rows[:, None] & (dv < TILE.dv)",
        MATRIX,
    ),
    # who sees what
    Mutant(
        "causal is aligned top-left",
        "attention.py",
        "queries = Queries(tile, context_len + token,",
        "queries = Queries(tile, token,",
        f"{EXACT}::test_causal_is_aligned_to_the_last_key",
    ),
    Mutant(
        "a query does not see itself",
        "_tile.py",
        "seen &= distance <= 0",
        "seen &= distance < 0",
        f"{EXACT}::test_unwritten_slots_do_not_reach_a_prefill",
    ),
    Mutant(
        "the window is one too long",
        "_tile.py",
        "seen &= distance > -VARIANT.sliding_window",
        "seen &= distance >= -VARIANT.sliding_window",
        f"{EXACT}::test_each_row_of_a_long_prefill_sees_its_own_past",
    ),
    Mutant(
        "the window is one too short",
        "attention.py",
        "first = tl.maximum(first_key, first_pos + 1 - VARIANT.sliding_window)",
        "first = tl.maximum(first_key, first_pos + 2 - VARIANT.sliding_window)",
        f"{EXACT}::test_a_window_counts_the_query_itself",
    ),
    Mutant(
        "tiles cut by the window count as whole",
        "attention.py",
        "whole_first = tl.maximum(first_key, end_pos - VARIANT.sliding_window)",
        "whole_first = tl.maximum(first_key, first_pos - VARIANT.sliding_window)",
        f"{EXACT}::test_each_row_of_a_long_prefill_sees_its_own_past",
    ),
    Mutant(
        "tiles cut by the diagonal count as whole",
        "attention.py",
        "end, whole_end = end_pos, tl.maximum(first_pos + 1, 0)",
        "end, whole_end = end_pos, tl.maximum(end_pos, 0)",
        f"{EXACT}::test_each_row_of_a_long_prefill_sees_its_own_past",
    ),
    Mutant(
        "every query sees the first draft",
        "_tile.py",
        "seen &= (new < 0) | drafted",
        "seen &= (new <= 0) | drafted",
        f"{EXACT}::test_a_draft_mask_replaces_the_causal_rule_among_new_tokens {MATRIX}",
    ),
    Mutant(
        "query heads are dealt round the KV heads",
        "attention.py",
        "head = kv_head * GROUP + row % GROUP",
        "head = kv_head + row % GROUP * DIMS.num_kv_heads",
        f"{EXACT}::test_each_query_head_reads_its_own_kv_head",
    ),
    Mutant(
        "rows left over in a tile begin the next token",
        "attention.py",
        "rows = (token < query_len) & (row < TOKENS * GROUP)",
        "rows = token < query_len",
        "test_launches.py::test_the_order_of_programs_does_not_matter",
    ),
    Mutant(
        "a tile is found one too early",
        "attention.py",
        "// TOKENS + middle <= tile:",
        "// TOKENS + middle < tile:",
        MATRIX,
    ),
    # scores
    Mutant(
        "the scale is left out",
        "_tile.py",
        "s *= scale * LOG2E",
        "s *= LOG2E",
        f"{EXACT}::test_all_of_a_head_enters_the_scores {MATRIX}",
    ),
    Mutant(
        "masked scores are capped",
        "_tile.py",
        's = tl.where(seen, s, float("-inf"))',
        's = tl.where(seen, s, float("-inf") if VARIANT.softcap is None else -VARIANT.softcap)',
        f"{EXACT}::test_softcap_comes_before_the_mask {MATRIX}",
    ),
    Mutant(
        "the cap is in base 2",
        "_tile.py",
        "(scale / VARIANT.softcap)) * (VARIANT.softcap * LOG2E)",
        "(scale / VARIANT.softcap)) * VARIANT.softcap",
        f"{EXACT}::test_softcap_bounds_the_natural_scores",
    ),
    Mutant(
        "slopes are in base 2",
        "_tile.py",
        "s += (queries.slope * LOG2E)[:, None] * distance",
        "s += queries.slope[:, None] * distance",
        f"{EXACT}::test_alibi_is_zero_at_the_query_itself",
    ),
    Mutant(
        "the bias is one key off",
        "_tile.py",
        "s += (queries.slope * LOG2E)[:, None] * distance",
        "s += (queries.slope * LOG2E)[:, None] * (distance - 1)",
        f"{EXACT}::test_alibi_is_zero_at_the_query_itself",
    ),
    # softmax
    Mutant(
        "rows that saw nothing yet turn NaN",
        "_tile.py",
        'pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing',
        "pivot = m_new  # nothing",
        f"{EXACT}::test_causal_rows_before_the_sequence_see_nothing",
    ),
    Mutant(
        "the sum is not rescaled",
        "_tile.py",
        "l = l * alpha + tl.sum(p, 1)",
        "l = l + tl.sum(p, 1)",
        MATRIX,
    ),
    Mutant(
        "the output is not rescaled",
        "_tile.py",
        "acc *= alpha[:, None]",
        "acc *= 1.0",
        MATRIX,
    ),
    Mutant(
        "lse is in base 2",
        "_tile.py",
        "return acc / l[:, None], (m + tl.log2(l)) * LN2",
        "return acc / l[:, None], m + tl.log2(l)",
        f"{EXACT}::test_lse_is_a_natural_logarithm",
    ),
    Mutant(
        "the sink is in base 2",
        "_tile.py",
        "other=0.0).to(tl.float32) * LOG2E",
        "other=0.0).to(tl.float32)",
        f"{EXACT}::test_a_sink_counts_once_whatever_the_splits",
    ),
    # splits
    Mutant(
        "each split adds the sink",
        "triton_backend.py",
        "part = call._replace(out=out, lse=lse, sinks=None)",
        "part = call._replace(out=out, lse=lse)",
        f"{EXACT}::test_a_sink_counts_once_whatever_the_splits",
    ),
    Mutant(
        "the prefix adds the sink too",
        "triton_backend.py",
        "sinks=None,  # they join once, with the suffix",
        "",
        f"{INVARIANCE}::test_a_common_prefix_equals_the_plain_result",
    ),
    Mutant(
        "splits overlap",
        "attention.py",
        "end = tl.minimum(end, start_of_split + split_size)",
        "end = tl.minimum(end, start_of_split + split_size + 1)",
        f"{INVARIANCE}::test_the_number_of_splits_changes_rounding_only",
    ),
    Mutant(
        "parts are merged by their place",
        "merge.py",
        "acc += weight * tl.load(",
        "acc += total * tl.load(",
        f"{INVARIANCE}::test_the_number_of_splits_changes_rounding_only",
    ),
    Mutant(
        "lse of a merge is in base 2",
        "merge.py",
        "m + tl.log2(total) * LN2",
        "m + tl.log2(total)",
        f"{INVARIANCE}::test_the_number_of_splits_changes_rounding_only",
    ),
    Mutant(
        "a merge of nothing divides by nothing",
        "merge.py",
        "total = tl.where(total == 0.0, 1.0, total)",
        "total = total * 1.0",
        f"{EXACT}::test_rows_without_keys_are_zero_and_leave_others_alone",
    ),
    Mutant(
        "whether to merge follows the batch",
        "triton_backend.py",
        "if (call.num_splits or num_splits) == 1 and call.split_size is None:",
        "if num_splits == 1:",
        f"{INVARIANCE}::test_a_row_does_not_depend_on_its_batch_mates",
    ),
    # rows
    Mutant(
        "padding rows are not filled",
        "triton_backend.py",
        "        call.out.zero_()",
        "        pass",
        f"{EXACT}::test_padding_rows_are_zero_and_minus_infinity",
    ),
    Mutant(
        "the shortest prefill is nobody's",
        "triton_backend.py",
        "shortest=decode_tokens + 1",
        "shortest=decode_tokens + 2",
        f"{EXACT}::test_queries_of_every_length_are_served",
    ),
    # writes and quantised caches
    Mutant(
        "padding slots are written",
        "write.py",
        "if slot < 0:",
        "if slot < -1:",
        "test_reshape_and_cache.py::test_padding_slots_are_never_written",
    ),
    Mutant(
        "slot 0 is taken for padding",
        "write.py",
        "if slot < 0:",
        "if slot < 1:",
        "test_reshape_and_cache.py",
    ),
    Mutant(
        "int8 truncates",
        "write.py",
        "rounded = (scaled + ROUND) - ROUND",
        "rounded = scaled",
        QUANTISED,
    ),
    Mutant(
        "an all-zero head has scale 0",
        "write.py",
        "scale = tl.where(scale == 0.0, 1.0, scale)",
        "scale = scale * 1.0",
        QUANTISED,
    ),
    Mutant(
        "fp8 does not saturate",
        "write.py",
        "tl.minimum(tl.abs(values), LIMIT)",
        "tl.abs(values)",
        QUANTISED,
    ),
    Mutant(
        "fp8 is multiplied by its scale",
        "write.py",
        "        values = tl.div_rn(values, scale)",
        "        values = values * scale",
        QUANTISED,
    ),
    Mutant(
        "keys are read without their scale",
        "_tile.py",
        "k_scale = scale * tl.load(plane, mask=exists, other=0.0)[None, :]",
        "k_scale = scale",
        MATRIX,
    ),
    Mutant(
        "values are read without their scale",
        "_tile.py",
        "p *= (v_scale / top)[None, :]",
        "p *= 1.0",
        MATRIX,
    ),
]
