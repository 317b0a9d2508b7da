"""The proxy passes bytes through as they are, whatever a server and a client do, and records what it can."""

from __future__ import annotations

import asyncio
import gzip
import json
import stat
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.wiretap import streams
from penstock.extensions.workbench.wiretap import tap as tap_module
from penstock.extensions.workbench.wiretap.proxy import checked
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.recordings.format import Failure, UnreadableRecording
from penstock.pipeline.recordings.sampling import Condition
from penstock.pipeline.recordings.wire import AnswerBegun, WireBody, WireEvent
from tests.support.api_clients import PATIENCE
from tests.support.examples import examples
from tests.support.wiretaps import (
    CHAT_PATH,
    chunk,
    exchange,
    names_in,
    only_folder,
    post,
    raw_server,
    recorded_server,
    wire_recordings,
)

pytestmark = pytest.mark.io

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
SENT = post(CHAT_PATH, json.dumps(REQUEST).encode(), "Content-Type: application/json")
HEAD = b"HTTP/1.1 200 Fine\r\nX-B: 1\r\nx-a: 2\r\nX-B: 3\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = [WireEvent(data={"a": "ä€😀"}), WireEvent("b", data=[1]), WireEvent(text="[DONE]")]
STREAM = 'data: {"a": "ä€😀"}\r\n\r\nevent: b\ndata: [1]\n\ndata: [DONE]\n\n'.encode()


