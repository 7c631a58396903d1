"""The pairs of a step, by hand: each names where its content is when the step begins."""

from paged.movements import Movements


def test_pairs_that_do_not_meet_stay_as_they_are():
    movements = Movements([1] * 9)
    movements.add_copies([(0, 1)])
    movements.add_swap_out([(2, 0), (3, 1)])
    movements.add_swap_in([(7, 2)])
    assert movements.swap_out == [(2, 0), (3, 1)]
    assert movements.swap_in == [(7, 2)]
    assert movements.copies == [(0, 1)]


def test_a_copy_that_is_swapped_out_is_read_where_it_comes_from():
    """1 was to be a copy of 0, then 1 leaves for CPU block 5."""
    ref_counts = [1, 1]
    movements = Movements(ref_counts)
    movements.add_copies([(0, 1)])
    movements.add_swap_out([(1, 5)])
    ref_counts[1] = 0
    movements.drop_freed()
    assert (movements.swap_out, movements.copies) == ([(0, 5)], [])


def test_what_came_in_in_this_step_is_swapped_in_twice_instead_of_copied():
    movements = Movements([1] * 5)
    movements.add_swap_in([(5, 0), (6, 1)])
    movements.add_copies([(1, 2), (3, 4)])
    assert movements.swap_in == [(5, 0), (6, 1), (6, 2)]
    assert movements.copies == [(3, 4)]


def test_the_copy_of_a_copy_is_one_of_the_first_source():
    movements = Movements([1] * 3)
    movements.add_copies([(0, 1), (1, 2)])
    assert movements.copies == [(0, 1), (0, 2)]


def test_pairs_into_blocks_that_were_given_back_are_dropped():
    ref_counts = [1] * 6
    movements = Movements(ref_counts)
    movements.add_copies([(0, 1), (0, 2)])
    movements.add_swap_in([(9, 3)])
    ref_counts[2] = ref_counts[3] = 0
    movements.drop_freed()
    assert (movements.swap_in, movements.copies) == ([], [(0, 1)])
    movements.add_copies([(4, 2)])  # the block is handed out again
    assert movements.copies == [(0, 1), (4, 2)]
