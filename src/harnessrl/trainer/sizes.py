"""How many bytes a run needs, estimated from the model's configuration: no weights are read."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harnessrl.config import Config
from harnessrl.engine.model import local_folder

__all__ = ["Sizes", "sizes"]


@dataclass(frozen=True)
class Sizes:
    """Bytes, of one copy of the policy."""

    weights: int
    gradients: int
    optimizer: int
    """AdamW's two moments of each trained weight."""
    reference: int
    """The model that a KL term or DPO holds on to."""
    cache: int
    """Keys and values of `engine.max_batch` contexts of `engine.max_len` tokens, where the engine is embedded."""
    activations: int
    """Of a forward and backward pass over `train.micro_batch_tokens`."""


def sizes(config: Config) -> Sizes | None:
    """None where the model's files are not here."""
    if (folder := local_folder(config.model.path)) is None:
        return None
    known = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    number = sum(parameter.numel() for parameter in model.parameters())
    each = getattr(torch, config.model.dtype).itemsize
    text = known.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers, rank = text.num_hidden_layers, config.model.lora_rank
    # LoRA: two thin matrices beside each linear layer, about 7 of them in a layer of transformers.
    trained = min(number, layers * 7 * 2 * rank * text.hidden_size) if rank else number
    algorithm = config.algorithm
    reference = bool(algorithm.kl_coef or algorithm.loss == "dpo") and not rank
    tokens = config.train.micro_batch_tokens
    embedded = config.engine.kind == "embedded" and config.backend == "torch"
    contexts = config.engine.max_batch * config.engine.max_len if embedded else 0
    # Hidden states that autograd keeps of a layer (about 14 of them, and 3 of the wider MLP), and of the logits the
    # fp32 copy, the log-probabilities, and the gradient.
    per_layer = 14 * text.hidden_size + 3 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    return Sizes(
        weights=number * each,
        gradients=trained * each,
        optimizer=2 * trained * each,
        reference=number * each if reference else 0,
        cache=2 * layers * heads * head * each * contexts,
        activations=tokens * (layers * per_layer * each + 3 * text.vocab_size * 4),
    )
