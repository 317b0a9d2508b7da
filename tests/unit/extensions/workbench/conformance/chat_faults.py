"""Faults of the Chat Completions API, by the check that has to find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.api_clients import Json
from tests.support.faulty_server import Fault, deep, in_body, in_bytes, in_events, lose, put, refused, with_status

CALL: Json = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
}


def in_message(change: Callable[[Json], object]) -> Fault:
    """Change the message of each choice."""
    return in_body(lambda body: [change(choice["message"]) for choice in body.get("choices", ())] and None)


def in_choice(change: Callable[[Json], object]) -> Fault:
    return in_body(lambda body: [change(choice) for choice in body.get("choices", ())] and None)


def in_call(change: Callable[[Json], object]) -> Fault:
    return in_message(lambda message: [change(call) for call in message.get("tool_calls") or ()])


def twice(**fields: Any) -> Fault:
    def of(message: Json) -> None:
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [*calls, *[call | fields for call in calls]]

    return in_message(of)


def in_chunks(change: Callable[[Json], object], *, only: Callable[[Json], object] = bool) -> Fault:
    def of(events: list[Json]) -> None:
        for event in events:
            if only(event):
                change(event)

    return in_events(of)


def in_deltas(change: Callable[[Json], object]) -> Fault:
    return in_chunks(lambda chunk: [change(choice["delta"]) for choice in chunk["choices"]])


def in_pieces(change: Callable[[Json], object]) -> Fault:
    return in_deltas(lambda delta: [change(piece) for piece in delta.get("tool_calls") or ()])


def finished(chunk: Json) -> bool:
    return any(choice.get("finish_reason") for choice in chunk["choices"])


STORED = "/chat/completions/"
PROMPT = deep("usage", "prompt_tokens", value=5)
NO_JSON: list[Fault] = [in_message(put(content=text)) for text in ("It rains.", "[]", '{"city": "Paris"', None)]
FAULTS: dict[str, list[Fault]] = {
    "chat.object": [
        in_body(put(object="thing")),
        in_body(put(id="")),
        in_body(put(choices=[])),
        in_body(lose("created")),
        in_choice(put(index=1)),
        in_choice(put(finish_reason="done")),
        in_message(put(content=["Hello!"])),
        in_message(lose("role")),
        with_status(500, when=200),
    ],
    "chat.ids": [in_body(put(id="chatcmpl-1"))],
    "chat.usage": [in_body(lose("usage")), in_body(deep("usage", "total_tokens", value=1))],
    "chat.roles": [refused(lambda body: len(body["messages"]) > 1), in_body(PROMPT)],
    "chat.developer": [refused(lambda body: len(body["messages"]) > 1)],
    "chat.n": [in_choice(put(index=0)), in_body(lambda body: body["choices"].pop() and None)],
    "chat.logprobs": [
        in_choice(put(logprobs=None)),
        in_choice(deep("logprobs", "content", 0, "logprob", value=1.0)),
        in_choice(deep("logprobs", "content", 0, "top_logprobs", value=None)),
        in_choice(lambda choice: choice["logprobs"]["content"][0].pop("bytes")),
    ],
    "chat.max_completion_tokens": [
        in_choice(put(finish_reason="stop")),
        in_body(deep("usage", "completion_tokens", value=9)),
        in_body(lose("usage")),
    ],
    "chat.max_tokens": [
        in_body(deep("usage", "completion_tokens", value=9)),
        in_body(lose("usage")),
        refused(lambda body: "max_tokens" in body),
    ],
    "chat.stop": [
        in_message(put(content="Hello!")),
        in_body(lambda body: body["choices"][0].update(finish_reason="length") if _is_cut(body) else None),
    ],
    "chat.json_schema": [*NO_JSON, in_message(put(content='{"city": "Paris"}'))],
    "chat.json_object": NO_JSON,
    "chat.forced_call": [
        in_message(lose("tool_calls")),
        in_call(deep("function", "name", value="get_time")),
        in_call(deep("function", "arguments", value='"Paris"')),
        in_call(deep("function", "arguments", value={"city": "Paris"})),
    ],
    "chat.required_call": [
        in_message(lose("tool_calls")),
        in_call(deep("function", "arguments", value="{}")),
        in_call(put(id="")),
        in_choice(put(finish_reason="stop")),
    ],
    "chat.no_call": [in_message(put(tool_calls=[CALL])), in_choice(put(finish_reason="tool_calls"))],
    "chat.auto_call": [
        in_message(put(content="<tool_call>{}</tool_call>")),
        in_choice(put(finish_reason="stop")),
    ],
    "chat.parallel_calls": [twice()],
    "chat.single_call": [twice(id="call_2")],
    "chat.call_result": [refused(lambda body: len(body["messages"]) > 1), in_body(PROMPT)],
    "chat.reasoning": [
        in_message(put(content="Hm.</think>Hello!")),
        in_message(put(reasoning_content="<think>Hm.", reasoning="<think>Hm.")),
    ],
    # Stored completions
    "chat.retrieve": [
        in_body(put(id="chatcmpl-1"), path=STORED),
        in_body(put(created=1), path=STORED),
        in_body(put(object="thing"), path=STORED),
        in_body(deep("choices", 0, "message", "content", value="Ho!"), path=STORED),
    ],
    "chat.stored_messages": [
        in_body(lambda body: body["data"].reverse(), path="/messages"),
        in_body(lambda body: body["data"].pop() and None, path="/messages"),
        in_body(deep("data", 0, "content", value=""), path="/messages"),
    ],
    "chat.metadata": [
        in_body(put(metadata={}), path=STORED, method="POST"),
        in_body(put(data=[]), path="?metadata"),
        in_body(lambda body: body["data"].append({"id": "chatcmpl-1"}), path="?metadata"),
    ],
    "chat.delete": [
        in_body(put(deleted=False), path=STORED, method="DELETE"),
        with_status(200, path=STORED, method="GET"),
    ],
    "chat.not_stored": [with_status(200, path=STORED, method="GET")],
    # Streams
    "chat.sse": [
        in_bytes(lambda data: data.replace(b"data: [DONE]\n\n", b"")),
        in_bytes(lambda data: data + b"data: [DONE]\n\n"),
        in_bytes(lambda data: data[:-1]),
        in_bytes(lambda data: data.replace(b"Hello", b"Hell\xc3")),
        lambda exchange: setattr(exchange, "content_type", "text/plain"),
    ],
    "chat.chunks": [
        in_chunks(put(id="chatcmpl-2"), only=finished),
        in_chunks(put(created=1), only=finished),
        in_chunks(put(object="chat.completion")),
        in_chunks(lose("model")),
        in_deltas(put(content=5)),
    ],
    "chat.role_first": [in_deltas(lose("role")), in_events(lambda events: events[1:])],
    "chat.one_finish": [
        in_events(lambda events: [event for event in events if not finished(event)]),
        in_events(lambda events: [*events, events[-1]]),
        in_events(lambda events: [*events, events[1]]),
    ],
    "chat.same_content": [in_deltas(lose("content"))],
    "chat.include_usage": [
        in_events(lambda events: events[:-1]),
        in_chunks(deep("usage", "total_tokens", value=1), only=lambda chunk: chunk.get("usage")),
        in_chunks(put(choices=[{"index": 0, "delta": {}}]), only=lambda chunk: chunk.get("usage")),
        in_events(lambda events: [*events, events[-1]]),
    ],
    "chat.no_usage": [in_events(lambda events: [*events, events[-1] | {"choices": []}])],
    "chat.call_stream": [
        in_deltas(lose("tool_calls")),
        in_pieces(put(index=1)),
        in_pieces(lose("id")),
        in_pieces(put(type=None)),
        in_pieces(lambda piece: piece["function"].pop("arguments", None)),
        in_chunks(lambda chunk: chunk["choices"][0].update(finish_reason="stop"), only=finished),
    ],
    "chat.call_pieces": [in_pieces(lambda piece: piece["function"].pop("arguments", None))],
}


def _is_cut(body: Json) -> bool:
    return bool(body["choices"][0]["message"]["content"] != "Hello!")
