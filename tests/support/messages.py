"""The Messages API as anthropic-python speaks it: a client, and streams as it reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/messages"

_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def anthropic_client(url: str, key: str = "none", **options: Any) -> anthropic.AsyncAnthropic:
    """Make a client of the server at ``url``.  It loads no certificates: that takes longer than most tests."""
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=http, **options)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream but its pings; check its framing, and each by the types of the SDK."""
    assert b"\r" not in stream
    *frames, rest = stream.decode().split("\n\n")
    assert rest == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            ErrorResponse.model_validate(event)
        elif event["type"] != "ping":
            _event.validate_python(event)
        if event["type"] != "ping":
            found.append(event)
    return found


def heard(stream: bytes) -> dict[str, Any]:
    """Return the message that the SDK makes of a stream, as the body of the same answer without a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events_of(stream):
        parsed = _event.validate_python(event)
        message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    return as_sent(message)


def as_sent(message: Message) -> dict[str, Any]:
    """Return the JSON of a message of the SDK, without the fields that it adds."""
    sent: dict[str, Any] = message.to_dict(mode="json", exclude_unset=True)
    content = [block if isinstance(block, dict) else block.to_dict() for block in sent["content"]]
    return {**sent, "content": content}
