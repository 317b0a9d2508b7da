"""Chats and messages that no server can continue: one sentence says what is wrong, and where."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import JSON
from tests.support.messages import PATH as MESSAGES
from tests.support.server import HELLO, ScriptedServer, running_server, script

Body = dict[str, Any]

CHAT = "/v1/chat/completions"
USER: Body = {"role": "user", "content": "Hi"}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path) as served:
        yield served


async def refused(served: ScriptedServer, path: str, body: bytes, status: int = 400) -> tuple[str, str | None]:
    """The message of the refusal, in the envelope of its dialect, and the place that it is about."""
    async with served.client.post(served.url + path, data=body, headers=JSON) as answer:
        content = await answer.json()
    assert answer.status == status, content
    if path == CHAT:
        assert content.keys() == {"error"}
        assert content["error"].keys() == {"message", "type", "param", "code"}
        assert content["error"]["type"] == "invalid_request_error"
        return content["error"]["message"], content["error"]["param"]
    error = content["error"]
    assert (content.keys(), error.keys()) == ({"type", "error", "request_id"}, {"type", "message"})
    kind = "request_too_large" if status == 413 else "invalid_request_error"
    assert (content["type"], error["type"]) == ("error", kind)
    message, _, place = error["message"].rpartition(" (at ")
    return (message, place.removesuffix(")")) if message else (error["message"], None)


# Chat Completions

CALL: Body = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED: Body = {"role": "assistant", "tool_calls": [CALL]}
OUTPUT: Body = {"role": "tool", "tool_call_id": "c1", "content": "5"}
FUNCTION: Body = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def choice_of(name: str) -> Body:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "message", "place"),
    [
        ({"messages": []}, "A chat needs a message.", "messages"),
        ({"messages": [OUTPUT]}, "No function call with call_id 'c1' comes before", "messages[0].tool_call_id"),
        ({"messages": [OUTPUT, CALLED]}, "No function call with call_id 'c1' comes before", "messages[0].tool_call_id"),
        ({"messages": [USER, CALLED, OUTPUT, OUTPUT]}, "has an output already", "messages[3].tool_call_id"),
        ({"messages": [USER, CALLED, USER]}, "No tool output found for function call c1", "messages"),
        (
            {"messages": [USER, {**CALLED, "tool_calls": [CALL, CALL]}, OUTPUT]},
            "Another call has this id",
            "messages[1].tool_calls[1].id",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "This needs a part", "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "This message is empty", "messages[0].content"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}],
                    }
                ]
            },
            "This model reads text only",
            "messages[0].content[0]",
        ),
        ({"tools": [FUNCTION, FUNCTION]}, "There are two tools named 'f'", "tools[1].function.name"),
        ({"tools": [FUNCTION], "tool_choice": choice_of("g")}, "There is no function tool named 'g'", "tool_choice"),
        ({"tool_choice": choice_of("f")}, "There is no function tool named 'f'", "tool_choice"),
        ({"tool_choice": "required"}, "There is no tool that this choice lets the model call", "tool_choice"),
        ({"stop": list("abcde")}, "at most 4", "stop"),
        ({"n": 10**30}, "less than or equal to 128", "n"),
        ({"logit_bias": {"x": 1}}, "should match pattern", "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "less than or equal to 100", "logit_bias.5"),
    ],
)
async def test_chat_is_refused(served: ScriptedServer, fields: Body, message: str, place: str) -> None:
    body = {"model": "tiny", "messages": [USER], **fields}
    found, param = await refused(served, CHAT, json.dumps(body).encode())
    assert (param, message in found) == (place, True), found


# Messages

USE: Body = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
RESULT: Body = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
ASKED: Body = {"role": "assistant", "content": [USE]}
TOOL: Body = {"name": "f", "input_schema": {"type": "object"}}
PICTURE: Body = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}

UNEXPECTED = "unexpected `tool_use_id` found in `tool_result` blocks: c1"
UNANSWERED = "`tool_use` ids were found without `tool_result` blocks immediately after: c1"


def by_user(*blocks: Body) -> Body:
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize(
    ("fields", "message", "place"),
    [
        ({"messages": []}, "messages: at least one message is required", None),
        ({"messages": [by_user()]}, "user messages must have non-empty content", "messages[0].content"),
        ({"messages": [USER | {"content": ""}]}, "user messages must have non-empty content", "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: at least one message needs content", None),
        ({"messages": [by_user(RESULT)]}, UNEXPECTED, "messages[0].content[0].tool_use_id"),
        ({"messages": [by_user(RESULT), ASKED]}, UNEXPECTED, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, ASKED, by_user(RESULT, RESULT)]}, UNEXPECTED, "messages[2].content[1].tool_use_id"),
        ({"messages": [USER, ASKED, USER]}, UNANSWERED, "messages[1]"),
        ({"messages": [USER, ASKED]}, UNANSWERED, "messages[1]"),
        (
            {"messages": [USER, {**ASKED, "content": [USE, USE]}, by_user(RESULT)]},
            "`tool_use` ids must be unique",
            "messages[1].content[1].id",
        ),
        ({"messages": [by_user(USE)]}, "Input should be one of 'text', 'image'", "messages[0].content[0].type"),
        ({"messages": [by_user(PICTURE)]}, "This model reads text only", "messages[0].content[0]"),
        ({"tools": [TOOL, TOOL]}, "There are two tools named 'f'", "tools[1].name"),
        ({"tools": [{"input_schema": {}}]}, "Field required", "tools[0].name"),
        ({"tools": [TOOL | {"name": "a\nb"}]}, "should match pattern", "tools[0].name"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
            "should be 'object'",
            "tools[0].input_schema.type",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "There is no function tool", "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "There is no tool that this choice lets the model call", "tool_choice"),
        ({"stop_sequences": [""]}, "at least 1 character", "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 65}, "at most 64", "stop_sequences"),
        ({"max_tokens": -1}, "greater than or equal to", "max_tokens"),
        ({"model": None}, "should be a valid string", "model"),
    ],
)
async def test_message_is_refused(served: ScriptedServer, fields: Body, message: str, place: str | None) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 100, "messages": [USER], **fields}).encode()
    found, param = await refused(served, MESSAGES, body)
    assert (param, message in found) == (place, True), found
    if fields.keys() <= {"messages", "tools"}:
        assert await refused(served, f"{MESSAGES}/count_tokens", body) == (found, param)


# Both

HALF = b'{"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": '
NESTED = b"[" * 5000


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"Hi"', 400),
        (HALF, 400),
        (HALF + b'"\xff"}]}', 400),
        (HALF + b'"Hi"}], "temperature": NaN}', 400),
        (HALF + b'"Hi"}], "top_p": 1e999}', 400),
        (HALF + b'"Hi"}], "metadata": ' + NESTED, 400),
        (NESTED + b"]" * len(NESTED), 400),
        (b" " * 200_000, 413),
    ],
)
async def test_body_that_is_no_object_is_refused(served: ScriptedServer, path: str, body: bytes, status: int) -> None:
    message, _ = await refused(served, path, body, status)
    assert "\n" not in message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_half_a_surrogate_is_read(served: ScriptedServer, path: str) -> None:
    """JavaScript cuts texts in the middle of characters."""
    status, answer = await served.post(
        {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi \ud83d"}]}, path
    )
    assert status == 200, answer
    assert "Hi \ufffd" in served.prompt_text()
