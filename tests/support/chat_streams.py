"""The completion that OpenAI's own client makes of a stream of chat chunks."""

from __future__ import annotations

import json
from typing import Any

from openai._models import construct_type
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from penstock.api.dialects.named import spoken

(CHAT,) = (dialect for dialect in spoken() if dialect.name == "chat")


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a whole stream, which ends in order."""
    data = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line and not line.startswith(":")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def heard_by_openai(stream: bytes) -> dict[str, Any]:
    """The completion that openai-python accumulates, with nulls as a body has them."""
    state = ChatCompletionStreamState()
    ended_by: dict[int, Any] = {}
    for chunk in chunks_of(stream):
        ended_by |= {choice["index"]: choice["stop_reason"] for choice in chunk["choices"] if "stop_reason" in choice}
        read: Any = construct_type(type_=ChatCompletionChunk, value=chunk)  # as the client does
        state.handle_chunk(read)
    heard: dict[str, Any] = state.current_completion_snapshot.model_dump(exclude_unset=True)
    if heard.get("usage") is None:
        heard.pop("usage", None)
    for choice in heard["choices"]:
        message = choice["message"]
        if choice["index"] in ended_by:  # vLLM's, which the client leaves out
            choice["stop_reason"] = ended_by[choice["index"]]
        calls = message.pop("tool_calls", None) or []
        if calls:
            message["tool_calls"] = [_called(call) for call in calls]
        message["content"] = message["content"] or (None if calls or message["refusal"] else "")
        message["annotations"] = [_without(each, "index") for each in message["annotations"] or []]
        for name in ("audio", "function_call", "parsed"):
            message.pop(name, None)
    return heard


def _called(call: dict[str, Any]) -> dict[str, Any]:
    kind = call["type"]
    return {"id": call["id"], "type": kind, kind: _without(call[kind], "parsed_arguments")}


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != name}
