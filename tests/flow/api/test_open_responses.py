from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.errors import EngineFailed
from tests.support.event_streams import final, read_sse
from tests.support.openapi import in_responses_names
from tests.support.server import CALL, HELLO, ScriptedServer, script

BASE = "/openresponses/v1"
BARE = {"type": "function", "name": "get_weather"}
SPELLED_OUT = BARE | {"description": None, "parameters": None, "strict": None}


async def test_raw_reasoning_events_are_renamed(served: ScriptedServer) -> None:
    body = await served.stream({"input": "Hi"}, f"{BASE}/responses")
    assert body.count(b"event: response.reasoning.delta\n") == body.count(b'"type":"response.reasoning.delta"') > 0
    assert final(read_sse(in_responses_names(body))).status == "completed"


async def test_responses_are_stored_once_for_both_base_urls(served: ScriptedServer) -> None:
    _, theirs = await served.post({"input": "Hi", "tools": [BARE]}, f"{BASE}/responses")
    _, ours = await served.get(f"/v1/responses/{theirs['id']}")
    assert theirs["tools"] == [SPELLED_OUT]
    assert ours | {"tools": theirs["tools"]} == theirs
    assert await served.get(f"{BASE}/responses/{theirs['id']}") == (200, theirs)
    query = f"responses/{theirs['id']}?stream=true&include_obfuscation=true"
    again, plain = await served.again(f"{BASE}/{query}"), await served.again(f"/v1/{query}")
    assert again.count(b'"obfuscation":') == plain.count(b'"obfuscation":') > 1
    assert [event.sequence_number for event in read_sse(in_responses_names(again))] == list(range(len(read_sse(plain))))


@pytest.mark.parametrize("text", [HELLO, CALL])
async def test_failing_stream_keeps_its_names(served: ScriptedServer, text: str) -> None:
    cut = text.partition("A greeting" if text == HELLO else "Look")[0]
    served.engine.script = script(cut + "Hm", error=EngineFailed("It failed."))
    response = final(
        read_sse(in_responses_names(await served.stream({"input": "Hi", "tools": [BARE]}, f"{BASE}/responses")))
    )
    assert response.status == "failed"
    assert response.tools == (SPELLED_OUT,)


async def test_every_route_exists_under_this_base_url(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"}, f"{BASE}/responses")
    path = f"{BASE}/responses/{answer['id']}"
    expected: list[tuple[str, str, Any, int]] = [
        ("GET", f"{path}/input_items", None, 200),
        ("POST", f"{BASE}/responses/input_tokens", {"input": "Hi"}, 200),
        ("POST", f"{path}/cancel", None, 400),
        ("DELETE", path, None, 200),
        ("GET", path, None, 404),
        ("GET", f"{BASE}/models", None, 200),
        ("GET", f"{BASE}/models/tiny", None, 200),
        ("POST", f"{BASE}/responses", {"input": 7}, 400),
    ]
    for method, route, body, status in expected:
        answered, answer = await served.ask(method, route, body)
        assert answered == status, (method, route, json.dumps(answer))
