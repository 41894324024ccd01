import numpy as np
import pytest
from made import call, rollout

from harnessrl.trainer.rows import make_rows
from harnessrl.trainer.trajectory import build_trajectory


def rows_of(*calls, **limits):
    return make_rows(build_trajectory(rollout(calls)), **limits)


CHAIN = (
    call(0, [1, 2], [3], logprobs=[-0.5], temperature=0.7, versions=[(4, 1)]),
    call(1, [1, 2, 3, 4], [5, 6], logprobs=[float("nan"), -0.25], versions=[(4, 1), (5, 1)]),
)


def test_a_chain_is_one_row_with_everything_known_of_each_token():
    (row,), dropped = rows_of(*CHAIN)
    assert row.ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask_T.tolist() == [False, False, True, False, True, True]
    np.testing.assert_array_equal(row.logprobs_T[row.mask_T], np.array([-0.5, np.nan, -0.25], dtype=np.float32))
    assert row.versions_T.tolist() == [-1, -1, 4, -1, 4, 5]
    assert row.temperatures_T[row.mask_T].tolist() == pytest.approx([0.7, 1, 1])
    assert row.calls_T.tolist() == [-1, -1, 0, -1, 1, 1]
    assert not dropped


def test_further_arrays_of_calls_pass_through():
    first = call(0, [1, 2], [3], arrays={"experts": [[7, 9]]})
    second = call(1, [1, 2, 3, 4], [5, 6], arrays={"experts": [[1, 2], [3, 4]], "kept": [1, 1]})
    (row,), _ = rows_of(first, second)
    assert row.further["experts"].tolist() == [[0, 0], [0, 0], [7, 9], [0, 0], [1, 2], [3, 4]]
    assert row.further["kept"].tolist() == [0, 0, 0, 0, 1, 1]


def test_a_fork_trains_what_it_shares_in_its_first_row_only():
    (first, second), dropped = rows_of(*CHAIN, call(2, [1, 2, 3, 9], [8]))
    assert first.calls_T.tolist() == [-1, -1, 0, -1, 1, 1]
    assert second.ids_T.tolist() == [1, 2, 3, 9, 8]
    assert second.calls_T.tolist() == [-1, -1, -1, -1, 2]
    assert not dropped


def test_a_row_ends_with_its_last_trained_token_and_untrained_leaves_have_none():
    rows, dropped = rows_of(*CHAIN, call(2, [1, 2, 3, 4, 5, 6, 7], [8, 8], delivered=False))
    assert [row.ids_T.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6]]
    assert dropped == {"undelivered": 2}


def test_too_long_is_cut_behind_the_last_call_that_fits():
    (row,), dropped = rows_of(*CHAIN, max_tokens=5)
    assert row.ids_T.tolist() == [1, 2, 3]
    assert dropped == {"too_long": 2}


def test_too_long_is_dropped_but_not_what_another_row_holds():
    # c0 is shared by c1 (6 tokens: dropped) and c2 (5 tokens: kept), which now trains c0 as well.
    (row,), dropped = rows_of(*CHAIN, call(2, [1, 2, 3, 9], [8]), max_tokens=5, overflow="drop")
    assert row.calls_T.tolist() == [-1, -1, 0, -1, 2]
    assert dropped == {"too_long": 2}
    rows, dropped = rows_of(*CHAIN, max_tokens=5, overflow="drop")
    assert not rows and dropped == {"too_long": 3}


def test_a_token_that_nothing_precedes_is_not_trained():
    rows, dropped = rows_of(call(0, [], [3, 4]))
    assert not rows and dropped == {"no_prompt": 2}


def test_without_log_probabilities_there_are_none_and_the_row_stays():
    (row,), _ = rows_of(call(0, [1], [2], logprobs=None))
    assert np.isnan(row.logprobs_T).all() and row.mask_T.tolist() == [False, True]
