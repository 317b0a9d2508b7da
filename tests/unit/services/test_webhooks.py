"""Webhooks: notifications of ended responses, from the store to a receiver over sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import openai
import pytest
from aiohttp import web
from msgspec.structs import replace
from prometheus_client import REGISTRY

from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol.response import ResponseStatus
from penstock.services import webhooks
from penstock.services.standard_webhooks import Receiver, Signer
from penstock.services.store.store import Store
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.services.webhooks import Webhooks, pause_after
from tests.support.api_clients import wait_until
from tests.support.stored_responses import queued_response, request_of, store_response, stored_response
from tests.support.stores import database_at
from tests.support.tool_servers import LOOPBACK, web_server

pytestmark = pytest.mark.io

SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
ENDS: tuple[Literal["completed", "failed", "cancelled", "incomplete"], ...] = (
    *("completed", "failed"),
    *("cancelled", "incomplete"),
)


@dataclass
class ReceivingServer:
    """A receiver that answers with ``statuses`` first, then with 200, and that waits for ``gate``."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: int = 0
    most_at_once: int = 0

    async def take(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.got.append((dict(request.headers), await request.read()))
            await self.gate.wait()
        finally:
            self.at_once -= 1
        headers = {"Location": f"{self.url}/elsewhere"}
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200, headers=headers)

    @property
    def events(self) -> list[Any]:
        """What openai-python makes of the webhooks, once it has verified them."""
        client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
        return [client.webhooks.unwrap(body, headers) for headers, body in self.got]


@pytest.fixture
async def receiver() -> AsyncGenerator[ReceivingServer, None]:
    receiver = ReceivingServer()
    receiver.gate.set()
    async with web_server(receiver.take) as url:
        receiver.url = url
        yield receiver


@pytest.fixture(autouse=True)
def _without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "PAUSES", (0.02, 0.1))
    monkeypatch.setattr(webhooks, "POLL", 0.02)


@asynccontextmanager
async def notifying(store_at: str) -> AsyncGenerator[Store, None]:
    store = Store(database_at(store_at), notifies=True)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def delivering(store: Store, url: str, allowed: AllowedNetworks = LOOPBACK) -> Any:
    receiver = Receiver(url, Signer.of(SECRET))
    return Webhooks(store.webhooks, lambda _: receiver, allowed).delivering()


async def end(store: Store, response_id: str, status: ResponseStatus = "completed", owner: str = "") -> None:
    """Store a background response and its end."""
    waiting = replace(queued_response(response_id), origin=Origin(owner))
    await store.accept(waiting, request_of(waiting))
    ended = replace(stored_response(response_id), origin=Origin(owner))
    await store.end(replace(ended, response=replace(ended.response, status=status)), None)


def outcomes() -> dict[str, float]:
    names = ("delivered", "failed", "given_up")
    return {name: REGISTRY.get_sample_value("penstock_webhooks_total", {"outcome": name}) or 0 for name in names}


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: count - before[name] for name, count in outcomes().items() if count != before[name]}


async def left(store: Store, count: int) -> None:
    async with asyncio.timeout(120):
        while await store.webhooks.count() != count:
            await asyncio.sleep(0.01)


async def test_each_end_of_a_background_response_is_an_event(store_at: str, receiver: ReceivingServer) -> None:
    before = outcomes()
    async with notifying(store_at) as store:
        for status in ENDS:
            await end(store, f"resp_{status}", status)
        await store_response(store, stored_response("resp_sync"))
        async with delivering(store, receiver.url):
            await left(store, 0)
    assert {(event.type, event.data.id, event.object) for event in receiver.events} == {
        (f"response.{status}", f"resp_{status}", "event") for status in ENDS
    }
    assert {event.id for event in receiver.events} == {f"evt_{status}" for status in ENDS}
    assert since(before) == {"delivered": 4}


async def test_owner_has_a_receiver_and_a_secret_of_its_own(store_at: str, receiver: ReceivingServer) -> None:
    server = Signer.of(SECRET)
    receivers = {owner: Receiver(receiver.url, server.of_owner(owner)) for owner in ("alice", "bob")}
    async with notifying(store_at) as store:
        for owner in (*receivers, "nobody"):
            await end(store, f"resp_{owner}", owner=owner)
        async with Webhooks(store.webhooks, receivers.get, LOOPBACK).delivering():
            await left(store, 0)
    clients = {
        owner: openai.OpenAI(api_key="none", webhook_secret=each.signer.secrets) for owner, each in receivers.items()
    }
    got = {json.loads(body)["data"]["id"]: (body, headers) for headers, body in receiver.got}
    assert set(got) == {"resp_alice", "resp_bob"}
    for owner, other in (("alice", "bob"), ("bob", "alice")):
        assert clients[owner].webhooks.unwrap(*got[f"resp_{owner}"]).id == f"evt_{owner}"
        with pytest.raises(openai.InvalidWebhookSignatureError):
            clients[other].webhooks.unwrap(*got[f"resp_{owner}"])


