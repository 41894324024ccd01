"""Plain PyTorch on one device.

An update runs while whoever serves the policy is at rest, from its first pass to the publish, so that no token is
ever sampled from a half-written policy.
"""

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harnessrl.config import Config, ModelConfig
from harnessrl.engine.model import load_model, load_tokenizer, quiet, resolve
from harnessrl.engine.vllm import VllmServer
from harnessrl.schemas import Endpoint
from harnessrl.trainer.backends import LINEAGE
from harnessrl.trainer.backends.metrics import means, step_metrics
from harnessrl.trainer.backends.serving import MODEL, Embedded, Serving
from harnessrl.trainer.backends.value_head import ValueHead
from harnessrl.trainer.batch import Update
from harnessrl.trainer.health import broken_row
from harnessrl.trainer.loss import mean_metrics, policy_loss
from harnessrl.trainer.pack import Packed, pack
from harnessrl.trainer.preference import dpo_advantages
from harnessrl.trainer.rows import trained_tokens

__all__ = ["TorchBackend"]

log = structlog.get_logger()


@dataclass(frozen=True)
class _Seen:
    """What a forward pass says of a pack's trained tokens."""

    logprobs_N: Tensor
    entropy_N: Tensor
    hidden_NH: Tensor | None
    """The last hidden state, where there is a critic to read it."""


