"""What runs inside verl's workers: one optimizer step or forward pass per call, and our loss in verl's terms."""

from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.loss import policy_loss, value_loss

__all__ = ["PolicyWorker", "critic_loss", "loss"]


class PolicyWorker(ActorRolloutRefWorker):
    """verl's, with methods that don't block the driver: it must be able to stop."""

    actor: TrainingWorker  # type: ignore[assignment]  (None until `init_model`)
    ref: TrainingWorker  # type: ignore[assignment]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def train_step(self, data: TensorDict) -> TensorDict | None:
        """One optimizer step. The learning rate moves on before the first of an update, so that a warm-up of N
        updates begins at 1/N and not at 0."""
        if tensordict_utils.pop(data, "first_of_update"):
            self._lr = self.actor.engine.lr_scheduler_step()
        output = self.actor.train_batch(data)
        if output is not None:
            tensordict_utils.get(output, "metrics")["lr"] = self._lr
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def score(self, data: TensorDict) -> TensorDict | None:
        return self.actor.infer_batch(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"), blocking=False)
    def score_reference(self, data: TensorDict) -> TensorDict | None:
        return self.ref.infer_batch(data)


def loss(
    config: AlgorithmConfig, model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Of a micro-batch, as verl calls it. The ranks' gradients are averaged afterwards: that is undone here.

    Metrics are `policy_loss`'s, as sums over tokens, and vectors by trained token (`old`, `sampled`, `fresh`).
    """
    mask = data["loss_mask"].values()

    def of(name: str) -> torch.Tensor:
        return data[name].values()[mask]

    predicting = mask.roll(-1)  # a row's first token is never trained, so nothing crosses its ends
    logprobs = model_output["log_probs"].values()[predicting]
    entropy = model_output["entropy"].values()[predicting] if "entropy" in model_output else None
    proximal = of("proximal") if "proximal" in data.keys() else None  # noqa: SIM118  (a TensorDict is no dict)
    total, metrics = policy_loss(
        logprobs,
        proximal,
        of("sampled"),
        of("advantages"),
        of("weights"),
        of("calls"),
        config,
        entropy=entropy if entropy is None or config.entropy_coef else entropy.detach(),
        ref_logprobs=of("reference") if config.kl_coef else None,
    )
    old = logprobs.detach().float() if proximal is None else proximal
    vectors = {"old": old, "sampled": of("sampled"), "fresh": of("fresh")}
    return total * data["dp_size"], metrics | {name: v.cpu().numpy() for name, v in vectors.items()}


def critic_loss(
    config: AlgorithmConfig, model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """The same for the critic."""
    mask = data["loss_mask"].values()
    old, returns, weights = (data[name].values()[mask] for name in ("old_values", "returns", "weights"))
    values = model_output["values"].values()[mask.roll(-1)]
    total, metrics = value_loss(values, old, returns, weights, config.value_clip)
    return total * data["dp_size"], metrics | {"value_error": ((old - returns) ** 2).sum().item()}
