"""Faults of the Responses API, by the check that has to find them."""

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
    on,
    put,
    refused,
    typed,
    with_status,
)

MESSAGE: Json = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
MARKED: Json = MESSAGE | {"content": [{"type": "output_text", "text": "<tool_call>{}</tool_call>", "annotations": []}]}
CALL: Json = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "get_weather",
    "arguments": '{"city":"Paris"}',
    "status": "completed",
}


def each(kind: str, change: Callable[[Json], object]) -> Fault:
    """Change each item of a type in answers."""

    def of(body: Json) -> None:
        for item in body.get("output", ()):
            if item["type"] == kind:
                change(item)

    return in_body(of)


def without(kind: str) -> Fault:
    return in_body(lambda body: body.update(output=[item for item in body["output"] if item["type"] != kind]))


def more(*items: Json) -> Fault:
    return in_body(lambda body: body.update(output=[*body.get("output", ()), *items]))


def said(text: str) -> Fault:
    return each("message", deep("content", 0, "text", value=text))


def twice(kind: str, **fields: Any) -> Fault:
    """Repeat each item of a type."""

    def of(body: Json) -> None:
        again = [item | fields for item in body.get("output", ()) if item["type"] == kind]
        body["output"] = [*body.get("output", ()), *again]

    return in_body(of)


def dropped(kind: str, count: int = 1) -> Fault:
    """Leave out the first events of a type."""

    def of(events: list[Json]) -> Iterable[Json]:
        left = count
        for event in events:
            if event["type"] == kind and left:
                left -= 1
            else:
                yield event

    return in_events(of)


def repeated(kind: str) -> Fault:
    return in_events(lambda events: [copy for event in events for copy in [event] * (1 + (event["type"] == kind))])


REFUSED_TEXT: list[Fault] = [said("It rains."), said("[]"), said('{"city": "Paris"')]
END, ADDED, DONE = "response.completed", "response.output_item.added", "response.output_item.done"
DELTA = "response.output_text.delta"

