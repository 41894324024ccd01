"""A tokenizer that knows the special tokens of many model families, so that their renderers can be tested."""

from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from harnessrl.gateway.chat.renderer import Chat
from harnessrl.gateway.chat.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "assets" / "tiny"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(
        "<tool_response>",
        "</tool_response>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
)
FAMILIES = (
    *("chatml", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3.5", "nemotron-3-ultra"),
    *("qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"),
    *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
)
"""Not here: gpt-oss, whose vocabulary is downloaded, and those whose special tokens are not in `SPECIAL`."""


def tokenizer() -> Tokenizer:
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(str(TINY), backend, {"eos_token": "<|im_end|>"})


TOKENIZER = tokenizer()


def chat(name: str, **options: object) -> Chat:
    return Chat(TOKENIZER, {"name": name, **options})
