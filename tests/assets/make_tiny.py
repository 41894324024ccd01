"""Make tests/assets/tiny: a 0.5M-parameter Llama with its tokenizer, warmed up on the calculator task.

Its demonstrations are sloppy on purpose: most of them use the wrong operation. So the model keeps to the
format, starts from a middling reward, greedy or sampled, and reinforcement learning has something to find.

python tests/assets/make_tiny.py [--steps 450] [--out tests/assets/tiny]
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "quickstart"))

from tasks import draw  # noqa: E402

SYSTEM = (
    "Solve the problem with the calculator. First reply only CALC(expression). "
    "After the result reply only ANSWER(number)."
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRONG = {ord("+"): "-", ord("-"): "+"}
Message = tuple[str, str]
"""(role, content)"""


def chatml(messages: list[Message]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def sloppy(rng: random.Random, expression: str) -> str:
    """The expression as a careless demonstrator would write it: mostly with a wrong operation."""
    if rng.random() < 0.3:
        return expression
    return expression.translate(WRONG if "*" not in expression else {ord("*"): "+"})


def conversation(rng: random.Random) -> list[Message]:
    question, expression, _ = draw(rng)
    expression = sloppy(rng, expression)
    result = eval(expression, {"__builtins__": {}})
    return [
        ("user", question),
        ("assistant", f"CALC({expression})"),
        ("user", f"RESULT({result})"),
        ("assistant", f"ANSWER({result})"),
    ]


def demonstration(rng: random.Random) -> list[Message]:
    """Sometimes with an earlier conversation before it, so that a worked example doesn't surprise the model."""
    example = conversation(rng) if rng.random() < 0.3 else []
    return [("system", SYSTEM), *example, *conversation(rng)]


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chatml(demonstration(rng)) for _ in range(2000)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids, and targets that are -100 where no assistant speaks."""
    ids: list[int] = []
    targets: list[int] = []
    for role, content in messages:
        head = tokenizer.encode(f"<|im_start|>{role}\n")
        body = tokenizer.encode(f"{content}<|im_end|>")
        tail = tokenizer.encode("\n")
        ids += head + body + tail
        targets += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body)) + [-100] * len(tail)
    return ids, targets


def batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [encode(tokenizer, demonstration(rng)) for _ in range(size)]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    targets = torch.tensor([targets + [-100] * (width - len(targets)) for _, targets in rows])
    return ids, targets


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for step in range(steps):
        ids_BT, targets_BT = batch(tokenizer, rng, 32)
        logits_BTV = model(input_ids=ids_BT).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--out", type=Path, default=HERE / "tiny")
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(1_000_003)
    tokenizer = make_tokenizer(rng)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()["<|im_end|>"],
        pad_token_id=tokenizer.get_vocab()["<|endoftext|>"],
    )
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    warm_up(model, tokenizer, rng, options.steps)
    model.bfloat16().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
