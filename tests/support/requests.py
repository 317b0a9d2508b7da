"""Request bodies built around one value, and the results of reading and normalizing them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest, TokenIds
from penstock.pipeline.protocol.items import InputText, Message, OutputItem, OutputText
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.response import ResponseStatus
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store, StoredResponse
from penstock.services.tools import FULL_ACCESS, ToolAccess
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall, always
from penstock.stages.normalize.tool_types import MISSING, leavable_tools
from tests.support.clock import count_instructions
from tests.support.toolboxes import toolbox_of

MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "input_text", "text": "x"}
RESULT = {"type": "function_call_output", "call_id": "c"}

MANY = 5_000
"""Elements enough for several pieces of a body that is validated piece by piece."""


def read_body(body: Json) -> CreateResponse:
    return read_request(json.dumps(body).encode())


def output_of(sent: Json) -> list[Json]:
    """The output that a call of the client's needs after it; empty for all other items."""
    outputs: dict[str, Json] = {
        "function_call": {"output": "x"},
        "custom_tool_call": {"output": "x"},
        "local_shell_call": {"type": "function_call_output", "output": "x"},
        "shell_call": {"output": []},
        "apply_patch_call": {"status": "completed"},
    }
    more = outputs.get(sent.get("type", ""))
    return [] if more is None else [{"type": f"{sent['type']}_output", "call_id": sent["call_id"]} | more]


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        RESPONSES.read(body)
    return caught.value


def refusal(body: bytes) -> tuple[str, str | None]:
    error = refused(body)
    return error.message, error.param


def item(**fields: Json) -> Json:
    return {"input": [fields]}


def part(**fields: Json) -> Json:
    return item(role="user", content=[fields])


def call(**fields: Json) -> Json:
    return item(**{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"} | fields)


def call_output(**fields: Json) -> Json:
    return item(**{"type": "function_call_output", "call_id": "c", "output": "x"} | fields)


def function(**fields: Json) -> Json:
    return {"tools": [{"type": "function", "name": "f"} | fields]}


def custom(**fields: Json) -> Json:
    return {"tools": [{"type": "custom", "name": "f"} | fields]}


def namespace(*tools: Json, **fields: Json) -> Json:
    return {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": list(tools)} | fields]}


def server(**fields: Json) -> Json:
    return {"tools": [{"type": "mcp", "server_label": "m", "server_url": "https://mcp.example"} | fields]}


def output_format(**fields: Json) -> Json:
    return {"text": {"format": fields}}


def choice(**fields: Json) -> Json:
    return {"tool_choice": fields}


def input_tools(*tools: Json) -> Json:
    return item(type="additional_tools", role="developer", tools=list(tools))


def raw_input(**fields: Json) -> Json:
    return {"previous_input_messages": [fields]}


Json: TypeAlias = Any
MODEL = "gpt-oss-20b"
NOW = 1_790_000_000.9
ALL_HOSTED: frozenset[str] = frozenset({"python", "browser", "container"})
ALL_LEFT_OUT = frozenset(leavable_tools()) - {MISSING}
"""All tools that an operator can leave out, as for Codex, which sends some by default."""


async def normalize(
    store: Store,
    suffix: str = "1",
    /,
    *,
    owner: str = "",
    hosted: frozenset[str] = frozenset(),
    labels: frozenset[str] = frozenset(),
    sees: bool = False,
    access: ToolAccess = FULL_ACCESS,
    left_out: frozenset[str] = frozenset(),
    **body: Any,
) -> ResolvedRequest:
    """Normalize one body; its response gets the id ``resp_<suffix>``."""
    toolbox = toolbox_of(hosted, labels, access=access, left_out=left_out)
    traits = ModelTraits(sees_images=sees)
    recall = Recall(store=store, models=(MODEL,), traits_of=always(traits), draw=lambda: suffix, clock=lambda: NOW)
    request = read_request(json.dumps(body).encode(), Envelope(owner))
    async with aclosing(normalizing(recall, toolbox)(source_of([request]))) as conversations:
        (conversation,) = [conversation async for conversation in conversations]
    return conversation


def normalize_cost(**body: Any) -> int:
    """Count the instructions that it takes to make one body a conversation."""
    return count_instructions(lambda: asyncio.run(normalize(Store(NullDatabase()), **body)))


async def store_answer(
    store: Store,
    suffix: str,
    /,
    *output: OutputItem,
    status: ResponseStatus = "completed",
    tokens: Mapping[str, TokenIds] | None = None,
    results: Mapping[str, str] | None = None,
    **body: Any,
) -> ResolvedRequest:
    """Normalize one body, and store its response with ``output`` as the answer of the model."""
    conversation = await normalize(store, suffix, **body)
    began, origin = conversation.facts.response, conversation.facts.origin
    if began.conversation:
        await store.conversations.lock(began.conversation.id, origin.owner, began.id, origin.position)
    ended = replace(began, status=status, output=output)
    if began.store:
        store.begin(StoredResponse(ended, conversation.facts.input, origin))
    if status not in ("queued", "in_progress"):
        await store.end(StoredResponse(ended, conversation.facts.input, origin, tokens or {}, results or {}), None)
    return conversation


def user_message(item_id: str, text: str) -> Message:
    return Message(item_id, "completed", "user", (InputText(text),))


def answer(text: str) -> Message:
    return Message(f"msg_{text}", "completed", "assistant", (OutputText(text),), "final_answer")


def additional_tools(*tools: Json) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


USER = {"role": "user", "content": "Hi"}


def allowed_tools(*tools: Json, mode: str = "auto") -> Json:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def last_choice(choice: Json) -> str:
    """The place of the last tool that a choice names."""
    return f"tool_choice.tools[{len(choice['tools']) - 1}]" if choice.get("tools") else "tool_choice"
