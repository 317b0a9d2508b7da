"""The form of the Responses API: its bodies, and its answers as streams and as objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from pydantic import Field

from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import RequestError
from penstock.api.http.padding import padded
from penstock.api.http.wire import Reading, Wire, server_sent
from penstock.pipeline.protocol.events import DONE, Event, TerminalEvent, to_json, to_sse
from penstock.pipeline.protocol.params.request import NOTHING_ASKED, CompactConversation, CreateResponse
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.response import Response

_encode = msgspec.json.Encoder().encode


class ResponseBody(CreateResponse):
    """The body of a request for a response, with OpenAI's floor for the length of its output."""

    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    """The most tokens of the answer, its reasoning included: 16 and up."""

    @property
    def create_request(self) -> CreateResponse:
        """The request of the pipeline, whose stages may choose any length."""
        return NOTHING_ASKED.model_copy(update={name: getattr(self, name) for name in self.model_fields_set & _FIELDS})


_FIELDS = CreateResponse.model_fields.keys()


def obfuscated(event: Event) -> bytes:
    """Encode an event as `to_sse` does, with random padding beside a delta to hide its length in network packets.

    This is OpenAI's ``include_obfuscation``.  Log probabilities, if requested, reveal the length all the same.
    """
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _obfuscated_json(event))


def _obfuscated_json(event: Event) -> bytes:
    data, delta = to_json(event), getattr(event, "delta", None)
    if not isinstance(delta, str):
        return data
    return padded(data, len(_encode(delta)[1:-1]))


async def last_response(events: AsyncIterator[Any]) -> Response:
    """Return the response in the last event of a stream, which is read to its end."""
    response: Response | None = None
    async for event in events:
        if isinstance(event, TerminalEvent):
            response = event.response
    if response is None:
        raise RuntimeError("the stream ended without a terminal event")
    return response


class ErrorEvent(msgspec.Struct, frozen=True, tag="error"):
    """The last event of a stream that breaks off; OpenAI's SDKs raise the ``error``, and read no other field."""

    code: str
    message: str
    param: str | None
    error: Problem
    sequence_number: int


def fault(error: RequestError) -> bytes:
    """Return the last frame of a stream that breaks off."""
    problem, number = error.problem, error.last.sequence_number + 1 if error.last else 0
    code = problem.code or problem.type
    event = ErrorEvent(code, message=problem.message, param=problem.param, error=problem, sequence_number=number)
    return server_sent(event, "error")


PLAIN = Wire(to_sse, last_response, end=DONE, fault=fault)


def read_compaction(body: bytes) -> Reading:
    """Read the body of a request for a compaction."""
    return Reading(read_body(body, CompactConversation).create_request, PLAIN, as_sent=body)


def hiding(wire: Wire) -> Wire:
    """Return the form of streams that obfuscate the lengths of their deltas."""
    return replace(wire, encode=obfuscated, json=_obfuscated_json)


def reader(wire: Wire) -> Callable[[bytes], Reading]:
    """Return a function that reads the body of a request for a response, to be answered in a form."""
    hidden = hiding(wire)

    def read(body: bytes) -> Reading:
        given = read_body(body, ResponseBody)
        options = given.stream_options
        hides = options is not None and options.include_obfuscation is True
        return Reading(given.create_request, hidden if hides else wire, bool(given.stream), body)

    return read
