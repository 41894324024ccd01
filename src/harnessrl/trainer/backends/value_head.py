"""The critic of `advantage: gae`: a linear function of the policy's last hidden state, which it does not train."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.critic import critic_advantages
from harnessrl.trainer.loss import value_loss
from harnessrl.trainer.pack import Packed
from harnessrl.trainer.rows import trained_tokens

__all__ = ["ValueHead"]

FILE = "value_head.pt"


class ValueHead:
    """Values start at 0. `hidden_NH` is the policy's last hidden state where it predicts each trained token."""

    def __init__(self, width: int, device: torch.device, config: AlgorithmConfig, checkpoint: Path | None):
        self._config = config
        self._linear = nn.Linear(width, 1, device=device)
        nn.init.zeros_(self._linear.weight)
        nn.init.zeros_(self._linear.bias)
        self._optimizer = torch.optim.AdamW(self._linear.parameters(), lr=config.value_lr, weight_decay=0.0)
        if checkpoint:
            state = torch.load(checkpoint / FILE, map_location=device)
            self._linear.load_state_dict(state["linear"])
            self._optimizer.load_state_dict(state["optimizer"])
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Values before the update and what they should have been, by pack."""

    def save(self, folder: Path) -> None:
        torch.save({"linear": self._linear.state_dict(), "optimizer": self._optimizer.state_dict()}, folder / FILE)

    def begin(self, packs: Sequence[Packed], hidden: Sequence[Tensor]) -> None:
        """Set the advantages of all rows of an update, before its first step."""
        with torch.no_grad():
            values = [self._values(hidden_NH) for hidden_NH in hidden]
        rows = [row for packed in packs for row in packed.rows]
        values_R = torch.cat(values).split([row.trained_tokens for row in rows])
        returns_R = critic_advantages(
            rows, [v.cpu().numpy() for v in values_R], self._config.gamma, self._config.gae_lambda
        )
        returns = iter(returns_R)
        self._before = {}
        for packed, old in zip(packs, values, strict=True):
            packed.tokens.advantages_N[:] = trained_tokens(packed.rows).advantages_N
            of_pack = torch.cat([torch.from_numpy(next(returns)) for _ in packed.rows])
            self._before[id(packed)] = old, of_pack.to(old)

    def learn(self, packed: Packed, hidden_NH: Tensor, weights_N: Tensor) -> dict[str, float]:
        """Add a pack's gradient; metrics as sums over its tokens."""
        old, returns = self._before[id(packed)]
        loss, metrics = value_loss(self._values(hidden_NH), old, returns, weights_N, self._config.value_clip)
        loss.backward()
        return metrics | {"value_error": ((old - returns) ** 2).sum().item()}

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _values(self, hidden_NH: Tensor) -> Tensor:
        return self._linear(hidden_NH.detach().float())[:, 0]
