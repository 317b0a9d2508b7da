"""The form of requests and answers on the wire."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

import msgspec

from penstock.api.http.conventions import RequestError
from penstock.pipeline.core import Pipeline
from penstock.pipeline.hot_path import lead_through
from penstock.pipeline.protocol.events import KEEP_ALIVE, ResponseEvent, to_json
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Usage
from penstock.services.usage import Tally

UsageSoFar: TypeAlias = Callable[[], Usage | None]
"""A function that returns the usage of a running response; None if nothing is counted yet."""

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class Wire:
    """The form of an answer.

    ``outgoing`` are the stages that rewrite the events of a response; None leaves them as they are.  ``encode`` writes
    one rewritten event as a whole frame of the stream, and ``json`` as a JSON object, for a WebSocket.  ``fold`` makes
    the one body of an answer that is no stream from all of them.  If it raises a `StageError`, that is the answer.

    ``weave`` makes one answer of the rewritten events of several responses, each with the position of its response.
    ``end`` is written after the last event, and ``keep_alive``, which clients skip, after a time of silence.  A form
    with a ``content_type`` of its own has a ``keep_alive`` of its own, too: the comment of server-sent events is none
    there.  ``fault`` writes the last frame of a stream that breaks off, in place of ``end``; without it, the connection
    is closed.  ``counting`` returns the stages of an answer that has counts of tokens before its end, or their ids: it
    takes the tally of the response.
    """

    encode: Callable[[Any], bytes]
    fold: Callable[[AsyncIterator[Any]], Awaitable[Any]]
    outgoing: Pipeline[ResponseEvent, Any] | None = None
    weave: Callable[[AsyncIterator[tuple[int, Any]]], AsyncGenerator[Any, None]] | None = None
    end: bytes = b""
    keep_alive: bytes = KEEP_ALIVE
    fault: Callable[[RequestError], bytes] | None = None
    content_type: str = EVENT_STREAM
    json: Callable[[Any], bytes] = to_json
    counting: Callable[[Tally], Pipeline[ResponseEvent, Any]] | None = None

    def __post_init__(self) -> None:
        if self.content_type != EVENT_STREAM and self.keep_alive == KEEP_ALIVE:
            raise ValueError(
                f"a Wire of {self.content_type} needs a keep_alive that its clients skip, such as an empty line"
            )

    def translated(
        self, events: AsyncGenerator[ResponseEvent, None], tally: Tally | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Rewrite the events of a response with this ``tally`` for the length of a block."""
        outgoing = self.counting(tally or Tally()) if self.counting else self.outgoing
        lead_through(outgoing)
        return aclosing(events) if outgoing is None else outgoing.open(events)

    @property
    def events(self) -> frozenset[Any]:
        """The types of the rewritten events."""
        return self.outgoing.emits().frames if self.outgoing else frozenset(get_args(ResponseEvent))


@dataclass(frozen=True, slots=True)
class Reading:
    """The meaning of a body: a request of the pipeline, and the form of its answer, which may be a stream.

    ``as_sent`` is the body if it has the form of the Responses API: a recording then keeps it as it came.  ``place``
    returns the place in the body of a parameter of the request, for errors that are found later.  The ``others`` are
    requests that run beside the first, for one answer, which the form then has to ``weave``.  Without ``generates``,
    the engine only reads the prompt.  If it ``forgives``, a thought that cannot be opened costs its tokens alone.
    """

    request: CreateResponse
    wire: Wire
    streams: bool = False
    as_sent: bytes | None = None
    place: Callable[[str], str] = str
    others: tuple[CreateResponse, ...] = ()
    generates: bool = True
    forgives: bool = False

    def asking(self, request: CreateResponse, *others: CreateResponse) -> Reading:
        """Return the same reading for other requests, without the body."""
        return replace(self, request=request, as_sent=None, others=others)


_encode = msgspec.json.Encoder().encode


def server_sent(data: Any, event: str = "") -> bytes:
    """Return a server-sent event with ``data`` as JSON, and with a name if ``event`` is not empty.

    See https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation.
    """
    named = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (named, _encode(data))
