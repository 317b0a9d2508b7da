"""Bytes that are no text, no JSON or no number, in every part of a request: never a server error, never a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Generator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, example, given

from penstock.api.http.auth import Keys
from penstock.api.http.origins import Origins
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import PATIENCE
from tests.support.examples import examples
from tests.support.openapi import Description
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected
from tests.support.wrong_bytes import SOCKET, RawRequest, answer_to, routes, wrong_frames, wrong_requests

KEY = "a-key-of-a-client"
HEADERS = {"Authorization": f"Bearer {KEY}"}
AUTHORIZED = (b"Authorization", HEADERS["Authorization"].encode())


REFUSALS = {"invalid_request_error", "authentication_error", "not_found_error", "request_too_large"}
"""The types of errors that a client causes, those of the Messages API among them."""


class Target(logging.Handler):
    """A server, and the faults in its log."""

    def __init__(self, runner: asyncio.Runner, served: ScriptedServer) -> None:
        super().__init__(logging.INFO)
        self.runner, self.served = runner, served
        self.faults: list[str] = []
        self.ids = runner.run(self._stored())

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.faults.append(record.getMessage())

    async def _stored(self) -> tuple[str, str]:
        ids = list[str]()
        for path, body in (("responses", {"input": "Hi"}), ("conversations", {})):
            async with self.served.client.post(f"{self.served.url}/v1/{path}", json=body, headers=HEADERS) as answer:
                ids.append((await answer.json())["id"])
        return ids[0], ids[1]

    def send(self, request: RawRequest) -> int:
        """Send a request, and check that its answer is no server error."""
        self.faults.clear()
        headers = dict([AUTHORIZED, *request.headers])
        sent = replace(request, headers=tuple(headers.items()))
        status, body = self.runner.run(asyncio.wait_for(answer_to(self.served.url, sent), PATIENCE))
        assert (status < 500, self.faults) == (True, []), body
        if status >= 400:
            assert json.loads(body)["error"]["type"] in REFUSALS
        return status

    def frame(self, sent: bytes) -> None:
        """Send a text frame over a connection of its own, and check that its answer is no server error."""
        self.faults.clear()
        answer = self.runner.run(asyncio.wait_for(self._frame(sent), PATIENCE))
        assert self.faults == [], answer
        if answer.type is not aiohttp.WSMsgType.TEXT:
            assert (answer.type, answer.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.INVALID_TEXT)
        else:
            event = json.loads(answer.data)
            assert event["type"] != "error" or event["status"] < 500

    async def _frame(self, sent: bytes) -> aiohttp.WSMessage:
        async with connected(self.served, headers=HEADERS) as client:
            await client.socket.send_frame(sent, aiohttp.WSMsgType.TEXT)
            return await client.socket.receive()


@pytest.fixture(params=["open", "keyed"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Target, None, None]:
    keys = Keys(given=[KEY]) if request.param == "keyed" else Keys()
    origins = Origins(allowed=["*"], keyed=keys.are_needed)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        served = running_server(ScriptedEngine(script()), tmp_path, keys=keys, origins=origins)
        target = Target(runner, runner.run(stack.enter_async_context(served)))
        logging.getLogger().addHandler(target)
        try:
            yield target
        finally:
            logging.getLogger().removeHandler(target)
            runner.run(stack.aclose())


IDS = ("resp_0", "conv_0", "msg_0", "tiny")


def test_no_bytes_cause_a_server_error(target: Target) -> None:
    description = Description(target.runner.run(target.served.get("/openapi.json"))[1])

    @examples(2_000, [HealthCheck.data_too_large])
    @given(wrong_requests(routes(description), [*IDS, *target.ids]))
    @example(RawRequest(b"POST", b"/v1/responses", (), b'{"model":"\xd7s","input":"hi"}'))
    @example(RawRequest(b"GET", b"/v1/responses", (*SOCKET, (b"Connection", b"Upgrade\xff"))))
    @example(RawRequest(b"GET", b"/v1/responses", (*SOCKET, (b"Sec-WebSocket-Key", b"\xff"))))
    @example(RawRequest(b"GET", b"/v1/responses", (*SOCKET, (b"Sec-WebSocket-Version", b"\xff"))))
    def send(request: RawRequest) -> None:
        target.send(request)

    send()


def test_no_frame_causes_a_server_error(target: Target) -> None:
    @examples(600, [HealthCheck.data_too_large])
    @given(wrong_frames())
    @example(b'{"type":"\xff"}')
    @example(b'{"type":"response.steer","previous_response_id":"resp_1","input":"\xff"}')
    @example(b'{"type":"response.steer","previous_response_id":"resp_1","input":"\\ud800"}')
    def send(sent: bytes) -> None:
        target.frame(sent)

    send()
