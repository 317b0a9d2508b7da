"""The clients of a simulation: each is a process with a random of its own, and follows one of a few scripts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.simulation.ledger import ENDED, Known, Reading, Violation, response_of
from tests.simulation.servers import LIMITED

if TYPE_CHECKING:
    from tests.simulation.world import World

Json = dict[str, Any]

PATIENCE = 600.0
"""Seconds after which a client hangs."""

PAUSE = 0.5
"""Seconds between two attempts of a client."""

HASTY = 0.15
"""The share of requests whose clients leave at once."""

LOOKS, LOOK_SECONDS = 40, 0.1
"""Looks for a response that runs, and about the seconds between two."""

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=45.0)
"""The patience of clients with one connection: servers send a sign of life every five seconds."""

BUSY = frozenset({429, 503})
"""The statuses after which a client tries again."""

MODES = ("sync", "stream", "background", "background stream")


class Broken(Exception):
    """The connection broke, or the server could not be reached."""


class Client:
    """One client, which does one action of a plan."""

    def __init__(self, world: World, name: str, owner: str | None = None) -> None:
        self.world, self.name = world, name
        self.draw = random.Random(f"{world.plan.seed} {name}")
        self.owner = owner or self.draw.choice(("alice", "bob"))

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None, None]:
        """Keep connections for the length of a block."""
        headers = {"Authorization": f"Bearer {self.world.keys[self.owner]}"}
        async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as self.http:
            yield

    # Requests

    def url(self, path: str) -> str:
        """Return the URL of a path at one of the servers."""
        return self.draw.choice(self.world.servers).url + path

    async def once(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        """Send a request; return the status and the body of its answer.  Raises `Broken`."""
        try:
            async with self.http.request(method, self.url(path), json=body) as answer:
                self.note(answer.status, path, is_post=body is not None)
                whole = await answer.json()
                self.world.saw("answer", answer.url.host)
                return answer.status, whole
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Broken from error

    async def insist(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        """Send a request until a server that is not busy has answered it."""
        while True:
            try:
                status, answer = await self.once(method, path, body)
            except Broken:
                status, answer = 503, {}
            if status not in BUSY:
                return status, answer
            await asyncio.sleep(PAUSE)

    def note(self, status: int, path: str, *, is_post: bool) -> None:
        """Note the status of an answer; raise `Violation` if it is the fault of a server."""
        if status in (500, 502, 504):
            raise Violation(f"{path} was answered with status {status}")
        if is_post:
            self.world.ledger.statuses.append((self.world.loop.time(), self.owner, status))

    # Responses

    def body(self, mode: str, **fields: Any) -> Json:
        """Return a request for a response."""
        wanted = {
            "nonce": self.nonce(),
            "last": str(self.draw.choice((1, 3, 12, 40))),
            "seconds": str(self.draw.choice((0, 0.01, 0.2))),
        }
        if self.draw.random() < 0.1:
            wanted["fault"] = self.draw.choice(("refuse", "break"))
        if self.draw.random() < 0.2:
            wanted["wait"] = str(self.draw.choice((1, 10)))
        modes = {"background": mode.startswith("background"), "stream": mode.endswith("stream")}
        return {"input": "Count.", "metadata": wanted, **modes, **fields}

    def nonce(self) -> str:
        """Return a text that no other request has."""
        return f"{self.draw.getrandbits(64):x}"

    async def create(self, body: Json, mode: str, leaves_after: int = -1) -> Known | None:
        """Create a response and read it to its end; return None if the client does not know its id.

        A client that ``leaves_after`` a number of events closes its connection then; a hasty one does not wait at all.
        """
        if self.draw.random() < HASTY:
            body["metadata"]["hasty"] = "yes"
            with suppress(TimeoutError):
                async with asyncio.timeout(self.draw.uniform(0.0, 0.03)):
                    return await self._created(body, mode, leaves_after)
            return None
        return await self._created(body, mode, leaves_after)

    async def _created(self, body: Json, mode: str, leaves_after: int) -> Known | None:
        while True:
            try:
                async with self.http.post(self.url("/v1/responses"), json=body) as answer:
                    self.note(answer.status, "/v1/responses", is_post=True)
                    if answer.status in BUSY:
                        self.world.ledger.refused.add(body["metadata"]["nonce"])
                    if answer.status in BUSY and self.draw.random() < 0.8:
                        body["metadata"]["nonce"] = self.nonce()
                        await asyncio.sleep(PAUSE * 4)
                        continue
                    if answer.status != 200:
                        return None
                    if mode.endswith("stream"):
                        return await self._streamed(answer, body, mode, leaves_after)
                    whole = await answer.json()
                    self.world.saw("answer", answer.url.host)
            except (aiohttp.ClientError, TimeoutError):
                return None
            known = self.accepted(whole, body, mode)
            known.take(whole)
            if mode == "background":
                await self.poll(known)
            return known

    def accepted(self, response: Json, body: Json, mode: str) -> Known:
        """Note a response that a server has accepted."""
        is_stored = body.get("store", True)
        known = Known(response["id"], self.owner, mode, is_stored, body["metadata"], self.world.loop.time())
        known.cancelled = "hasty" in body["metadata"]
        return self.world.ledger.add(known)

    async def _streamed(self, answer: aiohttp.ClientResponse, body: Json, mode: str, leaves_after: int) -> Known | None:
        reading, known = Reading(-1), None
        try:
            async for data in answer.content.iter_any():
                reading.feed(data)
                if known is None and reading.frames:
                    known = self.accepted(response_of(reading.frames[0]), body, mode)
                    known.readings.append(reading)
                    self.world.saw("id", answer.url.host)
                if reading.has_ended:
                    self.world.saw("end", answer.url.host)
                if 0 <= leaves_after <= len(reading.frames) and known:
                    known.cancelled |= not mode.startswith("background")
                    answer.close()
                    break
        except (aiohttp.ClientError, TimeoutError):
            if known:  # the server may notice as well, and cancel it
                known.cancelled |= not mode.startswith("background")
        if known and not reading.has_ended and known.is_stored:
            await asyncio.sleep(self.draw.choice((0.0, 0.1, 3.0)))
            await self.follow(known, reading.last)
        return known

    async def follow(self, known: Known, after: int = -1) -> None:
        """Read the stream of a response from an event on, over as many connections as that takes."""
        while True:
            reading = known.reading(after)
            path = f"/v1/responses/{known.id}?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
            try:
                async with self.http.get(self.url(path)) as answer:
                    self.note(answer.status, path, is_post=False)
                    if answer.status == 404:
                        self.missing(known)
                        return
                    if answer.status == 200:
                        async for data in answer.content.iter_any():
                            reading.feed(data)
                    elif answer.status not in BUSY:
                        raise Violation(f"{path} was answered with {answer.status} {await answer.text()}")
            except (aiohttp.ClientError, TimeoutError):
                pass
            if reading.has_ended:
                return
            after = reading.last
            await asyncio.sleep(PAUSE)

    def missing(self, known: Known) -> None:
        """Raise `Violation` unless a response may be missing."""
        if not known.deleting and known.is_stored and not self.world.may_lose(known):
            raise Violation(f"{known.id} was accepted, and is not found")

    async def poll(self, known: Known) -> None:
        """Retrieve a response until it has ended."""
        while True:
            status, answer = await self.insist("GET", f"/v1/responses/{known.id}")
            if status == 404:
                self.missing(known)
                return
            known.take(answer)
            if answer["status"] in ENDED:
                return
            await asyncio.sleep(self.draw.choice((0.1, 1.0)))

    # Scripts

    async def ask(self) -> None:
        """Create a response, and perhaps leave it for a while."""
        mode = self.draw.choice(MODES)
        fields: Json = {} if mode.startswith("background") or self.draw.random() < 0.8 else {"store": False}
        leaves_after = self.draw.choice((-1, -1, 1, 5, 15))
        await self.create(self.body(mode, **fields), mode, leaves_after)

    async def talk(self) -> None:
        """Create responses in a conversation, some of them at the same time."""
        if self.draw.random() < 0.3:
            self.owner = LIMITED
        async with self.session():
            await self._talked()

    async def _talked(self) -> None:
        status, conversation = await self.insist("POST", "/v1/conversations", {})
        if status != 200:
            raise Violation(f"a conversation was answered with {status} {conversation}")
        self.world.ledger.conversations[conversation["id"]] = self.owner
        for _ in range(self.draw.randint(1, 4)):
            modes = self.draw.choices(MODES, k=self.draw.choice((1, 1, 2)))
            bodies = [self.body(mode, conversation=conversation["id"]) for mode in modes]
            leaving = [self.draw.choice((-1, -1, 5)) for _ in modes]
            await asyncio.gather(*map(self.create, bodies, modes, leaving))

    async def read(self) -> None:
        """Follow a response of the owner from any event on."""
        if known := await self.target():
            await self.follow(known, self.draw.choice((-1, -1, 0, 5, 30, 1000)))

    async def cancel(self) -> None:
        """Cancel a response of the owner."""
        if known := await self.target():
            known.cancelled = True
            status, answer = await self.insist("POST", f"/v1/responses/{known.id}/cancel", {})
            if status == 404:
                self.missing(known)
            elif status == 200:
                known.take(answer)
                if answer["status"] not in ENDED:
                    raise Violation(f"cancelled, {known.id} is {answer['status']}")
            elif status != 400:
                raise Violation(f"cancelling {known.id} was answered with {status} {answer}")

    async def delete(self) -> None:
        """Delete a response of the owner."""
        if known := await self.target():
            known.deleting = known.cancelled = True
            status, answer = await self.insist("DELETE", f"/v1/responses/{known.id}")
            if status not in (200, 404):
                raise Violation(f"deleting {known.id} was answered with {status} {answer}")
            known.deleted = status == 200

    async def snoop(self) -> None:
        """Try to reach what belongs to another owner."""
        if not (known := await self.target(is_own=False)):
            return
        path = f"/v1/responses/{known.id}"
        for method, tried in (
            ("GET", path),
            ("GET", f"{path}?stream=true"),
            ("POST", f"{path}/cancel"),
            ("DELETE", path),
        ):
            status, answer = await self.insist(method, tried, {} if method == "POST" else None)
            if status != 404:
                raise Violation(f"{method} {tried} of another owner was answered with {status} {answer}")

    async def burst(self) -> None:
        """Send more requests at once than a key may have."""
        self.owner = LIMITED
        async with self.session():
            modes = self.draw.choices(("sync", "stream"), k=self.draw.randint(4, 8))
            leaving = [self.draw.choice((-1, -1, 1, 3)) for _ in modes]
            await asyncio.gather(*map(self.create, [self.body(mode) for mode in modes], modes, leaving))

    async def socket(self) -> None:
        """Create responses one after another over a WebSocket, and perhaps leave it."""
        leaves_after = self.draw.choice((-1, -1, 20))
        known: Known | None = None
        try:
            async with self.http.ws_connect(self.url("/v1/responses")) as socket:
                for _ in range(self.draw.randint(1, 3)):
                    body = self.body("socket")
                    del body["background"], body["stream"]
                    await socket.send_json({"type": "response.create", **body})
                    known, reading = None, Reading(-1)
                    while not reading.has_ended:
                        message = await socket.receive(TIMEOUT.sock_read)
                        if message.type is not aiohttp.WSMsgType.TEXT:
                            raise aiohttp.ClientConnectionError
                        event = json.loads(message.data)
                        if event["type"] == "error":
                            self.note(event["status"], "the socket", is_post=True)
                            break
                        reading.take(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), message.data.encode()))
                        if known is None:
                            known = self.accepted(event["response"], body, "socket")
                            known.readings.append(reading)
                        if len(reading.frames) == leaves_after:
                            known.cancelled = True
                            return
        except (aiohttp.ClientError, TimeoutError):
            if known:
                known.cancelled = True

    async def target(self, *, is_own: bool = True) -> Known | None:
        """Return a stored response of the owner, or of another one, that runs if possible; None if there is none."""
        known: list[Known] = []
        for _ in range(LOOKS):
            known = [
                each
                for each in self.world.ledger.responses.values()
                if (each.owner == self.owner) is is_own and each.is_stored
            ]
            if running := [each for each in known if not each.has_ended]:
                await asyncio.sleep(self.draw.choice((0.0, 0.0, 0.02, 0.3, 2.0)))
                return self.draw.choice(running)
            await asyncio.sleep(self.draw.uniform(0.0, 2 * LOOK_SECONDS))
        return self.draw.choice(known) if known else None

    async def run(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Follow a script; raise `Violation` if it hangs."""
        try:
            async with asyncio.timeout(PATIENCE), self.session():
                await script()
        except TimeoutError as error:
            raise Violation(f"the client {self.name} waits for ever") from error
