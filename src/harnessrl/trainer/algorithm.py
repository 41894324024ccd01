"""The algorithm's configuration: what is credited, compared, clipped, corrected and averaged.

A field belongs to the module that reads it; this one imports pydantic only, so that a configuration can be
checked where torch is not installed.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["AlgorithmConfig"]

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class AlgorithmConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    train_agents: list[str] = []
    """Names of the agents whose calls are trained (component of interest); empty: all of them."""
    credit: str = "uniform"
    """How a rollout's reward reaches its calls: `uniform`, `discounted` (by `gamma` per later call), `per_call`
    (rewards sent with a `call_id`, summed to the end with `gamma`), or `package.module:function`."""
    gamma: Fraction = 1.0
    """Discount per call in `discounted` and `per_call`, per token in `gae`."""
    failure_reward: float = 0.0
    """What a rollout earns that failed by its agent's own fault; it stays in its group and baseline."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce", "gae"] = "grpo"
    """`grpo`: less the group's mean, divided by its standard deviation; `dr_grpo`: not divided; `rloo`: less
    the mean of the others; `reinforce`: no baseline; `gae`: with a critic, along a rollout's calls."""
    gae_lambda: Fraction = 0.95
    """Between one-step (0) and whole-rollout (1) estimates in `gae`."""
    value_lr: Positive = 1e-3
    """Learning rate of the critic's head."""
    value_clip: Positive | None = None
    """How far the critic may move in an update; null: unbounded."""
    no_spread: Literal["skip", "keep"] = "skip"
    """Rows of groups whose advantages are all zero: left out of the forward pass, or kept for the KL and entropy
    terms. Either way the group counts in the step's number of rollouts."""
    steps_per_update: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps that an update's groups are divided into."""
    overflow: Literal["cut", "drop"] = "cut"
    """A row that is too long: cut behind the last call that fits, or dropped as a whole."""
    aggregation: Literal["rollout_mean", "token_mean", "rollout_sum", "row_mean"] = "rollout_mean"
    """What every rollout, token or row of a step weighs: `rollout_mean`: each rollout the same, whatever its
    length or number of rows; `token_mean`: each token the same; `rollout_sum`: as `rollout_mean`, but divided
    by `length_constant` instead of the rollout's own length; `row_mean`: each row the same (for comparison
    only: it depends on how histories fragment)."""
    length_constant: Annotated[int, Field(ge=1)] | None = None
    """Tokens that `rollout_sum` divides by, e.g. the most that a rollout may sample."""
    loss: Literal["clip", "gspo", "cispo", "reinforce", "sft", "dpo"] = "clip"
    """`clip`: PPO's; `gspo`: clipped per call; `cispo`: clipped weights, no token loses its gradient;
    `reinforce`: none; `sft`: imitate each group's best rollouts; `dpo`: prefer each group's best to its worst."""
    dpo_beta: Positive = 0.1
    """How strongly `dpo` holds on to the reference model."""
    clip_low: Fraction = 0.2
    """Ratios current / proximal below 1 - this are clipped (GSPO wants about 0.0003)."""
    clip_high: NotNegative = 0.28
    """Ratios above 1 + this are clipped (GSPO wants about 0.0004)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Where the advantage is negative, the loss grows no further than at this ratio; null: no bound."""
    importance: Literal["none", "token_truncate", "call_truncate", "token_mask", "call_mask"] = "token_truncate"
    """Correction for tokens sampled by other weights or another engine, proximal / sampled, by token or by whole
    call: truncated at `importance_cap`, or masked where outside 1/cap … cap."""
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence (k3) from the reference model."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""

    @property
    def critic(self) -> bool:
        return self.advantage == "gae" and self.loss not in ("sft", "dpo")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.credit not in ("uniform", "discounted", "per_call") and ":" not in self.credit:
            raise ValueError(
                f"algorithm.credit: {self.credit!r} is none of uniform, discounted, per_call; "
                "a function of your own is written package.module:function"
            )
        if self.aggregation == "rollout_sum" and self.length_constant is None:
            raise ValueError(
                "algorithm.aggregation: rollout_sum needs algorithm.length_constant, "
                "e.g. the most tokens that a rollout may sample"
            )
        return self
