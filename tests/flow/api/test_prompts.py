"""Prompts of the operator: what requests of all transports make of them, and what a server does with the files."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.cli.command_line import read_settings
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client, wait_until
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.server_process import running_process
from tests.support.socket_client import connected

Json = dict[str, Any]

WEATHER = """\
+++
temperature = 0.2
input = "What is the weather in {{city}}?"
+++
Answer in a {{tone}} tone.
"""
VARIABLES: Any = {"city": "Paris", "tone": "dry {{city}}"}
PROMPT: Any = {"id": "weather", "variables": VARIABLES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "prompts").mkdir()
    (folder / "weather.md").write_text(WEATHER)
    (folder / "elsewhere.md").write_text('+++\nmodel = "other"\n+++\nBe brief.')
    (folder / "seen.md").write_text('+++\ninput = "Look: {{picture}}"\n+++\n')
    return folder


@pytest.fixture
async def served(folder: Path, tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    engine = ScriptedEngine(script(HELLO), models=("tiny",))
    async with running_server(
        engine, tmp_path, settings=read_settings(["--prompts", str(folder)]), resources=("prompts",)
    ) as served:
        yield served


async def test_prompt_is_filled_echoed_and_continued(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(prompt=PROMPT)
    assert "Answer in a dry {{city}} tone." in served.prompt_text()
    assert "What is the weather in Paris?" in served.prompt_text()
    assert first.prompt
    assert first.prompt.to_dict() == {"id": "weather", "version": "1", "variables": VARIABLES}
    assert (first.temperature, first.instructions) == (0.2, "Answer in a dry {{city}} tone.")
    assert (await sdk.responses.retrieve(first.id)).prompt == first.prompt
    await sdk.responses.create(prompt=PROMPT, input="And tomorrow?", previous_response_id=first.id, temperature=1)
    again = served.prompt_text()
    assert again.index("in Paris?") < again.index("And tomorrow?")
    assert again.count("What is the weather in Paris?") == again.count("Answer in a dry") == 1


async def test_counting_and_sockets_take_prompts(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    plain: Any = {"instructions": "Answer in a dry {{city}} tone.", "input": "What is the weather in Paris?"}
    counted = await sdk.responses.input_tokens.count(extra_body={"prompt": PROMPT})
    assert counted == await sdk.responses.input_tokens.count(**plain)
    async with connected(served) as client:
        response = await client.create(prompt=PROMPT)
    assert response.prompt == {"id": "weather", "version": "1", "variables": VARIABLES}
    assert len(served.engine.prompts[-1].token_ids) == counted.input_tokens


@pytest.mark.parametrize(
    ("prompt", "status", "param"),
    [
        ({"id": "none"}, 404, "prompt.id"),
        ({"id": "weather", "version": "2"}, 404, "prompt.version"),
        ({"id": "weather", "variables": {"city": "Paris"}}, 400, "prompt.variables.tone"),
        ({"id": "weather", "variables": {**VARIABLES, "more": ""}}, 400, "prompt.variables.more"),
        ({"id": "elsewhere"}, 404, "prompt"),
        (
            {"id": "seen", "variables": {"picture": {"type": "input_image", "image_url": "https://a.invalid"}}},
            400,
            "prompt",
        ),
    ],
)
async def test_wrong_prompt_is_refused_by_its_place(
    served: ScriptedServer, prompt: Json, status: int, param: str
) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answered, body = await served.post({"prompt": prompt}, path)
        assert (answered, body["error"]["param"]) == (status, param)
    async with connected(served) as client:
        await client.send(prompt=prompt)
        error = await client.error()
    assert (error["status"], error["error"]["param"]) == (status, param)


async def test_prompts_are_listed(served: ScriptedServer, folder: Path) -> None:
    weather: Json = {
        "id": "weather",
        "version": "1",
        "versions": ["1"],
        "variables": ["city", "tone"],
        "model": None,
        "instructions": "Answer in a {{tone}} tone.",
        "object": "prompt",
    }
    _, listed = await served.get("/v1/prompts")
    assert [prompt["id"] for prompt in listed["data"]] == ["elsewhere", "seen", "weather"]
    assert listed["data"][-1] == weather
    assert await served.get("/v1/prompts/weather") == (200, weather)
    assert {**listed, "data": []} == {
        "object": "list",
        "data": [],
        "first_id": "elsewhere",
        "last_id": "weather",
        "has_more": False,
    }
    (folder / "weather@12.md").write_text("Say {{city}}.")
    prompts = served.scheduler.pipeline.stage("normalize").prompts
    prompts.templates = prompts.read()
    _, latest = await served.get("/v1/prompts/weather")
    assert (latest["version"], latest["versions"], latest["variables"]) == ("12", ["1", "12"], ["city"])
    assert await served.get("/v1/prompts/weather?version=1") == (200, {**weather, "versions": ["1", "12"]})
    for path in ("/v1/prompts/none", "/v1/prompts/weather?version=2"):
        status, body = await served.get(path)
        assert (status, body["error"]["code"]) == (404, "prompt_not_found")


async def test_folder_is_read_at_the_start_and_at_sighup(folder: Path, tmp_path: Path) -> None:
    async with (
        running_process("none", tmp_path, "quick", "--prompts", str(folder)) as server,
        openai_client(server.url) as client,
    ):
        (folder / "weather@2.md").write_text("Say {{city}}.")
        os.kill(server.pid, signal.SIGHUP)
        await wait_until(lambda: "the prompts were read again" in server.log.read_text())
        response = await client.responses.create(
            input="Hi", prompt={"id": "weather", "variables": {"city": "Rome"}}, store=False
        )
        assert response.instructions == "Say Rome."
        (folder / "weather@3.md").write_text("+++\ntemperature = 5\n+++\n")
        os.kill(server.pid, signal.SIGHUP)
        await wait_until(lambda: "SIGHUP: the prompts stay as they were: --prompts" in server.log.read_text())
    assert "Traceback" not in server.log.read_text()