def body_of(answer: bytes) -> bytes:
    """Return the body of an answer, without the form of its chunks."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def frames(folder: Path) -> list[Any]:
    (recording,) = wire_recordings(folder)
    return [timed.frame for timed in recording.timed]


@examples(30)
@given(st.lists(st.integers(0), max_size=12), st.booleans())
async def test_stream_in_any_pieces_passes_and_is_recorded(places: list[int], is_compressed: bool) -> None:
    body = gzip.compress(STREAM, mtime=0) if is_compressed else STREAM
    at = sorted({place % (len(body) + 1) for place in places} - {0, len(body)})
    pieces = [body[start:end] for start, end in zip([0, *at], [*at, len(body)], strict=True)]
    head = CHUNKED.replace(b"X-B: 3", b"Content-Encoding: gzip") if is_compressed else CHUNKED
    with tempfile.TemporaryDirectory() as folder:
        async with (
            raw_server(head, *map(chunk, pieces), chunk(b"")) as raw,
            recorded_server(raw.url, Path(folder)) as url,
        ):
            assert body_of(await exchange(url, SENT)) == body
        assert frames(Path(folder)) == [AnswerBegun(200, "text/event-stream"), *EVENTS]


async def test_head_passes_as_it_is_both_ways(tmp_path: Path) -> None:
    headers = ("X-Two: a", "x-two: b", "Accept: */*", "Proxy-Authorization: p", "Upgrade: h2c", "X-Own: 1")
    sent = SENT.replace(b"Connection: close", b"Connection: close, x-own").replace(
        b"\r\n\r\n", "\r\n".join(["", *headers, "", ""]).encode(), 1
    )
    path = b"//a/../b%2f%FF?x=%c3%a4&y=%20+z"
    async with (
        raw_server(HEAD + b"Content-Length: 0\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n") as raw,
        recorded_server(raw.url, tmp_path) as url,
    ):
        answer = await exchange(url, sent.replace(CHAT_PATH.encode(), path))
    assert answer == HEAD + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
    head, _, body = raw.requests[0].partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first == b"POST " + path + b" HTTP/1.1"
    assert body == SENT.partition(b"\r\n\r\n")[2]
    assert lines[0] == f"Host: {raw.url.removeprefix('http://')}".encode()
    expected = [f"Content-Length: {len(body)}", "Content-Type: application/json", "X-Two: a", "X-Two: b", "Accept: */*"]
    assert [line.decode() for line in lines[1:]] == expected
    assert names_in(tmp_path) == []


async def test_answer_to_head_keeps_its_length(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"
    async with raw_server(head) as raw, recorded_server(raw.url, tmp_path) as url:
        answer = await exchange(url, b"HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert answer == head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


async def test_piece_passes_at_once_and_leaving_client_ends_the_request(tmp_path: Path) -> None:
    async with (
        raw_server(CHUNKED, chunk(b"data: 1\n\n"), ends_with="silence") as raw,
        recorded_server(raw.url, tmp_path) as url,
        aiohttp.ClientSession() as client,
    ):
        async with client.post(url + CHAT_PATH, json=REQUEST) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
        await asyncio.wait_for(raw.left.wait(), PATIENCE)
    (recording,) = wire_recordings(tmp_path)
    assert (recording.end.abandoned, recording.end.failure) == (True, None)
    assert recording.frames[1:] == (WireEvent(data=1),)


async def test_headers_pass_before_the_body(tmp_path: Path) -> None:
    async with (
        raw_server(CHUNKED, ends_with="silence") as raw,
        recorded_server(raw.url, tmp_path) as url,
        aiohttp.ClientSession() as client,
        client.post(url + CHAT_PATH, json=REQUEST) as answer,
    ):
        assert answer.headers["X-B"] == "1"


@pytest.mark.parametrize("ends_with", ["close", "reset"])
@pytest.mark.parametrize("head", [CHUNKED, HEAD + b"Content-Length: 1000\r\n\r\n"])
async def test_broken_answer_breaks_off_for_the_client(tmp_path: Path, head: bytes, ends_with: str) -> None:
    data = b"data: 1\n\ndata: \xe2\x82"
    piece = chunk(data) if head == CHUNKED else data
    async with (
        raw_server(head, piece, ends_with=ends_with) as raw,
        recorded_server(raw.url, tmp_path) as url,
    ):
        answer = await exchange(url, SENT)
        assert answer.endswith(piece)  # no end of the body
    (recording,) = wire_recordings(tmp_path)
    assert recording.end.failure == Failure("EngineFailed", "The server broke off its answer.")
    assert recording.frames[1:] == (WireEvent(data=1),)


async def test_server_that_hangs_up_is_one_for_the_client(tmp_path: Path) -> None:
    async with raw_server() as raw, recorded_server(raw.url, tmp_path) as url:
        assert await exchange(url, SENT) == b""
    assert names_in(tmp_path) == []


async def test_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with raw_server() as raw:
        pass
    async with recorded_server(raw.url, tmp_path) as url:
        answer = await exchange(url, SENT)
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert f"penstock record: {raw.url} cannot be reached.".encode() in answer


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 2000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_answer_that_is_no_http_is_an_error(tmp_path: Path, answer: bytes) -> None:
    async with raw_server(answer) as raw, recorded_server(raw.url, tmp_path) as url:
        got = await exchange(url, SENT)
    assert got.startswith(b"HTTP/1.1 502 ")
    assert b"does not answer in HTTP" in got
    assert names_in(tmp_path) == []


async def test_header_that_is_no_utf_8_is_refused_instead_of_changed(tmp_path: Path) -> None:
    head = HEAD.replace(b"x-a: 2", b"x-a: \xff") + b"Content-Length: 0\r\n\r\n"
    async with raw_server(head) as raw, recorded_server(raw.url, tmp_path) as url:
        answer = await exchange(url, SENT)
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert b"A header of the answer is not UTF-8." in answer
        answer = await exchange(url, SENT.replace(b"Host: h", b"Host: h\r\nX: \xff"))
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert len(raw.requests) == 1
    assert names_in(tmp_path) == []


async def test_long_line_passes_and_its_recording_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LONGEST_EVENT", 2**20)
    body = b"data: 1\n\n" + b"data: " + b"x" * (100 * 2**20)
    head = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode()
    async with raw_server(head, body) as raw, recorded_server(raw.url, tmp_path) as url:
        assert (await exchange(url, SENT)).endswith(body)
    assert "is cut: an event is too long" in caplog.text
    with pytest.raises(UnreadableRecording, match="has no end"):
        wire_recordings(tmp_path)
    folder = only_folder(tmp_path)
    assert b'"data":1' in (folder / "wire.jsonl").read_bytes()


async def test_slow_disk_cuts_the_recording_and_no_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = b"data: 1\n\n" * 1000
    head = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode()
    async with (
        raw_server(head, body) as raw,
        recorded_server(raw.url, tmp_path, most_noted=1000) as url,
    ):
        assert (await exchange(url, SENT)).endswith(body)
    assert "is cut: the disk is too slow" in caplog.text


async def test_long_request_passes_without_a_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "LONGEST_REQUEST", 1000)
    sent = post(CHAT_PATH, b"[" + b" " * 2**20 + b"]")
    async with raw_server(CHUNKED, chunk(b"")) as raw, recorded_server(raw.url, tmp_path) as url:
        assert (await exchange(url, sent)).startswith(HEAD)
        assert raw.requests[0].endswith(b"]")
    assert "is cut: its request is too long" in caplog.text
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"no JSON", "its request is not JSON"), (b"[]", "its request is no JSON object"), (b"\xff", "is not JSON")],
)
async def test_answer_to_no_request_is_not_recorded(
    tmp_path: Path, body: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_server(CHUNKED, chunk(STREAM), chunk(b"")) as raw, recorded_server(raw.url, tmp_path) as url:
        assert body_of(await exchange(url, post(CHAT_PATH, body))) == STREAM
    assert reason in caplog.text
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("status", [400, 401, 429, 500, 302])
async def test_refusal_passes_and_leaves_no_recording(tmp_path: Path, status: int) -> None:
    answer = f'HTTP/1.1 {status} No\r\nLocation: /x\r\nContent-Length: 12\r\n\r\n{{"error": 12'.encode()
    async with raw_server(answer) as raw, recorded_server(raw.url, tmp_path) as url:
        got = await exchange(url, SENT)
    assert got == answer.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert names_in(tmp_path) == []


async def test_whole_answer_is_recorded(tmp_path: Path) -> None:
    body = b'{"id": "chatcmpl-1"}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    async with raw_server(head + body) as raw, recorded_server(raw.url, tmp_path) as url:
        assert (await exchange(url, SENT.replace(b"stream", b"Stream"))).endswith(body)
    assert frames(tmp_path) == [AnswerBegun(200, "application/json"), WireBody(data={"id": "chatcmpl-1"})]


@pytest.mark.parametrize(
    ("sent", "status", "line"),
    [
        (
            b"GET /v1/responses HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            426,
            "WebSocket",
        ),
        (b"GET http://other/ HTTP/1.1\r\nHost: other\r\n\r\n", 400, "alone"),
        (b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n", 400, "alone"),
        (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", 400, "alone"),
    ],
)
async def test_proxy_serves_one_upstream_over_http(tmp_path: Path, sent: bytes, status: int, line: str) -> None:
    sent = sent.replace(b"Host", b"Connection: close\r\nHost") if status == 400 else sent
    async with raw_server(CHUNKED, chunk(b"")) as raw, recorded_server(raw.url, tmp_path) as url:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
            writer.close()
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert line in body.decode()
    assert raw.requests == []


async def test_slow_client_slows_the_server(tmp_path: Path) -> None:
    piece, given = chunk(b"x" * 2**16), 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while not writer.is_closing():
            writer.write(piece)
            given += 1
            await writer.drain()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        recorded_server(upstream, tmp_path) as url,
        aiohttp.ClientSession() as client,
        client.get(url) as answer,
    ):
        await answer.content.readexactly(1)
        seen = -1
        while given != seen:  # until nothing more is taken
            seen = given
            await asyncio.sleep(0.3)
        assert given < 1000
    server.close()


async def test_secrets_are_not_written(tmp_path: Path) -> None:
    tool = {"type": "mcp", "server_label": "s", "server_url": "https://h/SECRET", "headers": {"a": "SECRET"}}
    body = REQUEST | {
        "cache_salt": "SECRET",
        "x_unknown": "SECRET",
        "tools": [tool | {"authorization": "SECRET"}],
        "mcp_servers": [{"authorization_token": "SECRET"}],
    }
    secret = ("Authorization: Bearer SECRET", "x-api-key: SECRET", "Cookie: SECRET", "anthropic-version: 1")
    echoed = b'data: {"response": {"cache_salt": "SECRET", "tools": [%b]}}\n\n' % json.dumps(tool).encode()
    async with raw_server(CHUNKED, chunk(echoed), chunk(b"")) as raw, recorded_server(raw.url, tmp_path) as url:
        assert echoed in await exchange(url, post(f"{CHAT_PATH}?key=SECRET", json.dumps(body).encode(), *secret))
    assert raw.requests[0].count(b"SECRET") == 10
    folder = only_folder(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in map(folder.joinpath, names_in(folder)):
        assert "SECRET" not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (recording,) = wire_recordings(tmp_path)
    header = recording.header
    assert header.left_out == ("cache_salt", "x_unknown", "mcp_servers")
    assert (header.upstream, header.dialect, header.path) == (f"{raw.url}/", "chat", CHAT_PATH)
    assert (header.headers, header.model) == ({"anthropic-version": "1"}, "m")


async def test_texts_are_not_written_if_the_operator_says_so(tmp_path: Path) -> None:
    delta = {"content": "Private 7.", "token_ids": [1], "role": "assistant"}
    call = {"id": "call_1", "function": {"name": "look", "arguments": '{"at": "Paris"}'}}
    choice = {"delta": delta | {"tool_calls": [call]}, "finish_reason": "stop", "logprobs": {"content": []}}
    data = b"data: %b\n\ndata: broken Private\n\ndata: [DONE]\n\n" % json.dumps({"choices": [choice], "n": 1}).encode()
    async with (
        raw_server(CHUNKED, chunk(data), chunk(b"")) as raw,
        recorded_server(raw.url, tmp_path, keeps_texts=False) as url,
    ):
        await exchange(url, SENT)
    folder = only_folder(tmp_path)
    assert names_in(folder) == ["wire.jsonl"]
    masked = {"content": "xxxxxxx 0.", "role": "assistant"}
    masked_call = {"id": "call_1", "function": {"name": "look", "arguments": '{"xx": "xxxxx"}'}}
    expected = {"delta": masked | {"tool_calls": [masked_call]}, "finish_reason": "stop"}
    assert frames(tmp_path)[1:] == [
        WireEvent(data={"choices": [expected], "n": 1}),
        WireEvent(text="xxxxxx xxxxxxx"),
        WireEvent(text="[DONE]"),
    ]


async def test_condition_chooses_what_is_recorded(tmp_path: Path) -> None:
    condition = Condition.parse("x-record=yes")
    async with (
        raw_server(CHUNKED, chunk(STREAM), chunk(b"")) as raw,
        recorded_server(raw.url, tmp_path, condition=condition) as url,
    ):
        await exchange(url, SENT)
        await exchange(url, SENT.replace(b"Host", b"X-Record: yes\r\nHost"))
        await exchange(url, SENT.replace(b"Host", b"X-Record: no\r\nHost"))
    assert len(wire_recordings(tmp_path)) == 1


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h/?key=1", "http://h/#a"]
)
def test_upstream_is_a_url_without_credentials(url: str) -> None:
    with pytest.raises(CannotRun, match="--upstream: "):
        checked(url)


async def test_folder_of_a_url_is_put_before_the_path(tmp_path: Path) -> None:
    async with raw_server(CHUNKED, chunk(b"")) as raw, recorded_server(f"{raw.url}/api/", tmp_path) as url:
        await exchange(url, SENT)
    assert raw.requests[0].startswith(b"POST /api/v1/chat/completions HTTP/1.1\r\n")
    assert wire_recordings(tmp_path)[0].header.upstream == f"{raw.url}/<redacted>"


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_client_that_speaks_no_http_is_logged_in_one_line(
    tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with raw_server() as raw, recorded_server(raw.url, tmp_path) as url:
        got = await exchange(url, sent)
    assert b" 400 Bad Request" in got
    assert b"penstock record: The request is not valid HTTP." in got
    assert [(record.levelname, record.exc_info) for record in caplog.records if "HTTP" in record.message] == [
        ("INFO", None)
    ]
