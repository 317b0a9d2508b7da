"""Owners: objects of one key do not exist for another, in any route or part of a request.

The routes are read from the router, so a new route is included.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import REQUEST_TIMEOUT, ApiClient
from tests.support.server import BASES, ENDLESS, ScriptedServer, running_server, script

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
SECRET = {"role": "user", "content": "A secret"}

ANYTHING: dict[str, Any] = {"input": "Hi", "metadata": {}, "items": [{"role": "user", "content": "Hi"}]}
"""A body that every route accepts."""

QUERIES = ("", "?stream=true", "?stream=true&starting_after=1", "?order=asc")

Answers = list[tuple[int, str]]


@dataclass(frozen=True)
class Ids:
    response_id: str
    conversation_id: str
    item_id: str
    completion_id: str

    def unknown(self) -> Ids:
        return Ids(**{name: f"{value[:-8]}{'0' * 8}" for name, value in asdict(self).items()})

    def hidden(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, asdict(self).values())), "ID", text)


@dataclass
class Person(ApiClient):
    served: ScriptedServer

    async def own(self) -> Ids:
        _, conversation = await self.post({"items": [SECRET]}, "/v1/conversations")
        _, items = await self.get(f"/v1/conversations/{conversation['id']}/items")
        _, completion = await self.post({"messages": [SECRET], "max_tokens": 2, "store": True}, "/v1/chat/completions")
        response_id = await self.start_background({"conversation": conversation["id"]})
        return Ids(response_id, conversation["id"], items["data"][0]["id"], completion["id"])

    async def answers(self, requests: Iterable[tuple[str, str, Any]], ids: Ids) -> Answers:
        answers = []
        for method, path, body in requests:
            async with self.client.request(method, self.url + path, json=body, timeout=REQUEST_TIMEOUT) as answer:
                answers.append((answer.status, ids.hidden(await answer.text())))
        return answers


@pytest.fixture
async def people(tmp_path: Path) -> AsyncGenerator[tuple[Person, Person], None]:
    """Alice and Bob, clients of one server whose engine never stops by itself."""
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    async with (
        running_server(engine, tmp_path, keys=Keys(given=(ALICE, BOB))) as served,
        aiohttp.ClientSession(headers=alice) as hers,
        aiohttp.ClientSession(headers=bob) as his,
    ):
        yield Person(served.url, hers, served), Person(served.url, his, served)


def named_in_paths(served: ScriptedServer, ids: Ids, *parameters: str) -> Iterator[tuple[str, str, Any]]:
    """A request for each route with one of those parameters in its path."""
    for route in served.api.app(1).router.routes():
        path = route.resource.canonical if route.resource else ""
        if set(re.findall(r"{(\w+)}", path)) & {*parameters}:
            for query in QUERIES if route.method == "GET" else ("",):
                body = ANYTHING if route.method == "POST" else None
                yield route.method, path.format(**asdict(ids)) + query, body


def named_in_bodies(ids: Ids, own: Ids) -> Iterator[tuple[str, str, Any]]:
    """A request for each part of a body that refers to a stored object."""
    reference = [{"type": "item_reference", "id": ids.item_id}]
    for base in BASES:
        for path in ("responses", "responses/input_tokens"):
            yield "POST", f"{base}/{path}", {"input": "Hi", "previous_response_id": ids.response_id}
            yield "POST", f"{base}/{path}", {"input": "Hi", "conversation": ids.conversation_id}
            yield "POST", f"{base}/{path}", {"input": "Hi", "conversation": {"id": ids.conversation_id}}
            yield "POST", f"{base}/{path}", {"input": reference}
        yield "POST", f"{base}/conversations", {"items": reference}
        yield "POST", f"{base}/conversations/{own.conversation_id}/items", {"items": reference}
        yield "GET", f"{base}/conversations/{own.conversation_id}/items?after={ids.item_id}", None


def everywhere(served: ScriptedServer, ids: Ids, own: Ids) -> list[tuple[str, str, Any]]:
    """Every way to refer to the objects, including an item in the client's own conversation."""
    misplaced = replace(ids, conversation_id=own.conversation_id)
    return [
        *named_in_paths(served, ids, "response_id", "conversation_id", "completion_id"),
        *named_in_paths(served, misplaced, "item_id"),
        *named_in_bodies(ids, own),
    ]


@pytest.mark.defect("V21")
@pytest.mark.parametrize("live", [True, False])
async def test_other_owners_objects_do_not_exist(people: tuple[Person, Person], live: bool) -> None:
    alice, bob = people
    hers, his = await alice.own(), await bob.own()
    await bob.cancel(his.response_id)
    if not live:
        await alice.cancel(hers.response_id)
    found = await bob.answers(everywhere(bob.served, hers, his), hers)
    nobodys = hers.unknown()
    assert found == await bob.answers(everywhere(bob.served, nobodys, his), nobodys)
    assert len(found) > 60
    assert {status // 100 for status, _ in found} == {4}
    item = f"conversations/{hers.conversation_id}/items/{hers.item_id}"
    for path in (f"responses/{hers.response_id}", item, f"chat/completions/{hers.completion_id}/messages"):
        assert (await alice.get(f"/v1/{path}"))[0] == 200
    assert alice.served.engine.running == live


async def test_other_owners_prompts_cannot_be_confirmed(people: tuple[Person, Person]) -> None:
    """The salt of the engine's prefix cache keeps ``cached_tokens`` from telling that a guess is right."""
    for person in people:
        async with person.open_stream() as stream:
            await stream.response_id()
    salts = [prompt.facts.scheduling.cache_salt for prompt in people[0].served.engine.prompts]
    assert len({None, *salts}) == 3


async def test_every_route_with_an_id_is_tried(people: tuple[Person, Person]) -> None:
    """A route with a new kind of parameter must be added here."""
    alice, _ = people
    paths = " ".join(route.resource.canonical for route in alice.served.api.app(1).router.routes() if route.resource)
    assert set(re.findall(r"{(\w+)}", paths)) == {*Ids.__dataclass_fields__, "model"}
