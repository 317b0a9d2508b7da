"""Conversations on a server, in the tests of the edge."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.scripts import WEATHER, Scripted

Json = dict[str, Any]

CONVERSATIONS = "/v1/conversations"
HI = {"role": "user", "content": "Hi"}
ITEMS: list[Json] = [
    HI,
    {"role": "assistant", "id": "msg_mine", "phase": "commentary", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "additional_tools", "role": "developer", "tools": [WEATHER]},
]
"""One of every kind."""


async def created(served: Scripted, *items: Json) -> str:
    """The path of a new conversation."""
    status, conversation = await served.post({"items": items}, CONVERSATIONS)
    assert status == 200
    return f"{CONVERSATIONS}/{conversation['id']}"


def name_of(path: str) -> str:
    return path.rpartition("/")[2]


async def items_of(served: Scripted, path: str) -> list[Json]:
    """All items of a conversation, oldest first."""
    status, page = await served.get(f"{path}/items?order=asc&limit=100")
    assert (status, page["has_more"]) == (200, False)
    data: list[Json] = page["data"]
    return data


async def ended(served: Scripted, response_id: str) -> Json:
    """The response once it is over."""
    async with asyncio.timeout(120):
        while True:
            status, response = await served.get(f"/v1/responses/{response_id}")
            assert status == 200
            if response["status"] not in ("queued", "in_progress"):
                found: Json = response
                return found
            await asyncio.sleep(0.02)
