"""However many items and tools a request has, none holds the event loop: what looks at each computes apart from it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.http_writer import StreamWriter

from penstock.pipeline.tasks import LARGE
from penstock.stages.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import Json
from tests.support.clock import counting_turns
from tests.support.server import Server, running_server, script

COUNT = 8_000

MOST_INSTRUCTIONS = 5 * COUNT
"""Bytecode instructions of a turn of the event loop: too few for a look at each of ``COUNT`` values."""

MESSAGES = [{"role": "user", "content": "Hi"}] * COUNT
REQUEST = {"role": "user", "content": "Hi"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Server[ScriptedEngine], None]:
    async with running_server(ScriptedEngine(script()), tmp_path, max_body_bytes=2**24) as served:
        await served.post({"input": "Hi"})
        yield served


async def longest_turn(served: Server[ScriptedEngine], path: str, body: Json | None) -> tuple[int, Any]:
    """Send a request; return the instructions of the longest turn of the loop, and the answer.

    A short one goes before it, as the first may import modules.
    """
    short = body and {name: value[-1:] if isinstance(value, list) else value for name, value in body.items()}
    method = "GET" if body is None else "POST"
    await served.ask(method, path, short)
    with counting_turns() as turns:
        status, answer = await served.ask(method, path, body)
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


@pytest.mark.parametrize(
    "body",
    [
        {"input": MESSAGES},
        {"input": MESSAGES, "context_management": [{"type": "compaction", "compact_threshold": 1_000_000}]},
        {"input": calls()},
        {"input": approvals()},
        {"input": "Hi", "tools": [{"type": "function", "name": f"f{n}", "parameters": {}} for n in range(COUNT)]},
    ],
    ids=["messages", "compactable", "calls", "approvals", "tools"],
)
async def test_large_request_never_holds_the_loop(served: Server[ScriptedEngine], body: Json) -> None:
    longest, _ = await longest_turn(served, "/v1/responses", {**body, "truncation": "auto"})
    assert longest < MOST_INSTRUCTIONS


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
    items = [{"role": "user", "content": "x" * 2 * LARGE}]
    async with served.client.post(f"{served.url}/v1/conversations", json={"items": items}) as answer:
        conversation = await answer.json()
    written.clear()
    async with served.client.get(f"{served.url}/v1/conversations/{conversation['id']}/items") as answer:
        body = await answer.read()
    assert answer.content_length == len(body)
    assert json.loads(body)["data"][0]["content"][0]["text"] == items[0]["content"]
    assert sum(written) == len(body)
    assert max(written) == LARGE
