"""The events of a socket: those of its client, read from frames, and those of the server, as frames."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.api.http.bodies import Problem
from penstock.api.socket.steers import SteerEvent
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import NO_JSON, shortened

CREATE, STEER, PROCESSED = "response.create", "response.steer", "response.processed"


class ClientEvent(msgspec.Struct, frozen=True):
    """The fields of a client's event that are not parameters of a response, of any type before they are checked."""

    type: Any = None
    stream_id: Any = UNSET
    generate: Any = None

    @property
    def generates(self) -> bool:
        """False if the event asks for the preparation of a response, and no output."""
        return self.generate is not False


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of a request; unlike the events of a response, it has the status that HTTP would have.

    Open Responses requires a code, so an error without one has its type as its code.
    """

    status: int
    error: Problem
    headers: dict[str, str] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


_read = msgspec.json.Decoder(ClientEvent).decode
_encode = msgspec.json.Encoder().encode


def read_event(frame: bytes) -> ClientEvent:
    """Read an event of a client, without its parameters.  Raises `InvalidRequest` for one that is none."""
    if not frame:
        raise InvalidRequest("Send each event as a text frame.")
    try:
        event = _read(frame)
    except NO_JSON as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The event is not a JSON object: {problem}") from error
    if event.type not in (CREATE, STEER, PROCESSED):
        given = shortened(str(event.type)) if event.type is not None else "none"
        raise InvalidRequest(f"An event has the type '{CREATE}', not {given!r}.", param="type", code="invalid_value")
    if not isinstance(event.generate, bool | None):
        raise InvalidRequest("Input should be a valid boolean (at generate)", param="generate", code="invalid_type")
    return event


def frame_of(event: ErrorEvent | SteerEvent) -> bytes:
    """Return the frame of an event that belongs to no response."""
    if isinstance(event, ErrorEvent) and event.error.code is None:
        event = replace(event, error=replace(event.error, code=event.error.type))
    return _encode(event)


def with_lane(frame: bytes, lane: str | None) -> bytes:
    """Return the JSON object of an event with the name of its lane, which only named lanes have."""
    return frame if lane is None else b'%b,"stream_id":"%b"}' % (frame[:-1], lane.encode())
