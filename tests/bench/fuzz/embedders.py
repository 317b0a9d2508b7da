"""Have a server embed with a hostile one: each answer is read, or fails a file in penstock's own words."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from hypothesis import strategies as st

from penstock.extensions.tools.search import ingestion
from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.bench.fuzz.forms import MOST_TAKEN
from tests.bench.fuzz.hostile import drawn
from tests.support.openapi import broken_values
from tests.support.server_process import ServerProcess, serve_script, serving_process
from tests.support.tool_servers import web_server

CANARY = "canary-7d20"
"""A text of the hostile server, which no client may read."""

STORES = "/v1/vector_stores"

Vectors = list[list[Any]]


def _answer(vectors: Vectors) -> Any:
    data = [{"index": at, "object": CANARY, "embedding": vector} for at, vector in enumerate(vectors)]
    return {"object": CANARY, "data": data}


_odd: list[Any] = [-1e38, 1e39, 1e308, 10**400, math.inf, -math.inf, math.nan, None, CANARY, [], True]
_vector: st.SearchStrategy[list[Any]] = st.lists(st.sampled_from([0.5, 1]), min_size=1, max_size=3)
_vectors: st.SearchStrategy[Vectors] = st.builds(lambda vector, count: [vector] * count, _vector, st.integers(0, 3))
_nested = st.sampled_from([10, 500, 20_000]).map(lambda deep: '{"data":[[' * deep + f'"{CANARY}"' + "]]}" * deep)
_texts = st.one_of(
    st.builds(lambda vector, odd: json.dumps(_answer([[*vector, odd]])), _vector, st.sampled_from(_odd)),
    _vectors.map(_answer).map(json.dumps),
    st.lists(_vector, max_size=3).map(_answer).map(json.dumps),
    broken_values(_vectors.map(_answer)).map(json.dumps),
    _nested,
    st.builds(lambda vectors, cut: json.dumps(_answer(vectors))[:cut], _vectors, st.integers(0, 99)),
    st.sampled_from([f'"{CANARY}"', f"<html>{CANARY}</html>", "", json.dumps(_answer([[1.0] * 9_000]))]),
)
Shot = tuple[int, bytes, bytes]
"""A status, a body, and what follows it without end, if anything."""

shots: st.SearchStrategy[Shot] = st.one_of(
    st.tuples(st.just(200), _texts.map(str.encode), st.just(b"")),
    st.tuples(st.just(200), _texts.map(str.encode), st.just(b"")),
    st.tuples(st.sampled_from([204, 302, 401, 429, 500]), st.just(CANARY.encode()), st.just(b"")),
    st.tuples(
        st.just(200),
        st.sampled_from([b"", b'{"data":[{"index":0,"embedding":[']),
        st.sampled_from([b" ", b"1.5,", b"["]),
    ),
)


@dataclass
class Hostile:
    """A server that embeds, and answers with what the attack is about."""

    shot: Shot = (200, b"", b"")
    sent: int = 0
    """Bytes of the last answer."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": CANARY}]})
        status, body, then = self.shot
        answer = web.StreamResponse(status=status, headers={"Content-Type": "application/json", "Location": CANARY})
        await answer.prepare(request)
        self.sent = 0
        with suppress(ConnectionError):
            for piece in _pieces(body, then * (2**16 // len(then or b" "))):
                if self.sent > MOST_TAKEN:
                    break
                await answer.write(piece)
                self.sent += len(piece)
        return answer


def _pieces(body: bytes, then: bytes) -> Iterator[bytes]:
    yield body
    if then:
        yield from repeat(then)


def _serve_embedded(*arguments: str) -> None:
    ingestion.RETRY_SECONDS = 0.01
    serve_script(*arguments)


async def attack_embeddings(folder: Path, total: int, seed: int) -> dict[str, Outcome]:
    """Add a file to a vector store, and search, with each answer of the hostile server."""
    hostile, found = Hostile(), Outcome()
    async with web_server(hostile.handle) as url:
        options = ("quick", "--no-sandbox", "--embeddings", url, "--log-level", "INFO")
        store = str(folder / "embedded.sqlite3")
        async with serving_process(_serve_embedded, options, store, folder) as server:
            for hostile.shot in drawn(shots, total, seed):
                try:
                    async with asyncio.timeout(HANGS):
                        status, read = await _embedded(server)
                except TimeoutError:
                    found.fault(f"no end after {HANGS:g} seconds", hostile.shot)
                    continue
                found.statuses[status] += 1
                if hostile.sent > MOST_TAKEN:
                    found.fault("an answer without end is read", hostile.sent)
                if CANARY in read:
                    found.fault(f"a foreign text is shown: {read}", hostile.shot)
                if status not in ("completed", "failed") or (status == "completed" and not is_sound(hostile.shot)):
                    found.fault(f"the file is {status}", hostile.shot)
            hostile.shot = (200, json.dumps(_answer([[1.0, 0.5]])).encode(), b"")
            if (end := await _embedded(server))[0] != "completed":
                found.fault("a sound answer fails afterwards", end)
            leaked = [line for line in server.log.read_text().splitlines() if CANARY in line]
    return {"answers of an embedder": found, "after them": Outcome(faults=complaints(server) + leaked)}


async def _embedded(server: ServerProcess) -> tuple[str, str]:
    """Return the status of a file that is added to a vector store, and all that a client reads of it and a search."""
    form = aiohttp.FormData({"purpose": "assistants"})
    form.add_field("file", b"The moon has no air.", filename="moon.txt")
    async with server.client.post(f"{server.url}/v1/files", data=form) as answer:
        file = await answer.json()
    _, made = await server.post({"file_ids": [file["id"]]}, STORES)
    path = f"{STORES}/{made['id']}/files/{file['id']}"
    while (read := (await server.get(path))[1])["status"] == "in_progress":
        await asyncio.sleep(0.01)
    search = await server.post({"query": "moon"}, f"{STORES}/{made['id']}/search")
    status = read["status"] if search[0] == 200 else f"searched with {search[0]}"
    return status, json.dumps([read, search])


def is_sound(shot: Shot) -> bool:
    """True if an answer has one vector of finite numbers, and so can be read."""
    status, body, then = shot
    try:
        data = json.loads(body)["data"]
        numbers = data[0]["embedding"]
        finite = all(type(each) in (int, float) and abs(each) < 2**128 for each in numbers)  # NaN is not less
        return (
            status == 200 and not then and len(data) == 1 and type(data[0]["index"]) is int and finite and bool(numbers)
        )
    except (ValueError, TypeError, LookupError, RecursionError, AttributeError):
        return False
