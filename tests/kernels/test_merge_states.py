import math

import pytest
import torch
from paged_kernels.merge_states import State, merge_attention_states, merge_two
from paged_kernels.testing import make_batch


def part(out, lse):
    return torch.tensor(out).view(1, 1, 1), torch.tensor(lse).view(1, 1)


def test_parts_weigh_by_the_number_of_their_equal_keys():
    """Three keys of value 0 and one of value 1; in base 2 it would be 0.170."""
    (a, lse_a), (b, lse_b) = part(0.0, math.log(3)), part(1.0, 0.0)
    out, lse = merge_attention_states([a, b], [lse_a, lse_b])
    assert out.item() == pytest.approx(0.25, abs=1e-7)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-6)


def test_rows_without_any_key_stay_empty():
    empty = torch.full((2, 3, 4), float("nan")), torch.full((2, 3), float("-inf"))
    out, lse = merge_attention_states([empty[0]] * 3, [empty[1]] * 3)
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert torch.equal(lse, empty[1])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_part_without_keys_changes_no_bit_whatever_it_holds(place):
    outs, lses = list(torch.randn(2, 5, 3, 8)), list(torch.randn(2, 5, 3))
    want = merge_attention_states(outs, lses)
    outs.insert(place, torch.full((5, 3, 8), float("nan")))
    lses.insert(place, torch.full((5, 3), float("-inf")))
    assert all(map(torch.equal, merge_attention_states(outs, lses), want))


def test_a_state_merged_with_nothing_keeps_its_bits():
    some = State(torch.randn(9, 3, 8), torch.randn(9, 3) * 20)
    none = State(torch.zeros(9, 3, 8), torch.full((9, 3), float("-inf")))
    for merged in (merge_two(some, none), merge_two(none, some)):
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)


def test_one_part_is_returned_as_it_is():
    out, lse = torch.randn(5, 3, 8, dtype=torch.bfloat16), torch.randn(5, 3)
    merged_out, merged_lse = merge_attention_states([out], [lse])
    assert merged_out.dtype == torch.bfloat16
    assert torch.equal(merged_out, out)
    assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_parts_merge_to_the_softmax_over_all(num_parts):
    torch.manual_seed(num_parts)
    scores = torch.randn(4, 3, 96, dtype=torch.float64) * 8  # far apart: some parts weigh nothing
    values = torch.randn(4, 3, 96, 16, dtype=torch.float64)
    outs, lses = [], []
    for s, v in zip(scores.chunk(num_parts, 2), values.chunk(num_parts, 2), strict=True):
        outs.append((s.softmax(2).unsqueeze(2) @ v).squeeze(2).float())
        lses.append(s.logsumexp(2).float())
    out, lse = merge_attention_states(outs, lses)
    want = (scores.softmax(2).unsqueeze(2) @ values).squeeze(2)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), scores.logsumexp(2), rtol=1e-6, atol=0)


def test_a_prefix_and_a_suffix_attended_apart_make_the_whole():
    batch = make_batch([3136], block_size=64)
    out, lse = batch.attend(backend="torch", return_lse=True)
    suffix_table = batch.block_table[:, 48:].contiguous()
    prefix = batch.attend(
        backend="torch", return_lse=True, seq_lens=torch.tensor([3072], dtype=torch.int32)
    )
    suffix = batch.attend(
        backend="torch",
        return_lse=True,
        block_table=suffix_table,
        seq_lens=torch.tensor([64], dtype=torch.int32),
    )
    merged_out, merged_lse = merge_attention_states(*zip(prefix, suffix, strict=True))
    torch.testing.assert_close(merged_out, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=2e-6)


def test_a_large_lse_does_not_overflow():
    (a, lse_a), (b, lse_b) = part(1.0, 3000.0), part(3.0, 3000.0)
    out, lse = merge_attention_states([a, b], [lse_a, lse_b])
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(3000 + math.log(2))


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "at least one"),
        ([torch.zeros(2, 3, 4)], [], "1 outs and 0 lses"),
        ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], [torch.zeros(2, 3)] * 2, "part 1"),
        ([torch.zeros(2, 3, 4)], [torch.zeros(3, 2)], "part 0"),
        ([torch.zeros(2, 3)], [torch.zeros(2, 3)], "part 0"),
    ],
)
def test_parts_that_do_not_match_are_refused(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_states(outs, lses)
