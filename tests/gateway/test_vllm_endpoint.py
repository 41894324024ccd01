"""The proxy in front of a real vLLM (for CPUs): what it records is what the weights say."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from proxy_kit import TINY, contexts, proxied
from transformers import AutoModelForCausalLM

from harnessrl.cli.services import vllm_service
from harnessrl.client import full_prompts
from harnessrl.config import Config
from harnessrl.engine.model import load_tokenizer
from harnessrl.schemas import Call, Endpoint, Pause
from harnessrl.trainer.backends.torch import TorchBackend

sys.path.append(str(Path(__file__).parents[1] / "trainer" / "backends"))
from on_policy import config, rows, update_of  # noqa: E402

pytestmark = pytest.mark.vllm
TOKENIZER = load_tokenizer(TINY)
TOLERANCE = 1e-3
LONG = 1500
"""Tokens that a call samples while the weights change twice."""


def endless(folder: Path) -> str:
    """The tiny model with an end-of-turn token that it hardly ever samples."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.get_parameter("model.embed_tokens.weight").data[TOKENIZER.convert_tokens_to_ids("<|im_end|>")] = 0
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def backend_at(url: str, folder: Path, path: str = TINY) -> TorchBackend:
    engine = {"kind": "vllm", "url": url, "weights_dir": str(folder / "weights"), "max_len": 2048}
    return TorchBackend(config(engine=engine, model={"path": path}))


def recomputed(folder: Path, call: Call) -> np.ndarray:
    """Log-probabilities of the call's sampled tokens under the weights in `folder`."""
    (context,) = contexts([call]).values()
    ids = torch.tensor(context, dtype=torch.long)[None]
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0].log_softmax(-1)
    start = len(context) - len(call.sampled_ids)
    return logprobs[np.arange(start, len(context)) - 1, context[start:]].numpy()


async def test_a_call_that_is_cut_twice_goes_on_under_the_new_weights(vllm_url: str, tmp_path: Path) -> None:
    backend = backend_at(vllm_url, tmp_path, endless(tmp_path / "model"))
    async with proxied(tmp_path, *backend.endpoints()) as gateway:
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0, timeout=120)
        ask: Any = {"model": "any", "messages": [{"role": "user", "content": "Go"}], "max_tokens": LONG}
        heard: list[Any] = []

        async def listen() -> None:
            async for piece in await client.chat.completions.create(**ask, stream=True):
                heard.append(piece)

        listening = asyncio.create_task(listen())
        for version in range(2):
            before = len(heard)
            while len(heard) < before + 2:
                assert not listening.done(), "it was over before it could be cut"
                await asyncio.sleep(0.01)
            await gateway.gateway.gate.pause(Pause(rest="cut"))
            while gateway.gateway.gate.inflight:
                await asyncio.sleep(0.005)
            backend.save(tmp_path / str(version))
            await asyncio.to_thread(lambda: backend.update(update_of(rows(backend))))
            await gateway.register(*backend.endpoints())
            await gateway.gateway.gate.resume()
        await listening
        backend.save(tmp_path / "2")
        (call,) = await gateway.calls()
    assert [version for version, _ in call.versions] == [0, 1, 2]
    assert len(call.sampled_ids) == LONG and call.finish_reason == "length" and call.logprobs
    said, begin = np.array(call.logprobs), 0
    under = [recomputed(tmp_path / str(version), call) for version in range(3)]
    for version, tokens in call.versions:
        part = slice(begin, begin + tokens)
        gaps = [np.abs(said[part] - logprobs[part]).max() for logprobs in under]
        print(f"version {version}: {tokens} tokens, largest gap under versions 0 to 2: {np.round(gaps, 7)}")
        assert gaps[version] < TOLERANCE
        # A few tokens may be as good as certain under all of them.
        assert tokens < 20 or all(gap > TOLERANCE for other, gap in enumerate(gaps) if other != version)
        begin += tokens


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_chat_endpoint_gives_ids_and_logprobs(vllm_url: str, tmp_path: Path, streamed: bool) -> None:
    backend = backend_at(vllm_url, tmp_path)
    endpoint = Endpoint(model="policy", endpoint=f"{vllm_url}/v1", kind="chat", version=backend.version)
    async with proxied(tmp_path, endpoint) as gateway:
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0, timeout=120)
        messages: Any = [{"role": "user", "content": "Kim has 12 apples and gets 5 more."}]
        got: Any = await client.chat.completions.create(
            model="any", messages=messages, max_tokens=24, stream=streamed, top_p=0.5
        )
        if streamed:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in got if chunk.choices])
        else:
            text = got.choices[0].message.content
        (call,) = await gateway.calls()
    backend.save(tmp_path / "saved")
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(full_prompts([call])[call.call_id]) == prompt
    assert TOKENIZER.decode(call.sampled_ids, skip_special_tokens=True) == text
    assert call.trainable and not call.capture_failed and call.delivered and call.logprobs
    gap = np.abs(np.array(call.logprobs) - recomputed(tmp_path / "saved", call)).max()
    print(f"largest gap: {gap:.1e}")
    assert gap < TOLERANCE


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
async def test_the_probe_tells_the_two_modes_of_logprobs_apart(
    vllm_settings: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    own_weights = ["--load-format", "auto", "--hf-overrides", "{}"]
    arguments = [*vllm_settings["args"], "--logprobs-mode", mode, *own_weights]
    engine = {**vllm_settings, "args": arguments, "max_len": 2048, "max_batch": 4}
    ask: Any = {"model": "any", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 4}
    with vllm_service(Config.model_validate({"model": {"path": TINY}, "engine": engine}), tmp_path) as service:
        urls: Any = {"token": service.address, "chat": f"{service.address}/v1"}
        for kind, url in urls.items():
            endpoint = Endpoint(
                model="policy", endpoint=url, kind=kind, tokenizer=TINY, renderer={"name": "chatml"}
            )
            async with (
                proxied(tmp_path / kind, endpoint, train_temperature=0.7) as gateway,
                openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0) as client,
            ):
                if mode == "processed_logprobs":
                    await client.chat.completions.create(**ask)
                    continue
                with pytest.raises(openai.InternalServerError, match="ignore the temperature"):
                    await client.chat.completions.create(**ask)
