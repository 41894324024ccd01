import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import call, rollout
from tiny_llama import gradient, plain_logprobs, tiny_llama

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update
from harnessrl.trainer.loss import policy_loss
from harnessrl.trainer.pack import Packed, pack
from harnessrl.trainer.rows import Row, Tokens, make_rows, trained_tokens
from harnessrl.trainer.trajectory import build_trajectory


def rows_of(*sequences: tuple[list[int], list[int]]) -> list[Row]:
    """One row per (prompt, sampled)."""
    made = []
    for i, (prompt, sampled) in enumerate(sequences):
        made += make_rows(build_trajectory(rollout([call(0, prompt, sampled)], rollout_id=f"r{i}")))[0]
    return made


def test_a_trie_by_hand():
    # Rows (inputs without their last token): 1 2 3 | 1 2 3 5 | 1 4; the trie depth first: 1 2 3 5 4.
    (packed,) = pack(rows_of(([1, 2, 3], [4]), ([1, 4], [6]), ([1, 2], [3, 5, 7])), 100)
    assert packed.ids_P.tolist() == [1, 2, 3, 5, 4]
    assert packed.positions_P.tolist() == [0, 1, 2, 3, 1]
    assert packed.ends_P.tolist() == [5, 4, 4, 4, 5]
    assert [row.ids_T.tolist() for row in packed.rows] == [[1, 2, 3, 4], [1, 2, 3, 5, 7], [1, 4, 6]]
    assert packed.tokens.ids_N.tolist() == [4, 3, 5, 7, 6]
    assert packed.predictors_N.tolist() == [2, 1, 2, 3, 4]
    assert packed.mask_PP().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]


def test_a_full_sequence_is_followed_by_another_and_a_longer_row_is_alone():
    rows = rows_of(([1, 2, 3], [4]), ([1, 2, 3], [5]), ([7, 7, 7], [7]), ([8] * 10, [9]))
    packs = pack(rows, 4)
    assert [len(p) for p in packs] == [3, 3, 10]
    assert [len(p.rows) for p in packs] == [2, 1, 1]
    assert pack([], 4) == []


sequence = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1))


@given(st.lists(sequence, min_size=1, max_size=8), st.integers(1, 40))
def test_every_trained_token_sees_exactly_its_row(sequences, max_tokens):
    rows = rows_of(*sequences)
    packs = pack(rows, max_tokens)
    assert sorted(row.rollout_id for p in packs for row in p.rows) == sorted(row.rollout_id for row in rows)
    for packed in packs:
        assert len(packed) <= max_tokens or len(packed.rows) == 1
        mask_PP, tokens = packed.mask_PP(), packed.tokens
        for row, position, predictor in zip(tokens.rows_N, tokens.positions_N, packed.predictors_N, strict=True):
            seen = np.flatnonzero(mask_PP[predictor])
            assert packed.ids_P[seen].tolist() == packed.rows[row].ids_T[:position].tolist()
            assert packed.positions_P[seen].tolist() == list(range(position))
        prefixes = {tuple(row.ids_T[:n].tolist()) for row in packed.rows for n in range(1, len(row))}
        assert len(packed) == len(prefixes)


def packed_logprobs(model, packed: Packed) -> torch.Tensor:
    logits = model(
        input_ids=torch.tensor(packed.ids_P[None].astype(np.int64)),
        position_ids=torch.tensor(packed.positions_P[None].astype(np.int64)),
        attention_mask=torch.tensor(packed.mask_PP()[None, None]),
    ).logits[0]
    tokens = packed.tokens
    logits = logits[torch.tensor(packed.predictors_N)] / torch.tensor(tokens.temperatures_N)[:, None]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens.ids_N.astype(np.int64))[:, None])[:, 0]


def loss_of(logprobs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    fields = (tokens.logprobs_N, tokens.advantages_N, tokens.weights_N, tokens.calls_N)
    sampled, advantages, weights, calls = (torch.tensor(v) for v in fields)
    old = logprobs.detach() - 0.1
    return policy_loss(logprobs, old, sampled, advantages, weights, calls, AlgorithmConfig())[0]


def test_loss_and_gradient_are_those_of_the_plain_path():
    # A group of four rollouts with one prompt; two turns, then two branches off the second.
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 29, 40).tolist()
    rollouts = []
    for r in range(4):
        first, result = rng.integers(0, 29, 5).tolist(), rng.integers(0, 29, 6).tolist()
        second = [*prompt, *first, *result]
        calls = [call(0, prompt, first, temperature=0.8)]
        calls += [call(i, [*second, i], rng.integers(0, 29, 4).tolist()) for i in (1, 2)]
        rollouts.append(rollout(calls, float(r), f"r{r}"))
    rows = build_update([Group("g", rollouts)], AlgorithmConfig(), seed=0).rows
    model = tiny_llama()
    plain = loss_of(plain_logprobs(model, rows), trained_tokens(rows))
    plain_gradient = gradient(model, plain)
    packs = pack(rows, 80)
    assert len(packs) > 1 and sum(map(len, packs)) < 0.5 * sum(map(len, rows))
    packed = torch.stack([loss_of(packed_logprobs(model, p), p.tokens) for p in packs]).sum()
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient(model, packed), plain_gradient, atol=1e-5, rtol=1e-4)
