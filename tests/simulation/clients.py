"""The clients of a simulation: each is a process with a random of its own, and follows a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.simulation.children import MODEL_NAMES
from tests.simulation.ledger import ENDED, Admitted, Known, Reading, Violation, response_of

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

UNSTORED = frozenset({"/v1/chat/completions", "/v1/messages"})
"""The paths of requests whose answers are not stored."""

MODES = ("sync", "stream", "background", "background stream")


class Broken(Exception):
    """The connection broke, or the server could not be reached."""


def is_not_kept(method: str, path: str, body: Json | None) -> bool:
    """Return True for a request after which the store may lack an answer that was given."""
    deletes = method == "DELETE" and path.startswith("/v1/responses")
    return deletes or path in UNSTORED or (body is not None and not body.get("store", True))


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

    @asynccontextmanager
    async def asked(self, method: str, path: str, **body: Any) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request, and check and note the status of its answer."""
        began = self.world.loop.time()
        others = is_not_kept(method, path, body.get("json"))
        self.world.ledger.others[self.owner] += others
        is_counted = method == "POST" and not path.endswith("/cancel")
        if is_counted:
            self.world.ledger.sent[self.owner] += 1
        async with self.http.request(method, self.url(path), **body) as answer:
            self.check_status(answer.status, path)
            self.world.ledger.others[self.owner] -= others and answer.status in BUSY
            if is_counted and answer.status not in BUSY:
                self.world.ledger.admitted.append(Admitted(self.owner, began, self.world.loop.time()))
            yield answer

    async def once(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        """Send a request; return the status and the body of its answer.  Raises `Broken`."""
        try:
            async with self.asked(method, path, json=body) as answer:
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

    async def knock(self) -> None:
        """Send a request that is refused for its body, and counts all the same."""
        sent = self.world.ledger.sent[self.owner]
        with suppress(Broken):
            status, answer = await self.once("POST", "/v1/responses", {"input": 1})
            if status not in (400, *BUSY):
                raise Violation(f"a wrong body was answered with {status} {answer}")
            if status == 429 and sent < self.world.surely_admitted:
                raise Violation(f"a key was refused after {sent} requests: {answer}")

    async def refused_all(self, *requests: tuple[str, str]) -> None:
        """Check that each request is answered as if what it names did not exist."""
        for method, path in requests:
            status, answer = await self.insist(method, path, {} if method == "POST" else None)
            if status != 404:
                raise Violation(f"{method} {path} of another owner was answered with {status} {answer}")

    @staticmethod
    def check_status(status: int, path: str) -> None:
        """Raise `Violation` if a status is the fault of a server."""
        if status in (500, 502, 504):
            raise Violation(f"{path} was answered with status {status}")

    # Responses

    def body(self, mode: str, **fields: Any) -> Json:
        """Return a request for a response."""
        modes = {"background": mode.startswith("background"), "stream": mode.endswith("stream")}
        body = {"input": "Count.", "metadata": self.wanted(), **modes, **fields}
        if self.world.plan.has_models:
            body["model"] = body["metadata"]["model"] = self.draw.choice(MODEL_NAMES)
        return body

    def wanted(self) -> dict[str, str]:
        """Return what the engine shall do for a request."""
        wanted = {
            "nonce": self.nonce(),
            "last": str(self.draw.choice((1, 3, 12, 40))),
            "seconds": str(self.draw.choice((0, 0.01, 0.2))),
        }
        if self.draw.random() < 0.1:
            wanted["fault"] = self.draw.choice(("refuse", "break"))
        if self.draw.random() < 0.2:
            wanted["wait"] = str(self.draw.choice((1, 10)))
        return wanted

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
                async with self.asked("POST", "/v1/responses", json=body) as answer:
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
                if reading.is_refusal:
                    self.world.ledger.refused.add(body["metadata"]["nonce"])
                    return None
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
        """Read the stream of a response from an event on, over as many connections as that takes.

        One that may have been run again is read from the start, each time.
        """
        while True:
            after = -1 if self.world.may_run_again(known) else after
            reading = known.reading(after)
            path = f"/v1/responses/{known.id}?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
            try:
                async with self.asked("GET", path) as answer:
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
            if reading.has_ended or (reading.is_whole and not reading.frames):  # event ``after`` was the end
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

    async def run(self, script: Callable[[Client], Awaitable[None]]) -> None:
        """Follow a script; raise `Violation` if it hangs."""
        try:
            async with asyncio.timeout(PATIENCE), self.session():
                await script(self)
        except TimeoutError as error:
            raise Violation(f"the client {self.name} waits for ever") from error
