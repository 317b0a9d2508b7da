"""Faults of the Messages API, by the check that has to find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.support.api_clients import Json
from tests.support.faulty_server import (
    Fault,
    deep,
    in_body,
    in_bytes,
    in_events,
    lose,
    put,
    refused,
    typed,
    with_status,
)
from tests.unit.extensions.workbench.conformance.shared_faults import REFUSALS

TEXT: Json = {"type": "text", "text": "<tool_call>{}</tool_call>"}
CALL: Json = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}


def each(kind: str, change: Callable[[Json], object]) -> Fault:
    """Change each block of a type in answers."""

    def of(body: Json) -> None:
        for block in body.get("content", ()):
            if block["type"] == kind:
                change(block)

    return in_body(of)


def continues(body: Json) -> bool:
    return "previous_message_id" in body.get("thread", {})


def more(*blocks: Json) -> Fault:
    return in_body(lambda body: body.update(content=[*body.get("content", ()), *blocks]))


def without(kind: str) -> Fault:
    return in_body(lambda body: body.update(content=[block for block in body["content"] if block["type"] != kind]))


def dropped(kind: str) -> Fault:
    """Leave out the first event of a type."""

    def of(events: list[Json]) -> Iterable[Json]:
        at = next((at for at, event in enumerate(events) if event["type"] == kind), len(events))
        return [*events[:at], *events[at + 1 :]]

    return in_events(of)


def repeated(kind: str) -> Fault:
    return in_events(lambda events: [copy for event in events for copy in [event] * (1 + (event["type"] == kind))])


def in_deltas(kind: str, change: Callable[[Json], object]) -> Fault:
    def of(event: Json) -> None:
        if event["delta"]["type"] == kind:
            change(event["delta"])

    return typed("content_block_delta", of)


def in_starts(kind: str, change: Callable[[Json], object]) -> Fault:
    def of(event: Json) -> None:
        if event["content_block"]["type"] == kind:
            change(event["content_block"])

    return typed("content_block_start", of)


def has_history(body: Any) -> bool:
    return len(body["messages"]) > 1


PROMPT = deep("usage", value={"input_tokens": 5, "output_tokens": 3})
FAULTS: dict[str, list[Fault]] = {
    "messages.object": [
        in_body(put(type="thing")),
        in_body(put(id="")),
        in_body(put(role="user")),
        in_body(put(stop_reason="stop")),
        in_body(put(content="Hello!")),
        each("text", put(text="")),
        each("thinking", lose("signature")),
        with_status(500, when=200),
    ],
    "messages.nullable": [
        in_body(lose("stop_sequence")),
        typed("message_delta", lambda event: event["delta"].pop("stop_sequence")),
    ],
    "messages.ids": [in_body(put(id="msg_1"))],
    "messages.usage": [in_body(lose("usage")), in_body(deep("usage", "output_tokens", value=0))],
    "messages.system": [in_body(PROMPT), refused(lambda body: "system" in body), refused(has_history)],
    "messages.request_id": [lambda exchange: exchange.headers.clear()],
    "messages.count_tokens": [
        in_body(put(input_tokens="5"), path="/count_tokens"),
        in_body(put(input_tokens=5), path="/count_tokens"),
    ],
    "messages.max_tokens": [
        in_body(put(stop_reason="end_turn")),
        in_body(deep("usage", "output_tokens", value=9)),
    ],
    "messages.needs_max_tokens": REFUSALS,
    "messages.stop_sequences": [
        in_body(lambda body: body.update(stop_sequence=None) if body["stop_reason"] == "stop_sequence" else None),
        each("text", put(text="Hello!")),
        in_body(lambda body: body.update(stop_reason="end_turn") if body["stop_sequence"] else None),
    ],
    "messages.forced_call": [
        without("tool_use"),
        each("tool_use", put(name="get_time")),
        each("tool_use", put(input={})),
        each("tool_use", put(input='{"city":"Paris"}')),
    ],
    "messages.any_call": [
        without("tool_use"),
        each("tool_use", put(id="")),
        in_body(put(stop_reason="end_turn")),
    ],
    "messages.no_call": [more(CALL)],
    "messages.auto_call": [more(TEXT)],
    "messages.single_call": [more(CALL)],
    "messages.tool_addition": [without("tool_use"), each("tool_use", put(name="get_time"))],
    "messages.tool_removal": [without("tool_use"), each("tool_use", put(name="get_weather"))],
    "messages.call_result": [refused(has_history), in_body(PROMPT)],
    "messages.thinking": [
        in_body(lambda body: body["content"].reverse()),
        each("thinking", put(signature="")),
        refused(has_history),
    ],
    "messages.thread": [in_body(PROMPT), refused(continues, 404)],
    "messages.unknown_thread": [with_status(200, when=404), with_status(500, when=404)],
    # Streams
    "messages.sse": [
        in_bytes(lambda data: data.replace(b"event: message_start", b"event: start")),
        in_bytes(lambda data: data.replace(b"event: message_start\n", b"")),
        in_bytes(lambda data: data[:-1]),
        in_bytes(lambda data: data.replace(b"Hello", b"Hell\xc3")),
        in_bytes(lambda data: data + b"data: [DONE]\n\n"),
        typed("message_start", put(type="message_begin")),
    ],
    "messages.order": [
        dropped("message_start"),
        dropped("message_delta"),
        dropped("message_stop"),
        repeated("message_stop"),
        repeated("message_delta"),
    ],
    "messages.start": [
        typed("message_start", lambda event: event["message"].pop("role")),
        typed("message_start", deep("message", "content", value=None)),
        typed("message_start", deep("message", "stop_reason", value="end_turn")),
        typed("message_start", lambda event: event["message"].pop("usage")),
    ],
    "messages.blocks": [
        dropped("content_block_start"),
        dropped("content_block_stop"),
        repeated("content_block_stop"),
        typed("content_block_delta", put(index=7)),
    ],
    "messages.deltas": [
        in_starts("text", put(text="Hel")),
        in_deltas("text_delta", put(type="thinking_delta")),
        in_deltas("text_delta", lose("text")),
    ],
    "messages.end": [
        typed("message_delta", deep("delta", "stop_reason", value="stop")),
        typed("message_delta", deep("usage", "output_tokens", value=0)),
    ],
    "messages.same_text": [in_deltas("text_delta", put(text=""))],
    "messages.call_stream": [
        in_starts("tool_use", put(input={"city": "Paris"})),
        in_starts("tool_use", put(id="")),
        in_starts("tool_use", put(name="get_time")),
        in_deltas("input_json_delta", put(partial_json="{")),
        typed("message_delta", deep("delta", "stop_reason", value="end_turn")),
    ],
}
