import numpy as np
import pytest
import torch
from made import call, rollout
from tiny_llama import gradient, plain_logprobs, tiny_llama

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update
from harnessrl.trainer.loss import policy_loss
from harnessrl.trainer.preference import chosen_and_rejected, dpo_advantages
from harnessrl.trainer.rows import trained_tokens


def test_best_ones_or_a_pair():
    outcomes = np.array([0.5, 1.0, 0.0, 1.0, 0.0])
    assert chosen_and_rejected(outcomes, pair=False).tolist() == [0, 1, 0, 1, 0]
    assert chosen_and_rejected(outcomes, pair=True).tolist() == [0, 1, -1, 0, 0]
    assert chosen_and_rejected(np.array([1.0, 1.0]), pair=True).tolist() == [0, 0]


def groups() -> list[Group]:
    """Per group: the best rollout in two rows, the middle one, the worst, and the worst without a row."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return rng.integers(29, size=n).tolist()

    made = []
    for g in ("g", "h"):
        best = rollout([call(0, ids(5), ids(3)), call(1, ids(4), ids(2))], 1.0, f"{g}-a", g)
        others = [rollout([call(0, ids(5), ids(4))], 0.5 * i, f"{g}-{i}", g) for i in (1, 0)]
        made.append(Group(g, [best, *others, rollout([], 0.0, f"{g}-z", g)]))
    return made


def test_sft_imitates_the_best():
    update = build_update(groups(), AlgorithmConfig(loss="sft"), seed=0)
    assert {row.rollout_id for row in update.rows} == {"g-a", "h-a"}
    assert update.dropped == {"not_chosen": 16}
    # 8 rollouts; each of the two chosen ones has 5 tokens in 2 rows.
    assert all(row.weights_T[-1] == pytest.approx(1 / 40) for row in update.rows)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    one = torch.ones(2)
    # Sampled from elsewhere (ratio e): imitation is not corrected for that.
    loss, _ = policy_loss(
        logprobs, None, logprobs.detach() - 1, one, one, torch.arange(2), AlgorithmConfig(loss="sft")
    )
    assert loss.item() == 3


def test_dpo_has_the_gradient_of_its_loss_however_rows_are_spread():
    config = AlgorithmConfig(loss="dpo", dpo_beta=0.5)
    rows = build_update(groups(), config, seed=0).rows
    assert sorted(row.rollout_id for row in rows) == ["g-0", "g-a", "g-a", "h-0", "h-a", "h-a"]
    model = tiny_llama()
    logprobs, tokens = plain_logprobs(model, rows), trained_tokens(rows)
    reference = logprobs.detach() - 0.4 * torch.sin(9 * logprobs.detach())

    # The published loss, by autograd: mean over pairs of -log σ(β (Σ chosen - Σ rejected)).
    rewards = {row.rollout_id: torch.zeros(()) for row in rows}
    for r, row in enumerate(rows):
        of_row = torch.tensor(tokens.rows_N == r)
        rewards[row.rollout_id] = rewards[row.rollout_id] + (logprobs - reference)[of_row].sum()
    margins = [config.dpo_beta * (rewards[f"{g}-a"] - rewards[f"{g}-0"]) for g in ("g", "h")]
    direct = -torch.stack(margins).sigmoid().log().mean()
    wanted = gradient(model, direct)

    metrics = dpo_advantages(rows, logprobs.detach().numpy(), reference.numpy(), config.dpo_beta)
    assert metrics["dpo_loss"] == pytest.approx(direct.item(), abs=1e-6)
    found = torch.zeros(())
    for row in rows:
        t = trained_tokens([row])
        vectors = (torch.tensor(v) for v in (t.logprobs_N, t.advantages_N, t.weights_N, t.calls_N))
        sampled, advantages, weights, calls = vectors
        current = plain_logprobs(model, [row])
        found = found + gradient(model, policy_loss(current, None, sampled, advantages, weights, calls, config)[0])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_group_without_spread_or_rows_has_no_pair():
    even = [Group("g", [rollout([call(0, [1], [2])], 1.0, r) for r in "ab"])]
    for loss in ("sft", "dpo"):
        update = build_update(even, AlgorithmConfig(loss=loss), seed=0)
        assert not update.rows and update.dropped == {"no_spread": 2}
    nothing = [Group("g", [rollout([], 1.0, "a"), rollout([], 0.0, "b")])]
    assert not build_update(nothing, AlgorithmConfig(loss="dpo"), seed=0).rows
