"""Responses for the store to keep."""

from __future__ import annotations

from typing import Any

from pipeline.protocol.items import Item, Message, OutputText
from pipeline.protocol.response import ReasoningOptions, Response
from stages.persist.store import StoredResponse


def response(response_id: str = "resp_1", **fields: Any) -> Response:
    """A completed response of one message."""
    message = Message(f"msg_{response_id}", "completed", "assistant", (OutputText("Hello!"),), "final_answer")
    defaults: dict[str, Any] = {
        "created_at": 1_800_000_000,
        "completed_at": 1_800_000_002,
        "status": "completed",
        "model": "tiny-gpt-oss",
        "previous_response_id": None,
        "instructions": None,
        "output": (message,),
        "tools": ({"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True},),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "top_p": 1.0,
        "temperature": 1.0,
        "reasoning": ReasoningOptions("medium", None),
        "max_output_tokens": None,
        "store": True,
        "metadata": {"order": "17"},
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
    return Response(id=response_id, **(defaults | fields))


def stored(response_id: str = "resp_1", *items: Item, **fields: Any) -> StoredResponse:
    """The same, with the input of its request."""
    return StoredResponse(response(response_id, **fields), items)
