"""A frontend that leaves: its clients go to other frontends, and nothing that it has received is refused."""

from __future__ import annotations

import os
import signal
import socket

from aiohttp import web

from penstock.api.frontends.frontend import Frontend
from penstock.api.frontends.frontend_config import FrontendConfig
from penstock.api.frontends.link import Draining, LastConnectionSent, new_link
from penstock.api.http.connections import Runner
from penstock.api.settings import Settings
from penstock.api.start.share import FrontendState, Share
from tests.support.api_clients import wait_until
from tests.support.server import ScriptedServer


async def test_clients_are_asked_to_close_their_connections(served: ScriptedServer) -> None:
    served.scheduler.in_flight.leaving = True
    async with served.client.get(f"{served.url}/v1/models") as answer:
        assert answer.headers["Connection"] == "close"


async def test_socket_can_still_be_opened(served: ScriptedServer) -> None:
    served.scheduler.in_flight.leaving = True
    async with served.client.ws_connect(f"{served.url}/v1/responses") as opened:
        await opened.send_json({"type": "response.create", "input": "Hi"})
        assert (await opened.receive_json())["type"] == "response.created"


async def test_connection_that_arrives_last_is_waited_for(served: ScriptedServer) -> None:
    ours, theirs = new_link()
    with socket.create_server(("127.0.0.1", 0)) as listening, ours.end, theirs:
        share = Share(states=[FrontendState()])
        frontend = Frontend(
            FrontendConfig(
                settings=Settings.model_validate({}),
                share=share,
                link=theirs,
                listening=listening,
                siblings=(),
                url="http://one.example",
                output=(1, 2),
            )
        )
        runner = Runner(web.Application())
        await runner.setup()
        async with frontend.attached(runner, served.scheduler):
            os.kill(os.getpid(), signal.SIGTERM)
            await wait_until(lambda: list(ours.messages()) == [Draining()])
            with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
                assert ours.pass_on(accepted)
                assert ours.send(LastConnectionSent())
                await wait_until(lambda: runner.counts.open or frontend.stop.is_set())
                assert not frontend.stop.is_set()
            await wait_until(frontend.stop.is_set)
        await runner.cleanup()
