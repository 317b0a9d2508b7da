"""Request bodies, built around one value, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias

import pytest

from pipeline.errors import InvalidRequest
from pipeline.protocol.reading import read_request
from pipeline.protocol.request import CreateResponse

Json: TypeAlias = Any

MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "input_text", "text": "x"}
RESULT = {"type": "function_call_output", "call_id": "c"}
MANY = 5_000
"""Enough elements for several pieces of any kind."""


def read(body: Json) -> CreateResponse:
    return asyncio.run(read_request(json.dumps(body).encode()))


def refused(body: bytes) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(read_request(body))
    return caught.value.message, caught.value.param


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


def more_tools(*tools: Json) -> Json:
    return item(type="additional_tools", role="developer", tools=list(tools))


def raw(**fields: Json) -> Json:
    return {"previous_input_messages": [fields]}
