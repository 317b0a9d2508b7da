"""The events of a socket: those of its client, read from frames, and those of the server, as frames."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.api.http.bodies import Problem
from penstock.api.socket.steers import SteerEvent
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import NO_JSON, check_commas, shortened

CREATE, STEER, PROCESSED = "response.create", "response.steer", "response.processed"


LONGEST_VALUE = 2**12
"""Bytes of a field of an event that is read here; all right values are shorter."""

_NULL = msgspec.Raw(b"null")


class _Fields(msgspec.Struct, frozen=True):
    type: msgspec.Raw = _NULL
    stream_id: msgspec.Raw = _NULL
    previous_response_id: msgspec.Raw = _NULL
    generate: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


class ClientEvent(NamedTuple):
    """The fields of a client's event that a connection reads itself, of any type before they are checked."""

    type: Any = None
    stream_id: Any = UNSET
    previous_response_id: Any = None
    generate: Any = None
    input: msgspec.Raw = _NULL
    """The input that steers a response, as JSON; that of a new response is among its parameters."""

    @property
    def generates(self) -> bool:
        """False if the event asks for the preparation of a response, and no output.

        Raises `InvalidRequest` for a wrong value.
        """
        if not isinstance(self.generate, bool | None):
            message = "Input should be a valid boolean (at generate)"
            raise InvalidRequest(message, param="generate", code="invalid_type")
        return self.generate is not False


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of a request; unlike the events of a response, it has the status that HTTP would have.

    Open Responses requires a code, so an error without one has its type as its code.
    """

    status: int
    error: Problem
    headers: dict[str, str] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


_read = msgspec.json.Decoder(_Fields).decode
_encode = msgspec.json.Encoder().encode


def read_event(frame: bytes) -> ClientEvent:
    """Read an event of a client, without its parameters.

    Raises `InvalidRequest` for one that is none, and `BodyTooLarge` for one with too many values.
    """
    if not frame:
        raise InvalidRequest("Send each event as a text frame.")
    check_commas(frame)
    try:
        fields = _read(frame)
        kind, stream_id = _value(fields.type), UNSET if fields.stream_id is _NULL else _value(fields.stream_id)
        previous, generate = _value(fields.previous_response_id), _value(fields.generate)
    except NO_JSON as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The event is not a JSON object: {problem}") from error
    if kind not in (CREATE, STEER, PROCESSED):
        given = shortened(str(kind)) if kind is not None else "none"
        raise InvalidRequest(f"An event has the type '{CREATE}', not {given!r}.", param="type", code="invalid_value")
    return ClientEvent(
        kind,
        stream_id=stream_id,
        previous_response_id=previous,
        generate=generate,
        input=fields.input if kind == STEER else _NULL,
    )


def _value(given: msgspec.Raw) -> Any:
    """Return the value of a field; one that is too long to be right is text."""
    text = memoryview(given)
    if len(text) <= LONGEST_VALUE:
        return msgspec.json.decode(text)
    return bytes(text[:LONGEST_VALUE]).decode(errors="replace")


def frame_of(event: ErrorEvent | SteerEvent) -> bytes:
    """Return the frame of an event that belongs to no response."""
    if isinstance(event, ErrorEvent) and event.error.code is None:
        event = replace(event, error=replace(event.error, code=event.error.type))
    return _encode(event)


def with_lane(frame: bytes, lane: str | None) -> bytes:
    """Return the JSON object of an event with the name of its lane, which only named lanes have."""
    return frame if lane is None else b'%b,"stream_id":"%b"}' % (frame[:-1], lane.encode())
