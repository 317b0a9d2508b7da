"""Raw connections: broken HTTP, headers that never end, and too many of them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from penstock.api.http import connections, held_bytes, request_body
from penstock.api.http.connections import ConnectionBounds
from penstock.api.http.proxies import client_of, parsed_address
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import wait_until
from tests.support.clock import Clock
from tests.support.server import PacedEngine, PacedServer, ScriptedServer, running_server, script
from tests.support.server_process import ServerProcess, running_process, serve_with_few_descriptors, serving_process

GET_ONCE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[ScriptedServer, None]:
    """A server that waits half a second for headers, and takes three connections of one address."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(ConnectionBounds, "within", lambda _: ConnectionBounds(per_client=3, in_use=100_000))
    async with running_server(ScriptedEngine(script()), tmp_path) as server:
        yield server


async def connect(server: ScriptedServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))


async def answer_of(server: ScriptedServer, request: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    reader, writer = await connect(server)
    writer.write(request)
    async with asyncio.timeout(120):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nbroken header\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_broken_request_gets_an_error_in_json_and_no_traceback(
    served: ScriptedServer, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        head, _, body = (await answer_of(served, request_bytes)).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.exc_info]


async def test_host_that_is_not_text_is_refused(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: a\xff\r\nConnection: close\r\n\r\n"
    head, _, body = (await answer_of(served, request)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403")
    assert json.loads(body)["error"]["code"] == "host_not_allowed"
    assert not [record for record in caplog.records if record.exc_info]


async def test_connection_without_headers_is_closed(limited: ScriptedServer) -> None:
    assert await answer_of(limited, b"GET /health HTTP/1.1\r\nX-Slow: a") == b""


async def test_connection_with_a_request_stays_open(limited: ScriptedServer, clock: Clock) -> None:
    reader, writer = await connect(limited)
    for _ in range(3):
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
        await clock.move(2 * connections.HEADER_SECONDS)
    writer.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_burst_of_connections_waits_to_be_accepted() -> None:
    bound = connections.bind("127.0.0.1", 0)
    bound.listen()
    async with connections.serving(web.Application(), bound):
        clients = [socket.create_connection(bound.getsockname(), timeout=60) for _ in range(500)]  # the loop is blocked
        for client in clients:
            client.close()


async def test_one_address_cannot_take_all_connections(
    limited: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 600)
    held = [await connect(limited) for _ in range(3)]
    assert [await answer_of(limited, b"") for _ in range(2)] == [b""] * 2
    assert warnings(caplog) == [
        "127.0.0.1 has 3 connections, the most that one client may have: more are closed (1 so far)"
    ]
    assert (limited.connections.open, limited.connections.closed_of_client) == (3, 2)
    for _, writer in held:
        writer.close()
    await wait_until(lambda: limited.connections.open == 0)
    assert b"200 OK" in await answer_of(limited, GET_ONCE)


async def test_last_descriptors_are_kept_from_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine, the store and the tools need some; a request of a connection that is open still gets its answer."""
    bounds = ConnectionBounds(per_client=1000, in_use=100_000)
    monkeypatch.setattr(ConnectionBounds, "within", lambda _: bounds)
    async with running_server(ScriptedEngine(script()), tmp_path) as server:
        reader, writer = await connect(server)
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
        monkeypatch.setattr(bounds, "in_use", 2)
        assert [await answer_of(server, b"") for _ in range(3)] == [b""] * 3
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
        assert (server.connections.open, server.connections.closed_of_all) == (1, 3)
        writer.close()
    (warning,) = warnings(caplog)
    assert re.fullmatch(r"\d+ files and connections are open, .* are closed, the oldest first \(1 so far\)", warning)


async def test_clients_that_send_nothing_cannot_stop_a_server(tmp_path: Path) -> None:
    """300 connections of three addresses, at a process that may have 200 descriptors."""
    arguments = ("quick", "--no-sandbox")
    store = str(tmp_path / "responses.sqlite3")
    async with serving_process(serve_with_few_descriptors, arguments, store, tmp_path) as server:
        address = server.url.removeprefix("http://").split(":")
        held = [
            await asyncio.open_connection(*address, local_addr=(f"127.0.0.{2 + number % 3}", 0))
            for number in range(300)
        ]
        await wait_until(lambda: sum(reader.at_eof() for reader, _ in held) > 100)
        for _ in range(3):
            async with aiohttp.ClientSession() as new, new.get(f"{server.url}/v1/models") as answer:
                assert answer.status == 200
        for _, writer in held:
            writer.close()
        log = server.log.read_text()
        assert log.count("the oldest first (1 so far)") == log.count("WARNING") == 1


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_of_an_ipv6_subnet_are_one_client(address: str, client: str) -> None:
    assert client_of(parsed_address(address)) == client


async def test_request_without_host_is_refused_without_a_lookup(
    served: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup of the machine's name may block the event loop for seconds."""
    monkeypatch.setattr(socket, "getfqdn", lambda: pytest.fail("a lookup"))
    assert b'"code":"host_not_allowed"' in await answer_of(served, b"GET /v1/models HTTP/1.0\r\n\r\n")


def test_soft_limit_of_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert connections.raise_descriptor_limit() == min(hard, connections.MOST_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, connections.MOST_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def posted(headers: str) -> bytes:
    return f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n".encode()


async def first_answer(server: ScriptedServer, request_bytes: bytes) -> bytes:
    """Headers and body of an answer, from a connection that stays open."""
    reader, writer = await connect(server)
    writer.write(request_bytes)
    async with asyncio.timeout(120):
        answer = await reader.readuntil(b"}}")
    writer.close()
    return answer


async def test_declared_length_over_the_limit_is_refused_at_once(served: ScriptedServer) -> None:
    answer = await first_answer(served, posted("Content-Length: 99999999999999\r\n"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in answer


async def test_body_that_never_ends_is_refused(served: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "SECONDS", 0.2)
    answer = await first_answer(served, posted("Content-Length: 100\r\n") + b"{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


async def test_expectation_is_met_or_refused_in_json(served: ScriptedServer) -> None:
    body = b'{"input": "Hi"}'
    head = f"Content-Length: {len(body)}\r\nExpect: "
    assert b"100 Continue" in await first_answer(served, posted(f"{head}100-continue\r\n") + body)
    refused = await first_answer(served, posted(f"{head}a miracle\r\n") + body)
    assert refused.startswith(b"HTTP/1.1 417")
    assert b"'a miracle'" in refused


@pytest.fixture
async def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[PacedServer, None]:
    """A server that holds four bodies of 2,000 bytes, and all of up to 100."""
    monkeypatch.setattr(held_bytes, "SMALL", 100)
    async with running_server(PacedEngine(script()), tmp_path, max_body_bytes=2_000) as server:
        yield server


LARGE = {"input": "x" * 1_900}


async def read_answer(server: PacedServer, body: dict[str, str]) -> aiohttp.ClientResponse:
    async with server.client.post(f"{server.url}/v1/responses", json=body) as answer:
        await answer.read()
        return answer


async def test_large_bodies_beyond_the_limit_are_refused_until_others_end(crowded: PacedServer) -> None:
    writers = []
    for _ in range(4):
        _, writer = await connect(crowded)
        writer.write(posted("Content-Length: 2000\r\n") + b" " * 1_999)
        writers.append(writer)
    async with asyncio.timeout(120):
        while (refused := await read_answer(crowded, LARGE)).status != 503:
            await asyncio.sleep(0.01)
        assert refused.headers["Retry-After"] == "1"
        assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
        assert (await read_answer(crowded, {"input": "Hi"})).status == 200
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        while (await read_answer(crowded, LARGE)).status != 200:
            await asyncio.sleep(0.01)


async def test_small_body_that_arrives_slowly_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bytes, "MOST_SMALL_BYTES", 3_000)
    monkeypatch.setattr(held_bytes, "SMALL_SECONDS", 0.0)
    async with running_server(ScriptedEngine(script()), tmp_path) as served, asyncio.timeout(120):
        slow = []
        for number in range(1, 4):
            slow.append(await connect(served))
            slow[-1][1].write(posted("Content-Length: 1000\r\n") + b" " * 999)
            while served.api.held.count < number * 999:
                await asyncio.sleep(0.01)
        async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}) as answer:
            assert answer.status == 200
        assert (await slow[0][0].readline()).startswith(b"HTTP/1.1 408")
        assert served.api.held.count == 2 * 999
        for _, writer in slow:
            writer.close()


async def test_running_responses_do_not_hold_their_bodies(crowded: PacedServer) -> None:
    crowded.engine.hold()
    async with AsyncExitStack() as streams, asyncio.timeout(120):
        for _ in range(6):
            stream = crowded.client.post(f"{crowded.url}/v1/responses", json={**LARGE, "stream": True})
            assert (await streams.enter_async_context(stream)).status == 200
        crowded.engine.say_all()


async def test_large_texts_at_once_take_bounded_memory(tmp_path: Path) -> None:
    """Eight texts of 30 MB that no context holds; encoding four of them took 1.4 GB."""

    def kilobytes(server: ServerProcess, field: str) -> int:
        status = Path(f"/proc/{server.pid}/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0])

    body = b'{"input": "' + b"words and more of them " * 1_300_000 + b'"}'
    async with running_process(str(tmp_path / "responses.sqlite3"), tmp_path) as server:
        before = kilobytes(server, "VmRSS")

        async def answer() -> tuple[int, str]:
            headers = {"Content-Type": "application/json"}
            async with server.client.post(f"{server.url}/v1/responses", data=BytesIO(body), headers=headers) as refused:
                return refused.status, (await refused.json())["error"]["code"]

        answers = await asyncio.gather(*(answer() for _ in range(8)))
        assert set(answers) <= {(400, "context_length_exceeded"), (503, "rate_limit_exceeded")}
        assert (400, "context_length_exceeded") in answers
        assert kilobytes(server, "VmHWM") - before < 800_000
