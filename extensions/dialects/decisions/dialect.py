"""The dialect of Decisions: one route, whose answer is made of one response for each question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.http.auth import OWNER
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.request_body import off_loop, receive
from penstock.api.http.wire import Reading, Wire, server_sent
from penstock.extensions.dialects.decisions.answers import Decision, Folding, in_order, label_reads
from penstock.extensions.dialects.decisions.body import Asked, DecisionBody
from penstock.extensions.dialects.decisions.labels import LETTERS, Label, labels_of
from penstock.extensions.dialects.decisions.questions import MOST_CHOICES
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.tasks import in_thread
from penstock.stages.parse.parser import vocabulary_of

AT_ONCE = 8
"""Requests of one decision that run at once."""

STAGE = "decisions"
"""The name of the stage that reads the log probabilities."""


def form(folding: Folding) -> Wire:
    """Return the form of an answer, which is no stream."""
    return Wire(server_sent, folding, Pipeline.start(STAGE, label_reads), in_order)


@dataclass
class DecisionReader:
    """Reads one body; keeps what it asks, with the ``labels`` that the model has."""

    labels: Sequence[Label]
    body: DecisionBody | None = None
    asked: Sequence[Asked] = field(default_factory=list)

    def __call__(self, body: bytes) -> Reading:
        """Read the body; raise `InvalidRequest` for a wrong one."""
        given = read_body(body, DecisionBody)
        self.body, self.asked = given, tuple(given.asked(self.labels))
        return Reading(
            given.about(self.asked[0], given.request), form(Folding(given.questions, self.labels, self.asked))
        )

    def parts(self, reading: Reading) -> Sequence[Callable[[], Reading]]:
        """Return functions that make a reading of each request: those of all together would fill the memory."""
        return [partial(self._part, reading, each) for each in self.asked]

    def _part(self, reading: Reading, asked: Asked) -> Reading:
        assert self.body is not None
        request = self.body.about(asked, reading.request)
        return replace(reading.asking(request), place=partial(self.body.place, asked.question))


def read(body: bytes) -> Reading:
    """Read the body of a request for a decision of a model whose vocabulary is not known."""
    return DecisionReader([Label(text, ()) for text in LETTERS])(body)


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    """Return the route of Decisions."""

    @operation(Operation(Decision, body=DecisionBody, refusals=REFUSALS))
    async def create(request: web.Request) -> web.StreamResponse:
        """Answer questions about one input with the probabilities of all that may be answered."""
        body = await receive(request)
        with edge.scheduler.in_flight:
            reader = DecisionReader(await _labels(edge, request[OWNER], body))
            reading = await edge.read(request, body, reader)
            del body  # free it: the answer may take long
            return await edge.answer_each(request, reading.wire, reader.parts(reading), AT_ONCE)

    return [web.post(f"{edge.base}/decisions", create)]


class _Named(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; None for a wrong body, which is refused where all of it is read."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.MsgspecError:
        return None


async def _labels(edge: Edge, owner: str, body: bytes) -> Sequence[Label]:
    """Return the labels of the model; raise `InvalidRequest` if its vocabulary is not known here."""
    scheduler = edge.scheduler
    model = await off_loop(_model_of, body)
    await scheduler.loaded(owner, model)
    served = scheduler.resolved(owner, model)
    if (vocabulary := vocabulary_of(scheduler.pipeline, served)) is None:
        message = "This server knows no vocabulary: it cannot read the probabilities of answers."
        raise InvalidRequest(message, code="unsupported_operation")
    return await in_thread(labels_of, vocabulary, MOST_CHOICES)  # the first time takes long


DECISIONS = Dialect("decisions", base="/v1", read=read, wire=form(Folding()), routes=routes)
