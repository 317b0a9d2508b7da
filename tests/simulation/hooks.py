"""The receiver of webhooks: a process of its own, which takes note of what it gets, and at times takes nothing."""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from aiohttp import web

from penstock.api.http.api_key import digest_of
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.servers import HOOKS_HOST, PORT, WEBHOOK_SECRET

TROUBLES = ("refuses", "is silent", "breaks off")
"""What a receiver may do instead of taking a webhook."""

SILENCE = 20.0
"""Seconds until a silent receiver answers, when the server waits no longer."""


class Hook(NamedTuple):
    """A webhook that was received: the owner whose URL got it, and what it says."""

    owner: str
    id: str
    kind: str
    response_id: str


@dataclass
class HookReceiver:
    """The receiver of the webhooks of all owners, each at a path of its own."""

    loop: SimulatedLoop
    keys: Mapping[str, str]
    taken: list[Hook] = field(default_factory=list)
    forged: list[str] = field(default_factory=list)
    """The paths of webhooks without the signature that belongs there."""
    trouble: str = ""
    until: float = 0.0
    """The time until which it has its trouble."""

    def start(self) -> None:
        """Listen, until the end of the simulation."""
        context = copy_context()
        context.run(PROCESS.set, Process(HOOKS_HOST))
        self._serving = self.loop.create_task(self._serve(), context=context)

    def fail(self, draw: random.Random) -> None:
        """Have one of the troubles for a while."""
        self.trouble, self.until = draw.choice(TROUBLES), self.loop.time() + draw.uniform(1.0, 40.0)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/{owner}", self._take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOOKS_HOST, PORT).start()

    async def _take(self, request: web.Request) -> web.Response:
        owner, body = request.match_info["owner"], await request.read()
        if not self._is_signed(owner, request.headers, body):
            self.forged.append(request.path)
        trouble = self.trouble if self.loop.time() < self.until else ""
        if trouble == "is silent":
            await asyncio.sleep(SILENCE)
        if trouble == "breaks off" and request.transport:
            request.transport.close()
        if trouble:
            return web.Response(status=500)
        event = await request.json()
        self.taken.append(Hook(owner, event["id"], event["type"], event["data"]["id"]))
        return web.Response()

    def _is_signed(self, owner: str, headers: Mapping[str, Any], body: bytes) -> bool:
        """Check the signature as Standard Webhooks describes it; each owner with a URL has a key of its own."""
        key = WEBHOOK_SECRET.encode()
        if owner in self.keys:
            key = hmac.digest(key, digest_of(self.keys[owner]).encode(), sha256)
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        signature: str = headers["webhook-signature"]
        return signature == "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()
