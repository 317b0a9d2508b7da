"""A backend of texts, against a real server of chat completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from penstock.api.cli.drawn import drawn
from penstock.api.http.connections import bind, serving
from penstock.api.settings import Settings
from penstock.pipeline.errors import CannotStart
from penstock.server import application
from penstock.services.engines.custom import open_engine
from tests.support.api_clients import openai_client, wait_until
from tests.support.server import WEATHER

ENGINE = f"{Path(__file__).with_name('chat_endpoint.py')}:engine"
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 3},
}

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="

pytestmark = pytest.mark.io


def says(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def calls(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    begun = {"id": f"call_{index}", "type": "function"} if name else {}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return says(tool_calls=[{"index": index, **begun, "function": function}])


def ends(reason: str = "stop") -> list[dict[str, Any]]:
    return [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": USAGE}]


HELLO = [
    says(role="assistant", content=""),
    says(reasoning="Hm.", reasoning_content="Hm."),
    says(content="Hel"),
    says(content="lo!"),
    *ends(),
]


@dataclass
class ChatServer:
    """A server of chat completions; each request takes the next of ``answers``."""

    answers: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer: Any = self.answers.pop(0)
        if isinstance(answer, web.Response):
            return answer
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        try:
            await self._send(stream, answer)
        except (asyncio.CancelledError, ConnectionError):
            self.is_left.set()
            raise
        return stream

    async def _send(self, stream: web.StreamResponse, answer: Sequence[Any]) -> None:
        for chunk in answer:
            if chunk == "for ever":
                await asyncio.Event().wait()
            if chunk == "broken":
                return
            await stream.write(b"data: %b\n\n" % json.dumps(chunk).encode())
        await stream.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: Any
) -> AsyncGenerator[tuple[Any, ChatServer], None]:
    """Serve the backend over a server of chat completions; yield a client, and that server."""
    chat = ChatServer([*answers])
    upstream = web.Application()
    upstream.router.add_post("/v1/chat/completions", chat.complete)
    endpoint, bound = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    monkeypatch.setenv("CHAT_URL", f"http://127.0.0.1:{endpoint.getsockname()[1]}/v1")
    values: dict[str, Any] = {
        "model": "far",
        "engine": [ENGINE],
        "store": str(tmp_path / "s.sqlite3"),
        "sandbox": False,
    }
    async with (
        serving(upstream, endpoint),
        serving(await application(Settings(**values)), bound),
        openai_client(f"http://127.0.0.1:{bound.getsockname()[1]}") as client,
    ):
        yield client, chat


async def test_text_reasoning_and_usage_reach_the_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path, HELLO) as (client, chat):
        stream = await client.responses.create(input="Hi", instructions="Be brief.", max_output_tokens=16, stream=True)
        events = [event async for event in stream]
    response = events[-1].response
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["Hel", "lo!"]
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Hm."
    assert (response.status, response.output_text, response.model) == ("completed", "Hello!", "far")
    usage = response.usage
    counts = (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)
    assert (*counts, usage.output_tokens_details.reasoning_tokens) == (20, 16, 7, 3)
    [sent] = chat.bodies
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (sent["model"], sent["max_completion_tokens"], sent["stream"]) == ("far", 16, True)


async def test_calls_go_to_the_client_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shout = {"type": "custom", "name": "shout"}
    called = [
        calls(0, "", "get_weather"),
        calls(0, '{"city":'),
        calls(0, '"Paris"}'),
        calls(1, '{"input": "a\\n', "shout"),
        calls(1, 'b"}'),
        *ends("tool_calls"),
    ]
    async with running(monkeypatch, tmp_path, called, HELLO) as (client, chat):
        first = await client.responses.create(input="Hi", tools=[WEATHER, shout])
        weather, custom = first.output
        assert (weather.name, weather.arguments, custom.name, custom.input) == (
            "get_weather",
            '{"city":"Paris"}',
            "shout",
            "a\nb",
        )
        outputs = [
            {"type": "function_call_output", "call_id": weather.call_id, "output": "rain"},
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"},
        ]
        second = await client.responses.create(
            input=outputs, tools=[WEATHER, shout], previous_response_id=first.id, tool_choice="required"
        )
        assert second.output_text == "Hello!"
    sent = chat.bodies[1]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [call["function"] for call in sent["messages"][1]["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city":"Paris"}'},
        {"name": "shout", "arguments": '{"input": "a\\nb"}'},
    ]
    assert [message["content"] for message in sent["messages"][2:]] == ["rain", "done"]
    assert ([tool["function"]["name"] for tool in sent["tools"]], sent["tool_choice"]) == (
        ["get_weather", "shout"],
        "required",
    )


async def test_schemas_and_images_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "nothing", "schema": schema, "strict": True}
    picture = f"data:image/png;base64,{PIXEL}"
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": picture}]
    async with running(monkeypatch, tmp_path, HELLO) as (client, chat):
        await client.responses.create(input=[{"role": "user", "content": parts}], text={"format": form})
    [sent] = chat.bodies
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "nothing", "schema": schema, "strict": True},
    }
    assert sent["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ([says(content="Hel"), *ends("length")], "incomplete", "max_output_tokens"),
        ([says(content="Hel"), *ends("content_filter")], "incomplete", "content_filter"),
        ([says(content="Hel"), "broken"], "failed", "The endpoint broke off its answer."),
        ([says(content="Hel"), {"error": {"message": "no GPU"}}], "failed", "no GPU"),
        ([says(content="Hel"), calls(0, "{}")], "failed", "The endpoint wrote several calls at once."),
    ],
)
async def test_early_ends_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: list[Any], status: str, code: str
) -> None:
    async with running(monkeypatch, tmp_path, answer) as (client, _):
        response = await client.responses.create(input="Hi")
    details = response.incomplete_details.reason if response.incomplete_details else response.error.message
    assert (response.status, details, response.output_text) == (status, code, "Hel")


@pytest.mark.parametrize(
    ("upstream", "status", "message"),
    [(400, 400, "too long"), (429, 503, "too long"), (401, 500, "too long"), (500, 500, "too long")],
)
async def test_refusals_are_statuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, upstream: int, status: int, message: str
) -> None:
    refused = web.json_response({"error": {"message": message}}, status=upstream)
    async with running(monkeypatch, tmp_path, refused) as (client, _):
        with pytest.raises(openai.APIStatusError, match=message) as raised:
            await client.responses.create(input="Hi")
    assert raised.value.status_code == status


async def test_parameters_that_the_endpoint_lacks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path) as (client, _):
        for refused in ({"top_logprobs": 2}, {"extra_body": {"structured_outputs": {"choice": ["a"]}}}):
            with pytest.raises(openai.BadRequestError, match="This model"):
                await client.responses.create(input="Hi", **refused)
        with pytest.raises(openai.BadRequestError, match="cannot count tokens"):
            await client.responses.input_tokens.count(input="Hi")


async def test_a_reader_that_leaves_ends_the_completion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path, [says(content="Hel"), "for ever"]) as (client, chat):
        stream = await client.responses.create(input="Hi", stream=True, store=False)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await wait_until(chat.is_left.is_set)


async def test_cancel_keeps_the_text_and_ends_the_completion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path, [says(content="Hel"), "for ever"]) as (client, chat):
        stream = await client.responses.create(input="Hi", stream=True, background=True)
        response_id = ""
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        response = await client.responses.cancel(response_id)
        await wait_until(chat.is_left.is_set)
    assert (response.status, response.output_text) == ("cancelled", "Hel")


async def test_endpoint_that_is_down_is_a_503(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with running(monkeypatch, tmp_path) as (client, _):
        monkeypatch.setattr(aiohttp.ClientSession, "post", unreachable)
        with pytest.raises(openai.APIStatusError, match=r"The endpoint cannot be reached\.") as raised:
            await client.responses.create(input="Hi")
    assert raised.value.status_code == 503


async def unreachable(*_: Any, **__: Any) -> None:
    raise aiohttp.ClientConnectionError("no route to host")


async def test_pipeline_of_a_backend_has_one_stage_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_URL", "http://127.0.0.1:1/v1")
    values: dict[str, Any] = {"model": "far", "engine": [ENGINE]}
    head, _, *stages = (await drawn(Settings(**values))).splitlines()
    assert head == f"far answers with texts, and runs on {ENGINE}."
    inner = ["recall", "read", "resolve"]
    assert [line.split()[0] for line in stages] == [
        *("normalize", *inner, "converse", "summarize", "parse", "emit", "persist")
    ]
    with pytest.raises(CannotStart, match="needs the stage render"):
        await drawn(Settings(**values, log_prompts=True))


async def test_a_backend_without_its_settings_does_not_start() -> None:
    with pytest.raises(CannotStart, match="set CHAT_URL"):
        async with open_engine(ENGINE, SimpleNamespace(model=None)):
            raise NotImplementedError