async def test_failed_delivery_is_tried_again_with_the_same_id(store_at: str, receiver: ReceivingServer) -> None:
    before, receiver.statuses = outcomes(), [500, 404, 307]
    async with notifying(store_at) as store, delivering(store, receiver.url):
        await end(store, "resp_1")
        await left(store, 0)
    assert [event.id for event in receiver.events] == ["evt_1"] * 4
    assert since(before) == {"delivered": 1, "failed": 3}


async def test_slow_receiver_and_a_missing_one_hold_nothing(
    store_at: str, receiver: ReceivingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT", 0.1)
    receiver.gate.clear()
    before = outcomes()
    async with notifying(store_at) as store:
        async with delivering(store, receiver.url):
            await end(store, "resp_1")  # durable, whatever the receiver does
            await wait_until(lambda: since(before).get("failed", 0) >= 2)
        async with delivering(store, "http://127.0.0.1:9"):
            already = since(before)["failed"]
            await wait_until(lambda: since(before)["failed"] > already)
        receiver.gate.set()
        async with delivering(store, receiver.url):
            await left(store, 0)
    assert since(before)["delivered"] == 1


async def test_address_that_is_not_allowed_is_not_reached(
    store_at: str, receiver: ReceivingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with notifying(store_at) as store, delivering(store, receiver.url, NOTHING_ALLOWED):
        await end(store, "resp_1")
        await wait_until(lambda: "see --allow-address" in caplog.text)
        assert await store.webhooks.count() == 1
    assert receiver.got == []


async def test_webhook_is_given_up_after_a_day_with_a_line(
    store_at: str, receiver: ReceivingServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "PATIENCE", 0.3)
    before, receiver.statuses = outcomes(), [500] * 100
    async with notifying(store_at) as store, delivering(store, receiver.url):
        await end(store, "resp_1")
        await left(store, 0)
    assert since(before)["given_up"] == 1
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "response.completed of resp_1 is given up" in line.getMessage()
    assert "status 500" in line.getMessage()


async def test_servers_of_a_store_deliver_each_once_and_few_at_a_time(
    store_at: str, receiver: ReceivingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MOST_AT_ONCE", 3)
    receiver.gate.clear()
    async with notifying(store_at) as one, notifying(store_at) as other:
        for number in range(20):
            await end(one if number % 2 else other, f"resp_{number}")
        async with delivering(one, receiver.url), delivering(other, receiver.url):
            await wait_until(lambda: receiver.at_once >= 3)
            receiver.gate.set()
            await left(one, 0)
    assert sorted(event.data.id for event in receiver.events) == sorted(f"resp_{number}" for number in range(20))
    assert receiver.most_at_once <= 6


@pytest.mark.parametrize("is_of_operator", [False, True])
async def test_receiver_that_hangs_delays_no_other(
    is_of_operator: bool, store_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All receivers have one host; the one that hangs is that of a key, or that of all keys without one."""
    monkeypatch.setattr(webhooks, "MOST_AT_ONCE", 6)
    got: list[str] = []

    async def take(request: web.Request) -> web.Response:
        got.append(request.path)
        if request.path == "/hangs":
            await asyncio.Event().wait()
        return web.Response()

    async with notifying(store_at) as store, web_server(take) as url:
        names = {"hanging": f"{url}/hangs", "one": f"{url}/one", "other": f"{url}/other"}

        def receiver_of(owner: str) -> Receiver:
            return Receiver(names.get(owner, f"{url}/hangs"), Signer.of(SECRET))

        for number in range(100):
            await end(store, f"resp_{number}", owner=f"key {number}" if is_of_operator else "hanging")
        for owner in ("one", "other"):
            await end(store, f"resp_{owner}", owner=owner)
        async with Webhooks(store.webhooks, receiver_of, LOOPBACK).delivering():
            await left(store, 100)
    assert got.count("/one") == got.count("/other") == 1
    assert got.count("/hangs") <= webhooks.MOST_TO_ONE


async def test_claim_of_a_dead_server_runs_out(
    store_at: str, receiver: ReceivingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "CLAIM", 2.0)  # longer than a delivery takes
    receiver.gate.clear()
    async with notifying(store_at) as store:
        await end(store, "resp_1")
        async with delivering(store, receiver.url):
            await wait_until(lambda: receiver.got)
        receiver.gate.set()
        async with delivering(store, receiver.url):
            await left(store, 0)
    assert [event.id for event in receiver.events] == ["evt_1", "evt_1"]


async def test_store_without_a_receiver_keeps_no_notifications(store: Store) -> None:
    await end(store, "resp_1")
    assert await store.webhooks.count() == 0


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "PAUSES", (5.0, 3600.0))
    pauses = [pause_after(attempts) for attempts in range(1, 40)]
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert pauses == sorted(pauses)
    assert (pauses[-1], sum(pause < 3600 for pause in pauses)) == (3600.0, 10)
