"""The token endpoint over real HTTP."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_checks import check
from transformers import PreTrainedModel

from harnessrl.engine.embedded import Answer, EmbeddedEngine
from harnessrl.engine.server import serve

PROMPT = list(range(20, 60))
GENERATE = "/inference/v1/generate"


@pytest.fixture
def http(engine: EmbeddedEngine) -> Iterator[httpx.Client]:
    server = serve(engine, model="tiny")
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
    server.close()


def body(stream: bool = False, **sampling: Any) -> dict[str, Any]:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True, **sampling}
    return {"request_id": "r1", "token_ids": PROMPT, "sampling_params": params, "stream": stream}


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_until_running(engine: EmbeddedEngine, count: int) -> None:
    deadline = time.monotonic() + 10
    while engine.stats().running != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_whole(http: httpx.Client, model: PreTrainedModel) -> None:
    response = http.post(GENERATE, json=body()).raise_for_status().json()
    assert response["request_id"] == "r1"
    assert response["usage"] == {"prompt_tokens": 40, "completion_tokens": 20, "total_tokens": 60}
    assert response["version"] == 0
    (choice,) = response["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    content = choice["logprobs"]["content"]
    assert [c["token"] for c in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    check(model, PROMPT, Answer(choice["token_ids"], [c["logprob"] for c in content], 0, "length"))


def test_streamed_is_whole(http: httpx.Client) -> None:
    (whole,) = http.post(GENERATE, json=body()).json()["choices"]
    with http.stream("POST", GENERATE, json=body(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    choices = [c["choices"][0] for c in chunks]
    assert [t for c in choices for t in c["token_ids"]] == whole["token_ids"]
    streamed = [entry["logprob"] for c in choices for entry in c["logprobs"]["content"]]
    assert streamed == pytest.approx([entry["logprob"] for entry in whole["logprobs"]["content"]], abs=1e-4)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    assert len(chunks) > 5


def test_logprobs_only_when_asked_for(http: httpx.Client) -> None:
    (choice,) = http.post(GENERATE, json=body(logprobs=None)).json()["choices"]
    assert choice["logprobs"] is None


def test_the_end_of_sequence_token_stops_unless_ignored(http: httpx.Client, engine: EmbeddedEngine) -> None:
    (eos,) = engine.eos_token_ids
    long = {"max_tokens": 300, "temperature": 1.0}
    (stopped,) = http.post(GENERATE, json=body(**long, ignore_eos=False)).json()["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"][-1] == eos
    (free,) = http.post(GENERATE, json=body(**long)).json()["choices"]
    assert len(free["token_ids"]) == 300


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"n": 2},
        {"min_tokens": 5},
        {"logit_bias": {"5": 1.0}},
        {"stop": ["\n"]},
        {"structured_outputs": {"regex": "a"}},
        {"logprobs": 5},
        {"temperature": -1},
        {"max_tokens": 0},
        {"top_p": 0},
    ],
)
def test_what_it_would_have_to_ignore_is_refused(http: httpx.Client, field: dict[str, Any]) -> None:
    response = http.post(GENERATE, json=body(**field))
    assert response.status_code == 400
    (name,) = field
    assert name in response.json()["error"]["message"]


def test_neutral_values_are_taken(http: httpx.Client) -> None:
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "top_k": -1,
        "stop": None,
        "skip_special_tokens": False,
        "prompt_logprobs": None,
    }
    http.post(GENERATE, json=body(**neutral)).raise_for_status()


def test_bad_requests(http: httpx.Client, engine: EmbeddedEngine) -> None:
    too_long = http.post(GENERATE, json=body() | {"token_ids": [5] * 600})
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert error["type"] == "context_length_exceeded"
    assert "600 tokens" in error["message"]
    assert "512" in error["message"]
    for wrong in ({"token_ids": []}, {"token_ids": [10**6]}, {"token_ids": "abc"}):
        response = http.post(GENERATE, json=body() | wrong)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "token_ids"
    assert http.post(GENERATE, content=b"{").status_code == 400
    assert http.post("/inference/v1/abort_requests", json={}).status_code == 400


def test_abort_ends_a_stream(http: httpx.Client, engine: EmbeddedEngine) -> None:
    with http.stream("POST", GENERATE, json=body(stream=True, max_tokens=400)) as response:
        wait_until_running(engine, 1)
        http.post("/inference/v1/abort_requests", json={"request_ids": ["r1", "unknown"]}).raise_for_status()
        last = events(response)[-1]
    assert last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(http: httpx.Client, engine: EmbeddedEngine, stream: bool) -> None:
    engine.pause()
    address = http.base_url.host, http.base_url.port or 80
    content = json.dumps(body(stream=stream, max_tokens=450)).encode()
    with socket.create_connection(address) as client:
        head = f"POST {GENERATE} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        deadline = time.monotonic() + 10
        while engine.stats().waiting != 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    while engine.stats().waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.resume()


def test_pause_cuts_and_holds(http: httpx.Client, engine: EmbeddedEngine) -> None:
    answers: list[Any] = []

    def ask(**sampling: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(http.post(GENERATE, json=body(**sampling)).json()))
        thread.start()
        return thread

    first = ask(max_tokens=450)
    wait_until_running(engine, 1)
    http.post("/pause").raise_for_status()
    first.join(20)
    assert answers.pop()["choices"][0]["finish_reason"] == "abort"
    second = ask()
    time.sleep(0.1)
    assert second.is_alive()
    with engine.updating():
        assert http.post("/resume").status_code == 409
        engine.publish(7)
    second.join(20)
    assert answers.pop()["version"] == 7
    http.post("/pause").raise_for_status()
    http.post("/resume").raise_for_status()
    http.post("/reset_prefix_cache").raise_for_status()
    http.post(GENERATE, json=body()).raise_for_status()


def test_what_it_says_of_itself(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["version"]) == ("tiny", 512, 0)
    http.post(GENERATE, json=body()).raise_for_status()
    metrics = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines())
    assert metrics["harnessrl_engine_sampled_tokens"] == "20"
    assert metrics["harnessrl_engine_prefilled_tokens"] == "40"


def test_a_port_in_use(engine: EmbeddedEngine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"Cannot listen on 127\.0\.0\.1:\d+ .*--port"):
            serve(engine, port=taken.getsockname()[1])