FAULTS: dict[str, list[Fault]] = {
    # Objects
    "responses.object": [
        in_body(put(object="thing")),
        in_body(put(id="")),
        in_body(put(created_at="now")),
        in_body(put(status="done")),
        in_body(put(output=None)),
        in_body(lose("tools")),
        with_status(500, when=200),
        with_status(404, when=200),
    ],
    "responses.nullable": [in_body(lose(name)) for name in ("error", "incomplete_details", "metadata", "top_p")],
    "responses.items": [
        each("message", lose("role")),
        each("message", put(content="Hello!")),
        each("message", deep("content", 0, "annotations", value=None)),
        each("reasoning", lose("summary")),
    ],
    "responses.ids": [in_body(put(id="resp_1")), each("message", put(id="msg_1"))],
    "responses.usage": [
        in_body(lose("usage")),
        in_body(deep("usage", "total_tokens", value=1)),
        in_body(deep("usage", "output_tokens_details", value=None)),
        in_body(deep("usage", "output_tokens_details", "reasoning_tokens", value=9999)),
    ],
    "responses.echo": [in_body(put(metadata={})), in_body(put(temperature=1.0)), in_body(put(instructions=None))],
    "responses.input": [refused(lambda body: isinstance(body["input"], list)), in_body(lambda _: {"object": "x"})],
    "responses.history": [
        refused(lambda body: isinstance(body["input"], list)),
        in_body(deep("usage", "input_tokens", value=5)),
    ],
    "responses.max_output_tokens": [
        in_body(put(status="completed")),
        in_body(put(incomplete_details={"reason": "length"})),
        in_body(deep("usage", "output_tokens", value=17)),
    ],
    "responses.json_schema": [*REFUSED_TEXT, said('{"city": "Paris"}'), said('{"city": 1, "warm": true}')],
    "responses.json_object": REFUSED_TEXT,
    "responses.reasoning": [
        in_body(lambda body: body["output"].reverse()),
        in_body(deep("usage", "output_tokens_details", "reasoning_tokens", value=0)),
    ],
    "responses.encrypted_reasoning": [
        each("reasoning", lose("encrypted_content")),
        refused(lambda body: isinstance(body["input"], list)),
    ],
    # Streams
    "responses.sse": [
        in_bytes(lambda data: data.replace(b"event: response.created", b"event: created")),
        in_bytes(lambda data: data.replace(b"event: response.created\n", b"")),
        in_bytes(lambda data: data.replace(b"Hello", b"Hell\xc3")),
        in_bytes(lambda data: data.replace(b"Hello", b"Hell\0")),
        in_bytes(lambda data: data[:-9]),
        in_bytes(lambda data: data.replace(b'"type"', b"type")),
        lambda exchange: setattr(exchange, "content_type", "application/json"),
    ],
    "responses.one_end": [
        dropped(END),
        repeated(END),
        in_events(lambda events: [*events, events[3]]),
        typed(END, deep("response", "status", value="incomplete")),
    ],
    "responses.beginning": [dropped("response.created"), repeated("response.created")],
    "responses.sequence": [
        typed(DELTA, put(sequence_number=3)),
        typed(DELTA, lose("sequence_number")),
        typed(DELTA, put(sequence_number="7")),
    ],
    "responses.event_types": [
        typed("response.content_part.added", put(type="response.reasoning_part.added")),
        typed(DELTA, lose("content_index")),
        typed(DELTA, lose("item_id")),
        typed(END, lose("response")),
    ],
    "responses.indexes": [
        typed(ADDED, put(output_index=1)),
        typed(DELTA, put(output_index=7)),
        typed(DELTA, put(item_id="msg_other")),
        typed(DONE, deep("item", "id", value="msg_other")),
    ],
    "responses.items_end": [
        dropped(DONE),
        repeated(DONE),
        dropped(ADDED),
        dropped("response.content_part.done"),
        dropped("response.content_part.added"),
    ],
    "responses.deltas": [
        typed(DELTA, put(delta="X")),
        dropped(DELTA),
        dropped("response.output_text.done"),
        repeated("response.output_text.done"),
    ],
    "responses.final_output": [
        typed(END, deep("response", "output", value=[])),
        typed(END, deep("response", "output", 0, "id", value="other")),
        typed(DONE, deep("item", "status", value="in_progress")),
        dropped(DONE),
    ],
    "responses.stream_usage": [typed(END, deep("response", "usage", value=None))],
    "responses.stream_rules": [
        dropped("response.output_text.done"),
        repeated(END),
        typed(DELTA, put(output_index=7)),
        typed(ADDED, deep("item", "status", value="completed")),
    ],
    # Lifecycle
    "responses.retrieve": [
        in_body(put(id="resp_x"), method="GET"),
        in_body(put(output=[]), method="GET"),
        in_body(lose("usage"), method="GET"),
    ],
    "responses.unknown_id": [with_status(500), with_status(200), in_body(lambda _: {"detail": "No."}, refusals=True)],
    "responses.delete": [
        in_body(put(deleted=False), method="DELETE"),
        in_body(put(id="resp_x"), method="DELETE"),
        with_status(200, when=404),
    ],
    "responses.input_items": [
        in_body(put(data=[]), path="/input_items"),
        in_body(put(object="page"), path="/input_items"),
        in_body(lose("has_more"), path="/input_items"),
    ],
    "responses.previous": [
        in_body(put(previous_response_id=None)),
        in_body(deep("usage", "input_tokens", value=5)),
        refused(lambda body: body.get("previous_response_id")),
    ],
    "responses.unknown_previous": [with_status(200), with_status(500)],
    "responses.not_stored": [in_body(put(store=True)), with_status(200, when=404)],
    "responses.conversation": [
        in_body(put(object="thing"), path="/conversations"),
        in_body(put(conversation=None)),
        in_body(put(data=[]), path="/items"),
        in_body(deep("usage", "input_tokens", value=5)),
    ],
    "responses.background": [
        in_body(put(status="completed"), method="POST"),
        in_body(put(status="failed"), method="GET"),
    ],
    "responses.resume": [
        on("starting_after", in_events(lambda events: events[1:])),
        on("starting_after", in_events(lambda events: [events[0], *events])),
        on("starting_after", typed(DELTA, put(delta="X"))),
    ],
    "responses.cut_stream": [
        in_body(put(status="failed"), method="GET"),
        on("?stream=true", dropped(END)),
    ],
    "responses.cancel": [
        in_body(put(id="resp_x"), path="/cancel"),
        in_body(put(status="completed"), path="/cancel"),
        in_body(put(status="failed"), method="GET"),
    ],
    "responses.cancel_foreground": [with_status(200), with_status(500)],
    # Tools
    "responses.forced_call": [
        without("function_call"),
        each("function_call", put(name="get_time")),
        each("function_call", put(arguments='"Paris"')),
        each("function_call", put(arguments='{"city":')),
        refused(lambda body: isinstance(body.get("tool_choice"), dict)),
    ],
    "responses.required_call": [without("function_call"), each("function_call", put(arguments="{}"))],
    "responses.call_item": [
        each("function_call", lose("call_id")),
        each("function_call", put(status="incomplete")),
        each("function_call", put(arguments={"city": "Paris"})),
        twice("function_call"),
    ],
    "responses.no_call": [more(CALL)],
    "responses.auto_call": [more(MARKED)],
    "responses.parallel_calls": [twice("function_call")],
    "responses.single_call": [twice("function_call", call_id="call_2")],
    "responses.call_stream": [
        dropped("response.function_call_arguments.delta"),
        dropped("response.function_call_arguments.done"),
        typed(ADDED, lambda event: event["item"].pop("name", None)),
        typed(ADDED, deep("item", "call_id", value="call_x")),
    ],
    "responses.call_result": [
        refused(lambda body: isinstance(body["input"], list)),
        in_body(deep("usage", "input_tokens", value=5)),
    ],
    "responses.lost_call": [with_status(500)],
}
