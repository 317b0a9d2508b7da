"""However many items and tools a request has, none holds the event loop: what looks at each computes apart from it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.http_writer import StreamWriter

from penstock.api.http import errors
from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.params.request import LOGPROBS
from penstock.pipeline.protocol.pieces import in_pieces
from penstock.pipeline.tasks import LARGE_BYTES
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import FLUSH_EVENTS
from tests.support.api_clients import Json
from tests.support.clock import counting_turns
from tests.support.server import HELLO, Server, running_server, script
from tests.support.socket_client import connected

COUNT = 8_000

MOST_INSTRUCTIONS = 5 * COUNT
"""Bytecode instructions of a turn of the event loop: too few for a look at each of ``COUNT`` values."""

MOST_INSTRUCTIONS_OF_A_BLOCK = 500 * FLUSH_EVENTS
"""Bytecode instructions of a turn in which an event log encodes a block: a bounded number for each of its events.

How many events a block has depends on the speed of the machine, so a test has to allow the most.
"""

MESSAGES = [{"role": "user", "content": "Hi"}] * COUNT
REQUEST = {"role": "user", "content": "Hi"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Server[ScriptedEngine], None]:
    async with running_server(ScriptedEngine(script()), tmp_path, max_body_bytes=2**24) as served:
        await served.post({"input": "Hi"})
        yield served


async def answered(served: Server[ScriptedEngine], method: str, path: str, body: Json | None) -> tuple[int, Any]:
    if not (body and body.get("stream")):
        return await served.ask(method, path, body)
    async with served.client.post(served.url + path, json=body) as answer:
        return answer.status, await answer.read()


async def longest_turn(served: Server[ScriptedEngine], path: str, body: Json | None) -> tuple[int, Any]:
    """Send a request; return the instructions of the longest turn of the loop, and the answer.

    A short one goes before it, as the first may import modules.
    """
    short = body and {name: value[-1:] if isinstance(value, list) else value for name, value in body.items()}
    method = "GET" if body is None else "POST"
    await answered(served, method, path, short)
    with counting_turns() as turns:
        status, answer = await answered(served, method, path, body)
    assert status == 200, answer
    return turns.longest, answer


def calls() -> list[Json]:
    made = [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"} for n in range(COUNT // 2)]
    return [*made, *({"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in made)]


def approvals() -> list[Json]:
    asked = [
        {"type": "mcp_approval_request", "id": f"mcpr_{n}", "server_label": "s", "name": "f", "arguments": "{}"}
        for n in range(COUNT // 2)
    ]
    given = [{"type": "mcp_approval_response", "approval_request_id": each["id"], "approve": False} for each in asked]
    return [*asked, *given]


def function(number: int) -> Json:
    return {"name": f"f{number}", "parameters": {}}


def chat_calls() -> list[Json]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(COUNT // 2)
    ]
    results = ({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in made)
    return [REQUEST, {"role": "assistant", "tool_calls": made}, *results]


def message_calls() -> list[Json]:
    made = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {}} for n in range(COUNT // 2)]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in made]
    return [REQUEST, {"role": "assistant", "content": made}, {"role": "user", "content": results}]


RESPONSES, CHAT, MESSAGES_API, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/messages", "/v1/completions"
FUNCTIONS = [function(number) for number in range(COUNT)]
PARTS = [{"type": "text", "text": "Hi"}] * COUNT
PARTS_OF_RESPONSES = [{"type": "input_text", "text": "Hi"}] * COUNT
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(COUNT)}}
MESSAGE = {"model": "tiny", "max_tokens": 9}

DOORS: dict[str, tuple[str, Json]] = {
    "messages": (RESPONSES, {"input": MESSAGES}),
    "stream": (RESPONSES, {"input": MESSAGES, "stream": True}),
    "background": (RESPONSES, {"input": MESSAGES, "background": True}),
    "unstored": (RESPONSES, {"input": MESSAGES, "store": False}),
    "compactable": (
        RESPONSES,
        {"input": MESSAGES, "context_management": [{"type": "compaction", "compact_threshold": 1_000_000}]},
    ),
    "parts": (RESPONSES, {"input": [{"role": "user", "content": PARTS_OF_RESPONSES}]}),
    "calls": (RESPONSES, {"input": calls()}),
    "approvals": (RESPONSES, {"input": approvals()}),
    "tools": (RESPONSES, {"input": "Hi", "tools": [{"type": "function", **each} for each in FUNCTIONS]}),
    "schema": (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}),
    "unknown": (RESPONSES, {"input": "Hi", **{f"unknown{number}": 1 for number in range(COUNT)}}),
    "raw messages": (RESPONSES, {"input": "Hi", "previous_input_messages": MESSAGES}),
    "tokens of a request": ("/v1/responses/input_tokens", {"input": MESSAGES}),
    "chat": (CHAT, {"messages": MESSAGES}),
    "chat stream": (CHAT, {"messages": MESSAGES, "stream": True}),
    "chat parts": (CHAT, {"messages": [{"role": "user", "content": PARTS}]}),
    "chat calls": (CHAT, {"messages": chat_calls()}),
    "chat tools": (
        CHAT,
        {"messages": [REQUEST], "tools": [{"type": "function", "function": each} for each in FUNCTIONS]},
    ),
    "Messages": (MESSAGES_API, {**MESSAGE, "messages": MESSAGES}),
    "Messages stream": (MESSAGES_API, {**MESSAGE, "messages": MESSAGES, "stream": True}),
    "Messages parts": (MESSAGES_API, {**MESSAGE, "messages": [{"role": "user", "content": PARTS}]}),
    "Messages calls": (MESSAGES_API, {**MESSAGE, "messages": message_calls()}),
    "Messages system": (MESSAGES_API, {**MESSAGE, "messages": [REQUEST], "system": PARTS}),
    "Messages tools": (
        MESSAGES_API,
        {**MESSAGE, "messages": [REQUEST], "tools": [{"name": f"f{n}", "input_schema": {}} for n in range(COUNT)]},
    ),
    "tokens of Messages": ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    "completion": (COMPLETIONS, {"model": "tiny", "prompt": [5] * COUNT}),
    "echo": (COMPLETIONS, {"model": "tiny", "prompt": [5] * COUNT, "echo": True}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "Hi " * COUNT, "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"model": "tiny", "messages": MESSAGES}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": [5] * COUNT}),
}
"""Requests with many values, by name: paths and bodies."""


@pytest.mark.parametrize("name", DOORS)
async def test_large_request_never_holds_the_loop(served: Server[ScriptedEngine], name: str) -> None:
    path, body = DOORS[name]
    if path == RESPONSES:
        body = {**body, "truncation": "auto"}
    longest, _ = await longest_turn(served, path, body)
    assert longest < MOST_INSTRUCTIONS


async def test_many_parts_of_a_conversation_never_hold_the_loop(served: Server[ScriptedEngine]) -> None:
    body = {"items": [{"role": "user", "content": PARTS_OF_RESPONSES}]}
    longest, _ = await longest_turn(served, "/v1/conversations", body)
    assert longest < MOST_INSTRUCTIONS


REFUSED: dict[str, tuple[str, Json]] = {
    "items": (RESPONSES, {"input": [{}] * COUNT}),
    "unanswered calls": (RESPONSES, {"input": calls()[: COUNT // 2]}),
    "references": (RESPONSES, {"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(COUNT)]}),
    "metadata": (RESPONSES, {"input": "Hi", "metadata": {f"k{number}": "v" for number in range(COUNT)}}),
    "chat": (CHAT, {"messages": [*MESSAGES, {}]}),
    "Messages": (MESSAGES_API, {**MESSAGE, "messages": [*MESSAGES, {}]}),
    "stop sequences": (MESSAGES_API, {**MESSAGE, "messages": [REQUEST], "stop_sequences": ["a"] * COUNT}),
    "prompts": (COMPLETIONS, {"model": "tiny", "prompt": ["Hi"] * COUNT}),
    "conversation": ("/v1/conversations", {"items": MESSAGES}),
}
"""Requests with many values that are refused, by name."""


@pytest.mark.parametrize("name", REFUSED)
async def test_refusal_never_holds_the_loop(served: Server[ScriptedEngine], name: str) -> None:
    path, body = REFUSED[name]
    await served.ask("POST", path, {**body, "metadata": 5})
    with counting_turns() as turns:
        status, _ = await served.ask("POST", path, body)
    assert status == 400
    assert turns.longest < MOST_INSTRUCTIONS


async def test_large_event_over_a_socket_never_holds_the_loop(served: Server[ScriptedEngine]) -> None:
    async with connected(served) as client:
        await client.create(input="Hi")
        with counting_turns() as turns:
            await client.create(input=MESSAGES, truncation="auto")
            await client.create(input=[{"role": "user", "content": PARTS_OF_RESPONSES}])
    assert turns.longest < 3 * MOST_INSTRUCTIONS  # the first 500 items make the digest of the conversation


COUNT_ALOUD = "<|channel|>final<|message|>" + " ".join(map(str, range(500))) + "<|return|>"


async def test_answer_of_many_items_never_holds_the_loop(tmp_path: Path) -> None:
    said = "<|start|>assistant".join(["<|channel|>commentary<|message|>Hi<|end|>"] * 500)
    engine = ScriptedEngine(script(f"{said}<|start|>assistant{HELLO}", chunk_size=COUNT))
    async with running_server(engine, tmp_path) as served:
        longest, answer = await longest_turn(served, RESPONSES, {"input": "Hi"})
        stored = await longest_turn(served, f"{RESPONSES}/{answer['id']}", None)
    assert len(answer["output"]) == len(stored[1]["output"]) > 500
    assert max(longest, stored[0]) < MOST_INSTRUCTIONS_OF_A_BLOCK


@pytest.mark.parametrize("path", [RESPONSES, CHAT, COMPLETIONS])
async def test_answer_with_many_log_probabilities_never_holds_the_loop(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[Any]()

    def encode(body: Any) -> bytes:
        written.append(body)
        return msgspec.json.encode(body)

    monkeypatch.setattr(errors, "_encode", encode)
    top = tuple((token, -1.0) for token in range(1_000, 1_005))
    engine = ScriptedEngine(script(COUNT_ALOUD, logprobs=(TokenLogprob(-1.0, top),)))
    body = {
        RESPONSES: {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 5},
        CHAT: {"messages": [REQUEST], "logprobs": True, "top_logprobs": 5},
        COMPLETIONS: {"model": "tiny", "prompt": "Hi", "logprobs": 5, "max_tokens": COUNT},
    }[path]
    async with running_server(engine, tmp_path) as served:
        longest, _ = await longest_turn(served, path, body)
    assert longest < MOST_INSTRUCTIONS_OF_A_BLOCK
    assert in_pieces(written[-1]) is written[-1]  # nothing long was left to the event loop


@pytest.mark.parametrize("over", ["stream", "resume", "socket"])
async def test_events_with_many_log_probabilities_are_written_apart(
    tmp_path: Path, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, encode_into = list[Any](), msgspec.json.Encoder().encode_into

    def encode(event: Any, buffer: bytearray) -> None:
        written.append(event)
        encode_into(event, buffer)

    monkeypatch.setattr(events, "_encode_into", encode)
    engine = ScriptedEngine(script(COUNT_ALOUD, logprobs=(TokenLogprob(-1.0, ((1_000, -1.0),)),)))
    body: Json = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 1}
    async with running_server(engine, tmp_path) as served:
        if over == "stream":
            await served.stream(body)
        elif over == "resume":
            _, answer = await served.post(body)
            await served.replay(answer["id"])
        else:
            async with connected(served) as client:
                await client.send(**body)
                while (await client.frame())["type"] != "response.completed":
                    pass
    assert isinstance(written[-1], events.ResponseCompleted)
    assert all(in_pieces(event) is event for event in written)


async def test_many_references_never_hold_the_loop(served: Server[ScriptedEngine]) -> None:
    _, begun = await served.post({"input": MESSAGES, "truncation": "auto"})
    _, page = await served.get(f"/v1/responses/{begun['id']}/input_items?limit=1")
    first = page["data"][0]["id"].removesuffix(f"{COUNT - 1:04x}")
    named = [{"type": "item_reference", "id": f"{first}{number:04x}"} for number in range(COUNT)]
    longest, _ = await longest_turn(served, "/v1/responses", {"input": named, "truncation": "auto"})
    assert longest < MOST_INSTRUCTIONS


async def test_large_history_never_holds_the_loop(served: Server[ScriptedEngine]) -> None:
    _, begun = await served.post({"input": MESSAGES, "truncation": "auto"})
    continued = {"input": "Hi", "previous_response_id": begun["id"], "truncation": "auto"}
    longest = [
        (await longest_turn(served, "/v1/responses", continued))[0],
        (await longest_turn(served, f"/v1/responses/{begun['id']}/input_items", None))[0],
    ]
    assert max(longest) < MOST_INSTRUCTIONS


async def test_long_conversation_never_holds_the_loop(served: Server[ScriptedEngine]) -> None:
    path = await served.create_conversation(REQUEST)
    asked = {"conversation": path.rpartition("/")[2], "truncation": "auto"}
    await served.post({**asked, "input": MESSAGES})
    longest, _ = await longest_turn(served, "/v1/responses", {**asked, "input": "Hi"})
    assert longest < MOST_INSTRUCTIONS


async def test_superseded_items_never_hold_the_loop(served: Server[ScriptedEngine]) -> None:
    compact, body = "/v1/responses/compact", {"input": MESSAGES, "model": "tiny"}
    longest, compacted = await longest_turn(served, compact, body)
    again, _ = await longest_turn(served, "/v1/responses", {"input": [*MESSAGES, compacted["output"][-1]]})
    assert max(longest, again) < MOST_INSTRUCTIONS


async def test_large_answer_is_written_in_pieces(
    served: Server[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[int]()
    write = StreamWriter.write

    async def writing(writer: StreamWriter, chunk: Any, *more: Any, **named: Any) -> None:
        written.append(len(chunk))
        await write(writer, chunk, *more, **named)

    monkeypatch.setattr(StreamWriter, "write", writing)
    items = [{"role": "user", "content": "x" * 2 * LARGE_BYTES}]
    async with served.client.post(f"{served.url}/v1/conversations", json={"items": items}) as answer:
        conversation = await answer.json()
    written.clear()
    async with served.client.get(f"{served.url}/v1/conversations/{conversation['id']}/items") as answer:
        body = await answer.read()
    assert answer.content_length == len(body)
    assert json.loads(body)["data"][0]["content"][0]["text"] == items[0]["content"]
    assert sum(written) == len(body)
    assert max(written) == LARGE_BYTES
