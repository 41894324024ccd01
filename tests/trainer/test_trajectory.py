import time

import numpy as np
from made import call, rollout

from harnessrl.trainer.trajectory import build_trajectory


def tree(*calls, **fields):
    return build_trajectory(rollout(calls), **fields)


def test_a_call_hangs_under_the_longest_context_that_its_prompt_starts_with():
    # c0: 1 2 | 3     c1: 1 2 3 4 | 5     c2 (a sub-agent): 9 | 8
    # c3 goes on from c1, c4 from c2 though c3 came between, c5 goes back to c0 and forks.
    made = tree(
        call(0, [1, 2], [3]),
        call(1, [1, 2, 3, 4], [5]),
        call(2, [9], [8]),
        call(3, [1, 2, 3, 4, 5, 6], [7]),
        call(4, [9, 8, 7], [6]),
        call(5, [1, 2, 3, 5], [4]),
    )
    assert made.parents_C.tolist() == [-1, 0, -1, 1, 2, 0]
    assert made.trained_C.all() and not made.dropped and made.ambiguous == 0


def test_a_prompt_that_leaves_the_context_before_its_end_starts_a_tree_of_its_own():
    # Compaction: c1's prompt shares 1 2 with c0's context 1 2 3 4, then differs inside what was sampled.
    assert tree(call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 9], [5])).parents_C.tolist() == [-1, -1]


def test_best_of_n_keeps_both_delivered_answers():
    made = tree(call(0, [1], [2]), call(1, [1], [3]), call(2, [1, 3, 4], [5]))
    assert made.parents_C.tolist() == [-1, -1, 1]
    assert made.trained_C.all()


def test_equal_contexts_go_to_the_delivered_then_the_noted_then_the_latest():
    later = call(2, [1, 2, 3], [4])
    assert tree(call(0, [1], [2]), call(1, [1], [2], delivered=False), later).parents_C[2] == 0
    noted = call(2, [], [4], parent="c0", shared=2, new_prompt_ids=[3])
    made = tree(call(0, [1], [2]), call(1, [1], [2]), noted)
    assert (made.parents_C[2], made.ambiguous) == (0, 1)
    assert tree(call(0, [1], [2]), call(1, [1], [2]), later).parents_C[2] == 1


def test_what_was_not_received_is_not_trained_and_its_reason_is_told():
    made = tree(
        call(0, [1], [2, 2], delivered=False),  # the next call asks the same again
        call(1, [1], [3]),
        call(2, [1, 3, 4], [5, 5, 5], delivered=False, finish_reason=None),  # cut half-way
        call(3, [7], [6], delivered=False),  # nobody knows
    )
    assert made.trained_C.tolist() == [False, True, False, False]
    assert made.dropped == {"retry_orphan": 2, "cut_stream": 3, "undelivered": 1}


def test_a_later_call_that_contains_the_answer_confirms_it():
    made = tree(call(0, [1], [2], delivered=False), call(1, [1, 2, 3], []))
    assert made.trained_C.tolist() == [True, False]


def test_a_retry_with_the_same_answer_is_trained_once():
    made = tree(
        call(0, [1], [2], delivered=False, call_id="a"), call(1, [1], [2]), call(2, [1, 2], [3], parent="a")
    )
    assert made.trained_C.tolist() == [False, True, True]
    assert made.dropped == {"retry_orphan": 1}


def test_untrainable_calls_other_agents_and_evaluation_are_context():
    made = tree(
        call(0, [1], [2], agent="writer"),
        call(1, [1, 2, 3], [4, 4], agent="checker"),
        call(2, [1, 2, 3, 4, 4], [5], agent="writer", trainable=False, untrainable_reason="forced_tool"),
        call(3, [1, 2, 9], [6], agent="writer", mode="val"),
        train_agents=["writer"],
    )
    assert made.trained_C.tolist() == [True, False, False, False]
    assert made.dropped == {"other_agent": 2, "forced_tool": 1, "evaluation": 1}
    assert made.parents_C.tolist() == [-1, 0, 1, 0]


def test_one_lost_capture_makes_the_rollout_unusable():
    made = tree(call(0, [1], [2, 3]), call(1, [1, 2, 3], [], capture_failed=True))
    assert made.unusable is not None and "c1" in made.unusable
    assert not made.trained_C.any()
    assert made.dropped == {"incomplete": 2}


def test_arrays_of_the_wrong_length_make_the_rollout_unusable():
    assert tree(call(0, [1], [2, 3], logprobs=[-1.0])).unusable
    assert tree(call(0, [1], [2, 3], versions=[(0, 1)])).unusable
    assert tree(call(0, [1], [2, 3], arrays={"experts": [1]})).unusable
    assert not tree(call(0, [1], [2, 3], logprobs=None)).unusable


def test_200_calls_to_128k_tokens_in_under_a_second():
    ids = np.random.default_rng(1).integers(0, 50_000, 128_000).tolist()
    calls = [call(0, ids[:320], ids[320:640])]
    for i in range(1, 200):
        start = i * 640
        new = ids[start : start + 320]
        sampled = ids[start + 320 : start + 640]
        calls.append(call(i, [], sampled, parent=f"c{i - 1}", shared=start, new_prompt_ids=new))
    made = rollout(calls)
    start = time.perf_counter()
    trajectory = build_trajectory(made)
    assert time.perf_counter() - start < 1
    assert trajectory.parents_C.tolist() == list(range(-1, 199))
