"""A real Llama of two layers, and log-probabilities of trained tokens computed the plain way: row by row."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from harnessrl.trainer.rows import Row, trained_tokens

VOCABULARY = 29


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config)


def plain_logprobs(model: LlamaForCausalLM, rows: Sequence[Row]) -> Tensor:
    """By trained token, in the order of `trained_tokens(rows)`, at the temperature sampled with."""
    found = []
    for row in rows:
        tokens = trained_tokens([row])
        logits = model(input_ids=torch.tensor(row.ids_T[None].astype(np.int64))).logits[0]
        logits = logits[torch.tensor(tokens.positions_N - 1)] / torch.tensor(tokens.temperatures_N)[:, None]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens.ids_N.astype(np.int64))[:, None])[:, 0])
    return torch.cat(found)


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    """Of all parameters, as one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