class TorchBackend:
    """Implements `Backend`."""

    def __init__(self, config: Config, checkpoint: Path | None = None, lineage: int = 0):
        """`checkpoint`: go on from it, as resumption number `lineage`."""
        torch.manual_seed(config.seed + lineage)
        self._config = config
        self._device = _device(config.model.device)
        lora = config.model.lora_rank > 0
        path = str(checkpoint) if checkpoint and not lora else config.model.path
        self._folder = resolve(config.model.path)  # of the tokenizer; a checkpoint's folder does not last
        self._tokenizer = load_tokenizer(path)
        model = load_model(path, getattr(torch, config.model.dtype))
        model.to(self._device)  # type: ignore[arg-type]  (transformers' annotation of `to`)
        self._model = _with_lora(model, config.model, checkpoint) if lora else model
        self._packs = takes_trees(model.config.get_text_config())
        if config.train.share_prefixes and not self._packs:
            raise ValueError(
                f"train.share_prefixes: {config.model.path} has layers that do not attend to the whole context; "
                "set it to false"
            )
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self.version = lineage * LINEAGE
        if checkpoint:
            self._optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location=self._device))
            self.version += json.loads((checkpoint / "harnessrl.json").read_text())["version"] % LINEAGE
        algorithm = config.algorithm
        self._reference = self._model
        if (algorithm.kl_coef or algorithm.loss == "dpo") and not lora:
            self._reference = load_model(config.model.path, getattr(torch, config.model.dtype))
            self._reference.to(self._device)  # type: ignore[arg-type]
        self._critic = None
        if algorithm.critic:
            width = self._model.config.get_text_config().hidden_size
            self._critic = ValueHead(width, self._device, algorithm, checkpoint)
        self.serving = self._serve(config.seed + lineage)
        self._stopping = threading.Event()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                model=MODEL,
                endpoint=self.serving.url,
                version=self.version,
                kind="token",
                tokenizer=str(self._folder),
                renderer=self._config.model.renderer,
            )
        ]

    def update(self, update: Update) -> dict[str, float]:
        train = self._config.train
        self._set_lr()
        tokens = train.micro_batch_tokens if self._packs else 1
        steps = [pack(step.rows, tokens, share=train.share_prefixes) for step in update.steps]
        with self.serving.updating():
            metrics = self._steps(steps)
            self.version += 1
            self.serving.publish(self.version)
        return means(metrics) | {"optim/lr": self._optimizer.param_groups[0]["lr"]}

    def stop(self) -> None:
        """Make an update in another thread end with InterruptedError, before its next pass."""
        self._stopping.set()

    def save(self, folder: Path) -> None:
        if self._config.model.lora_rank:
            self._model.save_pretrained(folder / "adapter")
        self._write_weights(folder)
        self._tokenizer.save_pretrained(folder)
        torch.save(self._optimizer.state_dict(), folder / "optimizer.pt")
        if self._critic:
            self._critic.save(folder)
        state = {"version": self.version, "renderer": self._config.model.renderer}
        (folder / "harnessrl.json").write_text(json.dumps(state, indent=2) + "\n")

    def close(self) -> None:
        self.stop()
        self.serving.close()

    def _serve(self, seed: int) -> Serving:
        engine = self._config.engine
        if engine.kind == "embedded":
            return Embedded(self._model, engine, seed, self.version)
        assert engine.url and engine.weights_dir, "whoever starts the server sets both"
        server = VllmServer(
            engine.url,
            Path(engine.weights_dir),
            self._hand_over,
            model=MODEL,
            max_len=engine.max_len,
            sleep=engine.sleep,
        )
        server.publish(self.version)
        return server

    def _hand_over(self, folder: Path) -> None:
        self._write_weights(folder)
        if self._device.type != "cuda" and self._model.config.get_text_config().tie_word_embeddings:
            # vLLM for CPU packs its own copy of a tied output layer, and would keep the old one: it runs untied.
            embeddings = cast(nn.Embedding, self._model.get_input_embeddings())
            save_file({"lm_head.weight": embeddings.weight.detach()}, folder / "lm_head.safetensors")

    def _write_weights(self, folder: Path) -> None:
        """As `transformers` reads them; adapters are merged."""
        with quiet():
            (_merged(self._model) if self._config.model.lora_rank else self._model).save_pretrained(folder)

    def _set_lr(self) -> None:
        optim = self._config.optim
        scale = min(1.0, (self.version % LINEAGE + 1) / (optim.warmup_updates + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = optim.lr * scale

    def _steps(self, steps: list[list[Packed]]) -> list[dict[str, float]]:
        packs = [packed for step in steps for packed in step]
        before = self._before(packs) if len(steps) > 1 or self._critic else {}
        if self._critic and packs:
            self._critic.begin(packs, [seen.hidden_NH for seen in before.values() if seen.hidden_NH is not None])
        proximal = {key: seen.logprobs_N for key, seen in before.items()} if len(steps) > 1 else {}
        return [self._step(step, proximal if number else {}) for number, step in enumerate(steps) if step]

    def _before(self, packs: list[Packed]) -> dict[int, _Seen]:
        """What the weights before the update say, by pack."""
        with torch.no_grad():
            return {id(packed): self._forward(packed) for packed in packs}

    def _step(self, packs: list[Packed], proximal: dict[int, Tensor]) -> dict[str, float]:
        """One optimizer step: gradients add up over the packs, then one clip and one step."""
        algorithm = self._config.algorithm
        extra = self._prefer(packs) if algorithm.loss == "dpo" else {}
        sums: list[dict[str, float]] = []
        value_sums: list[dict[str, float]] = []
        old: list[np.ndarray] = []
        loss_sum = 0.0
        for packed in packs:
            seen, tokens = self._forward(packed), packed.tokens
            old.append(proximal.get(id(packed), seen.logprobs_N).detach().cpu().numpy())
            if broken := broken_row(seen.logprobs_N.detach().cpu().numpy(), tokens, packed.rows):
                log.error("optimizer step skipped", reason=broken)
            weights_N = self._tensor(tokens.weights_N)
            loss, metrics = policy_loss(
                seen.logprobs_N,
                proximal.get(id(packed)),
                self._tensor(tokens.logprobs_N),
                self._tensor(tokens.advantages_N),
                weights_N,
                self._tensor(tokens.calls_N),
                algorithm,
                entropy=seen.entropy_N,
                ref_logprobs=self._reference_logprobs(packed) if algorithm.kl_coef else None,
            )
            loss.backward()
            if self._critic and seen.hidden_NH is not None:
                value_sums.append(self._critic.learn(packed, seen.hidden_NH, weights_N))
            loss_sum += loss.item()
            sums.append(metrics)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.optim.grad_clip).item()
        if math.isfinite(norm):
            self._optimizer.step()
            if self._critic:
                self._critic.step()
        self._optimizer.zero_grad(set_to_none=True)
        return step_metrics(
            extra | mean_metrics(sums) | mean_metrics(value_sums) | {"loss": loss_sum},
            norm,
            np.concatenate(old),
            np.concatenate([packed.tokens.logprobs_N for packed in packs]),
            np.concatenate([packed.tokens.versions_N for packed in packs]) == self.version,
        )

    def _prefer(self, packs: list[Packed]) -> dict[str, float]:
        """DPO's advantages, from the weights at the step's start."""
        with torch.no_grad():
            logprobs_N = torch.cat([self._forward(packed).logprobs_N for packed in packs])
        reference_N = torch.cat([self._reference_logprobs(packed) for packed in packs])
        rows = [row for packed in packs for row in packed.rows]
        beta = self._config.algorithm.dpo_beta
        metrics = dpo_advantages(rows, logprobs_N.cpu().numpy(), reference_N.cpu().numpy(), beta)
        for packed in packs:
            packed.tokens.advantages_N[:] = trained_tokens(packed.rows).advantages_N
        return metrics

    def _reference_logprobs(self, packed: Packed) -> Tensor:
        """Under the model that the run began from."""
        with torch.no_grad():
            if self._config.model.lora_rank:
                with self._model.disable_adapter():  # type: ignore[operator]
                    return self._forward(packed).logprobs_N
            return self._forward(packed, self._reference).logprobs_N

    def _forward(self, packed: Packed, model: PreTrainedModel | None = None) -> _Seen:
        """Of the distribution sampled from, temperature included; by the policy unless `model` is given."""
        if self._stopping.is_set():
            raise InterruptedError
        predictors_N = self._tensor(packed.predictors_N)
        predictors, logits_of = torch.unique(predictors_N, return_inverse=True)
        found = (model or self._model)(
            input_ids=self._tensor(packed.ids_P).long()[None],
            attention_mask=None if len(packed.rows) == 1 else self._tensor(packed.mask_PP())[None, None],
            position_ids=self._tensor(packed.positions_P).long()[None],
            logits_to_keep=predictors,
            output_hidden_states=self._critic is not None,
            use_cache=False,
        )
        logits_NV = found.logits[0].float()[logits_of] / self._tensor(packed.tokens.temperatures_N)[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        targets_N = self._tensor(packed.tokens.ids_N).long()
        of = logprobs_NV if self._config.algorithm.entropy_coef else logprobs_NV.detach()
        return _Seen(
            logprobs_N=logprobs_NV.gather(-1, targets_N[:, None])[:, 0],
            entropy_N=-(of.exp() * of).sum(-1),
            hidden_NH=found.hidden_states[-1][0][predictors_N] if self._critic else None,
        )

    def _tensor(self, array) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def takes_trees(config: PretrainedConfig) -> bool:
    """Whether a block mask means the same to every layer; sliding windows and linear attention go by position."""
    kinds = getattr(config, "layer_types", None) or []
    windows = not kinds and getattr(config, "sliding_window", None)
    return not windows and all(kind == "full_attention" for kind in kinds)


def _device(name: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def _with_lora(model: PreTrainedModel, config: ModelConfig, checkpoint: Path | None) -> PreTrainedModel:
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint:
        return PeftModel.from_pretrained(model, checkpoint / "adapter", is_trainable=True)  # type: ignore[return-value]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear")
    return get_peft_model(model, lora)  # type: ignore[return-value]


def _merged(model: PreTrainedModel) -> PreTrainedModel:
    import copy

    return copy.deepcopy(model).merge_and_unload()  # type: ignore[attr-defined]
