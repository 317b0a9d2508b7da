"""The scripts of clients: what each kind of client does with responses and conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import aiohttp

from tests.simulation.clients import MODES, TIMEOUT, Client, Json
from tests.simulation.ledger import ENDED, Known, Reading, Violation
from tests.simulation.servers import LIMITED

Script: TypeAlias = Callable[[Client], Awaitable[None]]

FLOOD = (15, 40)
"""The fewest and the most requests of a flood, of which a key may have `PER_MINUTE`."""


async def ask(client: Client) -> None:
    """Create a response, and perhaps leave it for a while."""
    mode = client.draw.choice(MODES)
    fields: Json = {} if mode.startswith("background") or client.draw.random() < 0.8 else {"store": False}
    leaves_after = client.draw.choice((-1, -1, 1, 5, 15))
    await client.create(client.body(mode, **fields), mode, leaves_after)


async def talk(client: Client) -> None:
    """Create responses in a conversation, some of them at the same time."""
    if client.draw.random() < 0.3:
        client.owner = LIMITED
    async with client.session():
        await _talked(client)


async def _talked(client: Client) -> None:
    status, conversation = await client.insist("POST", "/v1/conversations", {})
    if status != 200:
        raise Violation(f"a conversation was answered with {status} {conversation}")
    client.world.ledger.conversations[conversation["id"]] = client.owner
    for _ in range(client.draw.randint(1, 4)):
        modes = client.draw.choices(MODES, k=client.draw.choice((1, 1, 2)))
        bodies = [client.body(mode, conversation=conversation["id"]) for mode in modes]
        leaving = [client.draw.choice((-1, -1, 5)) for _ in modes]
        await asyncio.gather(*map(client.create, bodies, modes, leaving))


async def read(client: Client) -> None:
    """Follow a response of the owner from any event on."""
    if known := await client.target():
        await client.follow(known, client.draw.choice((-1, -1, 0, 5, 30, 1000)))


async def cancel(client: Client) -> None:
    """Cancel a response of the owner."""
    if known := await client.target():
        known.cancelled = True
        status, answer = await client.insist("POST", f"/v1/responses/{known.id}/cancel", {})
        if status == 404:
            client.missing(known)
        elif status == 200:
            known.take(answer)
            if answer["status"] not in ENDED:
                raise Violation(f"cancelled, {known.id} is {answer['status']}")
        elif status != 400:
            raise Violation(f"cancelling {known.id} was answered with {status} {answer}")


async def delete(client: Client) -> None:
    """Delete a response of the owner."""
    if known := await client.target():
        known.deleting = known.cancelled = True
        status, answer = await client.insist("DELETE", f"/v1/responses/{known.id}")
        if status not in (200, 404):
            raise Violation(f"deleting {known.id} was answered with {status} {answer}")
        known.deleted = status == 200


async def snoop(client: Client) -> None:
    """Try to reach what belongs to another owner."""
    if known := await client.target(is_own=False):
        path = f"/v1/responses/{known.id}"
        await client.refused_all(
            ("GET", path), ("GET", f"{path}?stream=true"), ("POST", f"{path}/cancel"), ("DELETE", path)
        )


async def burst(client: Client) -> None:
    """Send more requests at once than a key may have."""
    client.owner = LIMITED
    async with client.session():
        modes = client.draw.choices(("sync", "stream"), k=client.draw.randint(4, 8))
        leaving = [client.draw.choice((-1, -1, 1, 3)) for _ in modes]
        await asyncio.gather(*map(client.create, [client.body(mode) for mode in modes], modes, leaving))


async def flood(client: Client) -> None:
    """Send more requests than a key may have in a minute; none of them runs."""
    client.owner = LIMITED
    pause = client.draw.choice((0.0, 0.05, 0.5))
    async with client.session():
        for _ in range(client.draw.randint(*FLOOD)):
            await client.knock()
            await asyncio.sleep(pause)


async def socket(client: Client) -> None:
    """Create responses one after another over a WebSocket, and perhaps leave it."""
    leaves_after = client.draw.choice((-1, -1, 20))
    known: Known | None = None
    try:
        async with client.http.ws_connect(client.url("/v1/responses")) as opened:
            for _ in range(client.draw.randint(1, 3)):
                body = client.body("socket")
                del body["background"], body["stream"]
                await opened.send_json({"type": "response.create", **body})
                known, reading = None, Reading(-1)
                while not reading.has_ended:
                    message = await opened.receive(TIMEOUT.sock_read)
                    if message.type is not aiohttp.WSMsgType.TEXT:
                        raise aiohttp.ClientConnectionError
                    event = json.loads(message.data)
                    if event["type"] == "error":
                        client.check_status(event["status"], "the socket")
                        break
                    reading.take(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), message.data.encode()))
                    if known is None:
                        known = client.accepted(event["response"], body, "socket")
                        known.readings.append(reading)
                    if len(reading.frames) == leaves_after:
                        known.cancelled = True
                        return
    except (aiohttp.ClientError, TimeoutError):
        if known:
            known.cancelled = True


SCRIPTS: Mapping[str, Script] = {
    each.__name__: each for each in (ask, talk, read, cancel, delete, snoop, burst, flood, socket)
}
