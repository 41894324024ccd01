"""The engine's module: the trainer's parameters under a forward of its own.

The parameters are the trainer's tensors, not copies; everything else (mode, configuration, buffers) is the
engine's, so that neither `train()` nor gradient checkpointing leaks in. LoRA layers are the exception: each
gets a scratch weight, base + adapters, that `merge` refreshes.
"""

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harnessrl.engine.attention import IMPLEMENTATION


def share(model: nn.Module) -> tuple[PreTrainedModel, Callable[[], None]]:
    """A second module over the parameters of `model` (transformers' or peft's), and what refreshes its merges."""
    own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    merges: list[tuple[nn.Module, nn.Module]] = []
    if hasattr(own, "get_base_model"):
        own = cast(Callable[[], nn.Module], own.get_base_model)()
    for name, layer in list(own.named_modules()):
        if hasattr(layer, "get_delta_weight"):
            merged = copy.deepcopy(cast(Callable[[], nn.Module], layer.get_base_layer)())
            own.set_submodule(name, merged)
            merges.append((merged, layer))
    own.eval()
    own = cast(PreTrainedModel, own)
    own.set_attn_implementation(IMPLEMENTATION)
    own.config.use_cache = False

    def merge() -> None:
        with torch.no_grad():
            for merged, layer in merges:
                base = cast(Callable[[], nn.Module], layer.get_base_layer)()
                delta = cast(Callable[[str], Tensor], layer.get_delta_weight)
                weight = cast(Tensor, merged.weight)
                weight.copy_(cast(Tensor, base.weight))
                for adapter in cast(list[str], layer.active_adapters):
                    weight += delta(adapter)

    merge()
    return own, merge
