"""SDKs hear through the recording proxy what they hear without it, and every answer is recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.pipeline.recordings.wire import WireBody, WireEvent
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.messages import anthropic_client
from tests.support.server import ScriptedServer, running_server, script
from tests.support.wiretaps import only_folder, recorded_server, wire_recordings

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def recorded(where: Path, **options: Any) -> AsyncGenerator[tuple[ScriptedServer, str], None]:
    """A scripted server, and the URL of the proxy that records it."""
    async with (
        running_server(ScriptedEngine(script(**options)), where) as served,
        recorded_server(served.url, where / "recordings") as url,
    ):
        yield served, url


async def test_openai_python_and_anthropic_python_hear_the_server(tmp_path: Path) -> None:
    async with recorded(tmp_path) as (_, url), openai_client(url) as client, anthropic_client(url) as claude:
        response = await client.responses.create(model="tiny", input="Hi")
        assert response.output_text == "Hello!"
        async with client.responses.stream(model="tiny", input="Hi") as responses:
            events = [event.type async for event in responses]
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as chat:
            completion = await chat.get_final_completion()
        assert completion.choices[0].message.content == "Hello!"
        completed = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        assert [chunk async for chunk in completed]
        async with claude.messages.stream(model="tiny", max_tokens=50, messages=MESSAGES) as messages:
            message = await messages.get_final_message()
        assert message.content[-1].to_dict()["text"] == "Hello!"
        counted = await claude.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert counted.input_tokens > 0
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_none")
    found = wire_recordings(tmp_path / "recordings")
    by_dialect = {str(each.header.dialect): each for each in found if not isinstance(each.frames[-1], WireBody)}
    assert sorted(str(each.header.dialect) for each in found) == sorted([*by_dialect, "responses"])
    assert sorted(by_dialect) == ["chat", "completions", "messages", "responses"]
    *recorded_events, done = by_dialect["responses"].frames[1:]
    assert done == WireEvent(text="[DONE]")
    assert [frame.event for frame in recorded_events] == [frame.data["type"] for frame in recorded_events]
    assert set(events) >= {frame.event for frame in recorded_events}
    assert by_dialect["chat"].frames[-1] == WireEvent(text="[DONE]")
    assert by_dialect["messages"].frames[-1].event == "message_stop"


async def test_request_is_recorded_in_its_dialect(tmp_path: Path) -> None:
    async with recorded(tmp_path) as (_, url), openai_client(url) as client:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, user="me")
    kept = json.loads((only_folder(tmp_path / "recordings") / "request.json").read_bytes())
    assert kept == {"model": "tiny", "messages": MESSAGES, "temperature": 0, "user": "me"}


async def test_leaving_client_ends_the_generation(tmp_path: Path) -> None:
    async with recorded(tmp_path, endless=True) as (served, url), openai_client(url) as client:
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        async for event in stream:
            if event.type == "response.reasoning_text.delta":
                break
        assert served.engine.running == 1
        await stream.close()
        await served.wait_until_idle()
    (recording,) = wire_recordings(tmp_path / "recordings")
    assert recording.end.abandoned
