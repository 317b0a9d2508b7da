"""Speak to the clients of another API: a `Dialect`, which reads their bodies and writes their answers.

This one answers `POST /toy/v1/say` with a text, whole or in pieces, and tells what is wrong in words of its own:

```sh
penstock serve openai/gpt-oss-20b --dialect a_dialect_of_your_own.py:TOY
curl localhost:8000/toy/v1/say --json '{"say": "Is anybody there?", "stream": true}'
```

The model, its tools and your stages are those of the server, and so are keys, limits, the log, metrics and recordings.
A package offers its dialect as an entry point of `penstock.dialects`; `--dialect NAME` then names that.
`check_dialect` of `penstock.testing` checks the rules of a dialect, in an async function. `heard` returns the body that
is the same answer as a stream:

```python
import json
from penstock.testing import check_dialect


def heard(stream: bytes) -> dict[str, str]:
    lines = [line for line in stream.decode().splitlines() if line.startswith("data: ")]
    text = "".join(json.loads(line[6:]).get("text", "") for line in lines)
    return {"text": text} if text else {}


await check_dialect(TOY, [b'{"say": "Hi"}'], heard)
```

A `Wire` writes server-sent events. One with a `content_type` of its own, such as `application/x-ndjson`, has a
`keep_alive` of its own, too: what its clients skip while the model is silent, such as an empty line. `end` follows the
last event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec
from aiohttp import web

from penstock.api.dialect import REFUSALS, Dialect, Edge
from penstock.api.http.conventions import Conventions, RequestError
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.wire import Reading, Wire, server_sent
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.protocol.events import OutputTextDelta, ResponseEvent, ResponseFailed
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_body


class Say(Body):
    say: str
    stream: bool = False


class Said(msgspec.Struct, omit_defaults=True):
    text: str = ""
    wrong: str = ""


def read(body: bytes) -> Reading:
    given = read_body(body, Say)
    return Reading(CreateResponse(input=given.say, store=False), WIRE, given.stream)


async def pieces(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[Said, None]:
    async for event in source:
        if isinstance(event, OutputTextDelta):
            yield Said(event.delta)
        elif isinstance(event, ResponseFailed) and event.response.error:
            yield Said(wrong=event.response.error.message)


async def whole(source: AsyncIterator[Said]) -> Said:
    said = [piece async for piece in source]
    if said and said[-1].wrong:
        raise EngineFailed(said[-1].wrong)
    return Said("".join(piece.text for piece in said))


def wrong(error: RequestError) -> tuple[int, Said]:
    return error.status, Said(wrong=error.problem.message)


def routes(edge: Edge) -> Sequence[web.RouteDef]:
    @operation(Operation(Said, body=Say, refusals=REFUSALS, streams=True))
    async def say(request: web.Request) -> web.StreamResponse:
        """Say something, and get an answer."""
        return await edge.create(request)

    return [web.post(f"{edge.base}/say", say)]


WIRE = Wire(server_sent, whole, Pipeline.start("pieces", pieces), fault=lambda refusal: server_sent(wrong(refusal)[1]))
TOY = Dialect("toy", "/toy/v1", read, WIRE, routes, Conventions(error=wrong, error_body=Said))
