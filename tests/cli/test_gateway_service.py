"""What the training configuration says of the gateway reaches the run's own one."""

import re
import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from proxy_kit import TINY, TOKENIZER, ScriptedEngine  # noqa: E402

from harnessrl.cli.services import gateway_service  # noqa: E402
from harnessrl.config import load_config  # noqa: E402


async def test_agents_are_told_apart_by_the_configured_rules(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("gateway: {agents: {planner: '^You plan', coder: 'write\\s+code'}}\n")
    config = load_config(file)
    async with ScriptedEngine(TOKENIZER, lambda _: "fine") as engine:
        with gateway_service(config, tmp_path, "k") as gateway:
            headers = {"authorization": "Bearer k"}
            async with httpx.AsyncClient(base_url=gateway.address, headers=headers, timeout=60) as http:
                await http.post("/api/models", json=[engine.endpoint(TINY).model_dump()])
                (rollout,) = (await http.post("/api/rollouts", json=[{"input": 1}])).json()
                url = f"/api/rollouts/{rollout['rollout_id']}"
                for system in ("You plan.", "You write  code.", "Be brief."):
                    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go"}]
                    proxy = url.replace("/api/rollouts", "/proxy/rollout") + "/attempt/0/mode/train/openai/v1"
                    said = await http.post(f"{proxy}/chat/completions", json={"messages": messages})
                    assert said.status_code == 200, said.text
                calls = (await http.get(f"{url}/calls")).json()
    assert [call["agent"] for call in calls] == ["planner", "coder", None]


def test_a_rule_that_is_no_expression_is_told_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("gateway: {agents: {planner: '('}}\n")
    with pytest.raises(ValueError, match=re.escape("gateway.agents")):
        load_config(file)
