"""A small share of the fuzzer over a server process, and the faults that it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.bench.fuzz import fire
from tests.bench.fuzz.__main__ import hostile, many_streams
from tests.bench.fuzz.embedders import attack_embeddings
from tests.bench.fuzz.floods import flood
from tests.bench.fuzz.forms import attack_forms
from tests.bench.fuzz.heavy import send_heavy
from tests.bench.fuzz.hostile import HostileRequest, RawConnection
from tests.bench.fuzz.limits import exceed_limits, limited_process
from tests.bench.fuzz.marks import forge_marks
from tests.bench.fuzz.measured import PASSING, measured_process
from tests.bench.fuzz.publishers import attack_index
from tests.bench.fuzz.sharing import CALLS, take_all
from tests.bench.fuzz.sockets import attack_sockets
from tests.bench.fuzz.tools import attack_tools, calling_process
from tests.support.api_clients import ApiClient
from tests.support.server_process import running_process
from tests.support.tool_servers import web_server

STREAM = "event: response.completed\ndata: {}\n\n"
ERROR = {"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}}


async def test_hostile_requests_cause_no_server_error_traceback_or_hang(tmp_path: Path) -> None:
    async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "quick", "--log-level", "INFO") as server:
        found = await hostile(server, bodies=300, connections=100, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert {"200", "400"} <= found["bodies"].statuses.keys() & found["raw connections"].statuses.keys()


async def test_floods_of_forms_are_refused_and_names_forge_no_line(tmp_path: Path) -> None:
    async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "quick", "--log-level", "INFO") as server:
        found = await attack_forms(server)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert {"200", "400"} <= found["hostile names"].statuses.keys()


async def test_each_of_many_streams_has_one_end(tmp_path: Path) -> None:
    options = ("--max-background", "100", "--drain-timeout", "0.5")
    async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "long", *options) as server:
        whole, stopped, afterwards = (await many_streams(server, 100)).values()
    assert (whole.statuses, stopped.statuses) == ({"incomplete": 100}, {"failed": 100})
    assert whole.faults + stopped.faults + afterwards.faults == []


async def test_attacks_on_sockets_end_as_they_must_and_disturb_no_other_client(tmp_path: Path) -> None:
    async with measured_process(tmp_path, "slow") as server:
        found = await attack_sockets(server)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert found["the ordinary client"].statuses["completed"] > 0


async def test_heavy_requests_are_answered(tmp_path: Path) -> None:
    async with measured_process(tmp_path, "quick", *PASSING) as server:
        found = await send_heavy(server, share=500)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []


async def test_hostile_mcp_servers_disturb_no_other_client(tmp_path: Path) -> None:
    async with calling_process(tmp_path) as server:
        found = await attack_tools(server)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert found["an ordinary client of tools"].statuses.keys() == {"200"}


async def test_each_request_of_a_limited_key_counts(tmp_path: Path) -> None:
    async with limited_process(tmp_path) as server:
        found = await exceed_limits(server, 150, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert found["declared bodies of a limited key"].statuses["429"] > 0
    assert found["an ordinary key"].statuses.keys() == {"200"}


async def test_events_of_hostile_engines_stay_bounded_and_hide_no_other_engine(tmp_path: Path) -> None:
    found = await attack_index(tmp_path, 60, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert found["those of an honest one"].statuses == {"followed": 6}


async def test_answers_of_hostile_embedders_fail_files_cleanly(tmp_path: Path) -> None:
    found = await attack_embeddings(tmp_path, 20, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert found["answers of an embedder"].statuses["failed"] > 0


async def test_files_forge_no_mark(tmp_path: Path) -> None:
    found = await forge_marks(tmp_path, 20, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    assert sum(outcome.statuses["200"] for outcome in found.values()) == 20


async def test_greedy_key_leaves_uploads_and_webhooks_to_others(tmp_path: Path) -> None:
    found = await take_all(tmp_path, 1, seed=1)
    assert [fault for outcome in found.values() for fault in outcome.faults] == []
    uploads, calls, _ = found.values()
    assert (uploads.statuses, calls.statuses) == ({"200": 1}, {"delivered": CALLS})


async def test_ordinary_client_goes_on_beside_bodies_that_do_not_end(tmp_path: Path) -> None:
    async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "quick") as server:
        unfinished, ordinary, afterwards = (await flood(server, 20, 0.5)).values()
    assert unfinished.statuses == {"open until the client left": 20}
    assert ordinary.statuses.keys() == {"200"}
    assert unfinished.faults + ordinary.faults + afterwards.faults == []


# Faults are found


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def break_off(request: web.Request) -> web.Response:
    assert request.transport
    request.transport.abort()
    return web.Response()


def answering(
    status: int = 200, json: object = None, stream: str = ""
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        if stream:
            return web.Response(text=stream, content_type="text/event-stream")
        return web.json_response(json, status=status)

    return answer


@pytest.mark.parametrize(
    ("handler", "fault"),
    [
        (answering(json={}), ""),
        (answering(400, ERROR), ""),
        (answering(stream=f"{STREAM}data: [DONE]\n\n"), ""),
        (answering(500, ERROR), "500, "),
        (answering(400, {"error": "No."}), "400, "),
        (answering(200, ERROR), "200, "),
        (answering(stream=STREAM), "a stream without one end"),
        (answering(stream=f"{STREAM}{STREAM}data: [DONE]\n\n"), "a stream without one end"),
        (break_off, "no answer"),
        (hang, "no end after"),
    ],
)
async def test_wrong_answer_is_a_fault(
    handler: Callable[[web.Request], Awaitable[web.Response]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if handler is hang:
        monkeypatch.setattr(fire, "HANGS", 0.3)
    async with web_server(handler) as url, aiohttp.ClientSession() as client:
        outcome = await fire.fire_bodies(ApiClient(url, client), [HostileRequest("/v1/responses", b"{}")])
    assert [found[: len(fault)] for found in outcome.faults] == ([fault] if fault else [])


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 503 No\r\n\r\n", b"noise"]
)
async def test_wrong_answer_on_a_raw_connection_is_a_fault(answer: bytes) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, aiohttp.ClientSession() as client:
        host, port = server.sockets[0].getsockname()
        shots = [RawConnection(b"GET / HTTP/1.1\r\n\r\n", "half-close")]
        outcome = await fire.fire_connections(ApiClient(f"http://{host}:{port}", client), shots)
    assert len(outcome.faults) == 1
