"""How a rollout's reward reaches its calls: LightningRL's credit assignment.

Credit is a return and a weight per call. The return is what the call is compared by with its group; the weight
scales the resulting advantage. Uniform credit gives every call the rollout's reward and weight 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.trajectory import Trajectory

__all__ = ["Credit", "assign_credit"]

CreditFunction = Callable[[FinishedRollout], dict[str, float]]
"""A function of the user's: the return of each call of a rollout by call id; calls left out get its reward."""


@dataclass(frozen=True)
class Credit:
    """For the trained calls (`_K`) of a rollout, in the order of their start."""

    outcome: float
    """What the rollout as a whole counts as, also where it has no trained calls."""
    calls_K: np.ndarray
    """int64: index into the rollout's calls."""
    returns_K: np.ndarray
    """float64"""
    weights_K: np.ndarray
    """float64"""


def assign_credit(trajectory: Trajectory, config: AlgorithmConfig) -> Credit:
    """`discounted`: weight gamma^k for a call with k later ones. `per_call`: the call's own reward, and what
    follows it discounted by gamma per call, the rollout's own reward coming with its last call."""
    rollout = trajectory.rollout
    outcome = rollout.outcome(config.failure_reward)
    calls_K = np.flatnonzero(trajectory.trained_C)
    returns_K = np.full(len(calls_K), outcome, dtype=np.float64)
    weights_K = np.ones(len(calls_K), dtype=np.float64)
    if config.credit == "discounted":
        weights_K = config.gamma ** np.arange(len(calls_K) - 1, -1, -1, dtype=np.float64)
    elif config.credit == "per_call":
        returns_K = _returns_to_go(call_rewards(rollout, calls_K, config), config.gamma)
    elif config.credit != "uniform":
        given = _function(config.credit)(rollout)
        returns_K = np.array([given.get(rollout.calls[i].call_id, outcome) for i in calls_K], dtype=np.float64)
    return Credit(outcome, calls_K, returns_K, weights_K)


def call_rewards(rollout: FinishedRollout, calls_K: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Reward that comes with each trained call: its own, and with the last one the rollout's.

    What calls earned before their rollout failed stays theirs.
    """
    rewards_K = np.array([rollout.rewards_by_call.get(rollout.calls[i].call_id, 0.0) for i in calls_K])
    if len(rewards_K):
        rewards_K[-1] += config.failure_reward if rollout.failure_kind else rollout.reward or 0.0
    return rewards_K


def _returns_to_go(rewards_K: np.ndarray, gamma: float) -> np.ndarray:
    returns_K = np.zeros(len(rewards_K), dtype=np.float64)
    later = 0.0
    for k in range(len(rewards_K) - 1, -1, -1):
        later = returns_K[k] = rewards_K[k] + gamma * later
    return returns_K


def _function(path: str) -> CreditFunction:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
