"""The check of a stream of events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.response import Response

_read_event = msgspec.json.Decoder[ResponseEvent](ResponseEvent).decode


def check_events(stream: Iterable[ResponseEvent] | bytes) -> Response:
    """Check a whole stream of events, or the body of a streamed answer, and return the final response.

    Raises an `AssertionError` that names the first broken rule: of the order, the numbers, the items and their texts.
    """
    checker = StreamChecker()
    last: ResponseEvent | None = None
    for last in _events_of(stream) if isinstance(stream, bytes) else stream:
        checker.feed(last)
    checker.finish()
    assert isinstance(last, TerminalEvent)
    return last.response


def _events_of(body: bytes) -> Iterable[ResponseEvent]:
    *events, done, rest = body.split(b"\n\n")
    rule((done, rest) == (b"data: [DONE]", b""), "a stream ends with data: [DONE]")
    for event in events:
        if not event.startswith(b":"):
            name, data = event.split(b"\n")
            decoded = _read_event(data.removeprefix(b"data: "))
            rule(name == b"event: %b" % str(decoded.__struct_config__.tag).encode(), "an event is named by its type")
            yield decoded
