"""What is trained, on what: tasks, agent, the model's files, and its way from messages to tokens and back."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harnessrl.config import Config
from harnessrl.schemas import Json

if TYPE_CHECKING:
    from harnessrl.gateway.chat.renderer import Chat

_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
_ASKED: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a quoin?"}]
_ARGUMENTS = {"word": "quoin"}
_CALLING: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(_ARGUMENTS)}}
    ],
}
_RESULT: Json = {"role": "tool", "tool_call_id": "call_0", "content": "A corner stone."}


def tasks(config: Config) -> str:
    from harnessrl.trainer.tasks import read_tasks

    if not config.data.train:
        raise ValueError("data.train is not set: name a file of tasks (JSONL, Parquet or CSV)")
    count = len(read_tasks(Path(config.data.train)))
    held_out = len(read_tasks(Path(config.data.eval))) if config.data.eval else 0
    return f"{count}, {f'{held_out} held out' if held_out else 'none held out: no evaluation'}"


def agent(config: Config) -> str | None:
    local = config.agent.local
    if config.controller.runner != "local" or (local and local.agent_class):
        return None
    if not (local and local.command):
        raise ValueError("agent.local.command is not set: say how the agent is started, e.g. [python, agent.py]")
    if local.cwd and not Path(local.cwd).is_dir():
        raise ValueError(f"agent.local.cwd: there is no folder {local.cwd}")
    program = local.command[0]
    if "{" not in program and program != "python" and not shutil.which(program, path=None):
        raise ValueError(
            f"agent.local.command: there is no program {program} on the PATH: install it, or give its path"
        )
    return " ".join(local.command)


def files(config: Config) -> str | None:
    """Of a model that is here: all of its weights and its tokenizer."""
    from harnessrl.engine.model import PACKAGE, local_folder, resolve

    path = config.model.path
    folder = local_folder(path)
    if folder is None:
        if path.startswith((PACKAGE, ".", "/", "~")):
            resolve(path)  # says what is wrong
        return None
    indexes = list(folder.glob("*.safetensors.index.json"))
    shards = {name for index in indexes for name in json.loads(index.read_text())["weight_map"].values()}
    missing = sorted(name for name in shards if not (folder / name).exists())
    if not shards and not list(folder.glob("*.safetensors")):
        missing = ["model.safetensors"]
    missing += [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: copy or download the model again")
    return str(folder)


def hugging_face(config: Config) -> str | None:
    """Where the model has to be downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from harnessrl.engine.model import PACKAGE, local_folder

    path = config.model.path
    if path.startswith((PACKAGE, ".", "/", "~")) or local_folder(path):
        return None
    try:
        found = HfApi().model_info(path, timeout=10, files_metadata=True)
    except HFValidationError:
        raise ValueError(f"there is no model at {path}: give a folder or a Hugging Face name") from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{path} is not here, and Hugging Face does not give it ({type(error).__name__}): check the name and "
            "the network, set HF_TOKEN if it is gated, or download it where there is a network and give its folder"
        ) from None
    wanted = sum(file.size or 0 for file in found.siblings or [] if file.rfilename.endswith(".safetensors"))
    return f"{path} can be downloaded, {wanted / 1e9:.1f} GB"


def renderer(config: Config) -> str | None:
    if (chat := _chat(config)) is None:
        return None
    prompt = chat.render(_ASKED, [])
    return f"{config.model.renderer['name']}, {len(prompt)} tokens of a question, ends at {chat.stop_ids}"


def continuity(config: Config) -> str | None:
    """Whether a history is continued token by token."""
    if (chat := _chat(config)) is None:
        return None
    prompt, answer = _answered(chat)
    longer = chat.bridge(prompt, answer, [_RESULT], _TOOLS) if chat.can_continue else None
    before = np.concatenate([prompt, answer])
    if longer is not None and np.array_equal(longer[: len(before)], before):
        return f"exact: a tool's result is {len(longer) - len(before)} new tokens"
    if config.model.continuity == "rendered":
        return "rendered: each turn is rendered afresh, as model.continuity accepts"
    raise ValueError(
        f"the renderer {config.model.renderer['name']} can't continue a history token by token, so that each turn "
        "would be a row of its own: choose the model's own renderer (model.renderer), or accept it with "
        "model.continuity=rendered"
    )


def tool_calls(config: Config) -> str | None:
    """Whether tools are shown to the model, and parse(render(x)) is x."""
    if (chat := _chat(config)) is None:
        return None
    name = config.model.renderer["name"]
    prompt, answer = _answered(chat)
    if "look_up" not in chat.tokenizer.decode(prompt.tolist()):
        raise ValueError(
            f"the renderer {name} shows the model no tools, so that a harness that offers some can't be trained: "
            "choose another (model.renderer); chatml shows them to any model with ChatML's marks"
        )
    parsed = chat.parse(answer.tolist(), prompt, _TOOLS, "doctor")
    found = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    if found != [("look_up", _ARGUMENTS)]:
        raise ValueError(
            f"the renderer {name} does not read its own tool calls back ({chat.text(answer.tolist())!r} was read "
            f"as {found or parsed.content!r}): it is the wrong one for this model (model.renderer)"
        )
    return "shown, and read back as written"


def _chat(config: Config) -> "Chat | None":
    from harnessrl.engine.model import local_folder
    from harnessrl.gateway.chat.renderer import load_chat

    folder = local_folder(config.model.path)
    return load_chat(str(folder), config.model.renderer) if folder else None


def _answered(chat: "Chat") -> tuple[np.ndarray, np.ndarray]:
    """A prompt with tools, and an answer that calls one as the template writes it, up to the end of its turn."""
    prompt = chat.render(_ASKED, _TOOLS)
    after = chat.render([*_ASKED, _CALLING, _RESULT], _TOOLS)
    if not np.array_equal(after[: len(prompt)], prompt):
        # The generation prompt says more than the history does (an empty reasoning, say).
        differs = np.flatnonzero(after[: len(prompt)] != prompt[: len(after)])
        prompt = prompt[: int(differs[0])]
    rest = after[len(prompt) :]
    ends = np.flatnonzero(np.isin(rest, chat.stop_ids))
    return prompt, rest[: int(ends[0]) + 1 if len(ends) else len(rest)]
