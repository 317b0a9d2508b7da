"""A server that hangs, dies, floods or lies cannot break the command."""

from __future__ import annotations

import asyncio
import gzip
import xml.etree.ElementTree as ET
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.extensions.workbench.conformance.badge import as_badge
from penstock.extensions.workbench.conformance.check import Verdict
from penstock.extensions.workbench.conformance.checks import ALL
from penstock.extensions.workbench.conformance.client import Server
from penstock.extensions.workbench.conformance.junit import as_junit
from penstock.extensions.workbench.conformance.report import as_json
from penstock.extensions.workbench.conformance.run import Outcome, model_of, outcome
from penstock.pipeline.errors import CannotRun

pytestmark = pytest.mark.io

CHECKS = {check.name: check for check in ALL}
STREAMED = ("responses.one_end", "chat.sse", "messages.order")
KEY = "sk-secret-0123456789"
Writing = Callable[[asyncio.StreamWriter], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def answering(write: Writing, seconds: float = 120.0) -> AsyncGenerator[Server, None]:
    """Serve whatever ``write`` writes, for any request of a client that waits for some seconds."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await write(writer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    async with listening, Server.opened(f"http://{host}:{port}/v1", "m", key=KEY, timeout=seconds) as server:
        yield server


def sending(*data: bytes) -> Writing:
    async def write(writer: asyncio.StreamWriter) -> None:
        for block in data:
            writer.write(block)

    return write


async def hanging(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def silent_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    await writer.drain()
    await asyncio.sleep(30)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    while True:
        writer.write(b'data: {"type": "response.output_text.delta"}\n\n' * 1000)
        await writer.drain()


async def endless_line(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + b"data: ")
    while True:
        writer.write(b"x" * 2**16)
        await writer.drain()


async def endless_json(writer: asyncio.StreamWriter) -> None:
    writer.write(JSON + b"[")
    while True:
        writer.write(b"[" * 2**16)
        await writer.drain()


HOSTILE: dict[str, Writing] = {
    "closes": sending(),
    "hangs": hanging,
    "silent stream": silent_stream,
    "endless": endless,
    "endless line": endless_line,
    "endless json": endless_json,
    "no HTTP": sending(b"SSH-2.0-server\r\n"),
    "long header": sending(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2**20 + b"\r\n\r\n"),
    "bad length": sending(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"),
    "short body": sending(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\ndata: {}"),
    "bad chunks": sending(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "redirect": sending(b"HTTP/1.1 307 Go\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n"),
    "bomb": sending(JSON.replace(b"json\r\n", b"json\r\nContent-Encoding: gzip\r\n"), gzip.compress(b"[" * 10**7)),
    "deep": sending(JSON, b'{"a":' * 100_000),
    "deep event": sending(STREAM, b"data: " + b"[" * 100_000 + b"\n\n"),
    "NUL": sending(STREAM, b'data: {"type": "\0"}\n\n'),
    "half of UTF-8": sending(STREAM, b'data: {"type": "\xc3\n\n'),
    "surrogates": sending(STREAM, b'data: {"type": "\\ud800"}\n\n'),
    "lists": sending(STREAM, b"data: []\n\ndata: null\n\ndata: 5\n\n"),
    "empty objects": sending(STREAM, b"data: {}\n\n" * 3),
    "wrong types": sending(STREAM, b'data: {"type": 5, "response": [], "choices": 3, "delta": null}\n\n'),
    "escapes": sending(JSON.replace(b"200 OK", b"500 No"), b"\x1b[2J\x07" + KEY.encode()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_server_fails_in_one_clear_line(kind: str) -> None:
    async with answering(HOSTILE[kind], seconds=1.0) as server:
        async with asyncio.timeout(120):
            found = [await outcome(server, CHECKS[name]) for name in (*STREAMED, "responses.object", "chat.models")]
    assert [(each.check.name, each.verdict) for each in found if each.verdict != "fail"] == []
    for each in found:
        shown = f"{each.reason}{each.sent}{each.came}"
        assert each.reason
        assert KEY not in shown
        assert shown.isprintable()
        assert len(shown) < 1500


@pytest.mark.slow
async def test_no_check_passes_on_empty_objects() -> None:
    async with answering(sending(JSON, b"{}")) as server:
        found = [await outcome(server, check) for check in ALL]
    passed = [each.check.name for each in found if each.verdict == "pass"]
    assert passed == [check.name for check in ALL if check.name.endswith(".json")]  # whose rule is the content type


async def test_a_server_that_cannot_be_reached_is_named() -> None:
    async with Server.opened("http://127.0.0.1:9/v1", timeout=1.0) as server:
        with pytest.raises(CannotRun, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
            await model_of(server, "m")


async def test_a_server_without_models_needs_a_name() -> None:
    async with answering(sending(JSON, b'{"data": [{"id": 5}]}')) as server:
        with pytest.raises(CannotRun, match="give one with --model"):
            await model_of(server, "")


def outcomes(text: str) -> list[Outcome]:
    verdicts: tuple[Verdict, ...] = ("pass", "warn", "skip", "fail")
    return [Outcome(check, verdicts[at % 4], text, text, text, 0.5) for at, check in enumerate(ALL)]


def test_junit_counts_and_escapes() -> None:
    about = {"url": "http://a/?b&c", "model": "<m>", "when": "2026-01-01T00:00:00Z"}
    found = outcomes('<&"]]>')
    root = ET.fromstring(as_junit(about, found))
    cases = root.findall("testsuite/testcase")
    assert [case.get("name") for case in cases] == [check.name for check in ALL]
    for suite in (root, *root.findall("testsuite")):
        assert int(suite.get("tests", "")) == len(suite.findall(".//testcase"))
        assert int(suite.get("failures", "")) == len(suite.findall(".//failure"))
    assert {failure.get("message") for failure in root.findall(".//failure")} == {'<&"]]>'}
    assert as_json(about, found)["counts"]["fail"] == len(root.findall(".//failure"))


def test_a_badge_is_xml_with_the_counts() -> None:
    found = [each for each in outcomes("") if each.check.speech == "chat"]
    root = ET.fromstring(as_badge(found))
    tried = [each for each in found if each.verdict != "skip"]
    passed = [each for each in tried if each.verdict != "fail"]
    assert root.get("aria-label") == f"Chat Completions: {len(passed)} of {len(tried)}"


@pytest.mark.parametrize("name", ["responses.object", "chat.sse", "messages.order", "responses.bad_json"])
async def test_limited_key_is_no_failure_of_the_server(name: str) -> None:
    limited = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"
    async with answering(sending(limited)) as server:
        found = await outcome(server, CHECKS[name])
    assert (found.verdict, found.is_limited) == ("skip", True)
