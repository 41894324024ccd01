"""A fast tokenizer without the weight of `transformers` and torch: what the renderers need, and no more."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """Satisfies `renderers.Tokenizer`. Never adds special tokens of its own."""

    def __init__(self, name: str, backend: Backend, config: dict[str, Any]):
        self.name_or_path = name
        self._backend = backend
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        self.unk_token_id = self._special(config.get("unk_token"))
        self.eos_token_id = self._special(config.get("eos_token"))
        self.all_special_tokens = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]

    def _special(self, token: str | dict[str, Any] | None) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self._backend.token_to_id(text) if isinstance(text, str) else None

    def encode(self, text: str, *_: Any, split_special_tokens: bool = False, **__: Any) -> list[int]:
        """Ids of `text`; with `split_special_tokens`, text that looks like a special token is only text."""
        backend = self._plain if split_special_tokens else self._backend
        # Unlike `encode`, this lets other threads run meanwhile.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Sequence[int], *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            token_id = self._backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]


def load_tokenizer(name: str) -> Tokenizer:
    """From a folder or a Hugging Face name. Raises `ValueError` where there is no `tokenizer.json`."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=["tokenizer.json", "tokenizer_config.json"]))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"No tokenizer {name!r}: neither a folder here nor a model that Hugging Face serves ({error})."
            ) from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json. Save the model's fast tokenizer there.")
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    return Tokenizer(name, Backend.from_file(str(file)), config)
