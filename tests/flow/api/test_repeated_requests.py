"""Repetitions: a request that a client sends again, as after a time-out, forgets nothing that the server keeps.

The routes are read from the router, so a new POST route needs a row.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.api.resources.resources import SHIPPED
from penstock.extensions.tools.sandbox.probe import Sandbox
from tests.support.api_clients import PATIENCE
from tests.support.deciding_engine import DecidingEngine
from tests.support.live_server import KEY, bearer
from tests.support.server import BASES, ScriptedServer
from tests.support.tool_servers import Json, tool_server


class Effect(Enum):
    """The effect of a repetition."""

    MAKES = "a new object, beside all others"
    KEEPS = "nothing changes"
    REPLACES = "what the repetition names, and nothing else"
    REFUSES = "status 400, and nothing changes"


@dataclass(frozen=True)
class Upload:
    """A form with a file."""

    content: bytes
    filename: str = "a.txt"
    fields: Mapping[str, str] = field(default_factory=dict)
    name: str = "file"

    @property
    def form(self) -> aiohttp.FormData:
        form = aiohttp.FormData(dict(self.fields))
        form.add_field(self.name, self.content, filename=self.filename)
        return form


@dataclass(frozen=True)
class Row:
    path: str
    effect: Effect
    first: Any
    again: Any = None
    """The repetition, if the client changes it."""
    changed: frozenset[str] = frozenset()
    """The fields that a repetition replaces."""

    def __str__(self) -> str:
        return f"{self.path.rpartition('}')[2] or self.path}-{self.effect.name.lower()}"


MAKES, KEEPS, REPLACES, REFUSES = Effect

BESIDE = ("/tokenize", "/detokenize", "/ping", "/live")
"""Routes that are not below ``/v1``."""

HI = {"role": "user", "content": "Hi"}
MINE = {**HI, "id": "msg_mine"}
OTHER = {**MINE, "content": "Ho"}
REFERENCE = {"type": "item_reference", "id": "{item_id}"}
CHAT: Json = {"messages": [HI], "max_tokens": 5}
ASSISTANTS = {"purpose": "assistants"}
STATIC = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}}
DESCRIBED: Json = {"attributes": {"lang": "en"}, "chunking_strategy": STATIC}
BATCH: Json = {"file_ids": ["{file_id}"], **DESCRIBED}
NAMED: Json = {"name": "a", "metadata": {"k": "v"}, "expires_after": {"anchor": "last_active_at", "days": 3}}

CONVERSING: Json = {"conversation": "{conversation_id}"}

UPLOADED = "/uploads/{upload_id}"
UPLOAD: Json = {"bytes": 3, "filename": "a.txt", "mime_type": "text/plain", **ASSISTANTS}

CONVERSATION, STORE = "/conversations/{conversation_id}", "/vector_stores/{vector_store_id}"
COMPLETION = "/chat/completions/{completion_id}"
CONTAINER = "/containers/{container_id}/files"

TABLE = (
    Row("/responses", MAKES, {"input": [MINE]}),
    Row("/responses", MAKES, {"input": [MINE]}, {"input": [OTHER]}),
    Row("/responses", MAKES, {"input": [MINE], **CONVERSING}),
    Row("/responses", MAKES, {"input": [MINE], **CONVERSING}, {"input": [OTHER], **CONVERSING}),
    Row("/responses", MAKES, {"input": "Hi", "background": True, "previous_response_id": "{response_id}"}),
    Row("/responses", KEEPS, {"input": [MINE], "store": False}),
    Row("/responses/{response_id}/cancel", KEEPS, {}),
    Row("/responses/input_tokens", KEEPS, {"input": [MINE], **CONVERSING}),
    Row("/responses/compact", KEEPS, {"input": [MINE], "model": "tiny"}),
    Row("/chat/completions", MAKES, {**CHAT, "store": True}),
    Row("/chat/completions", KEEPS, CHAT),
    Row(COMPLETION, KEEPS, {"metadata": {"k": "v"}}),
    Row(COMPLETION, REPLACES, {"metadata": {"k": "v"}}, {"metadata": {"l": "w"}}, frozenset({"metadata"})),
    Row(COMPLETION, REFUSES, {"metadata": {"k": "v"}}, {}),
    Row("/completions", KEEPS, {"prompt": "Hi", "max_tokens": 5}),
    Row("/decisions", KEEPS, {"input": "Hi", "questions": [{"type": "predicate", "instructions": "It greets."}]}),
    Row("/messages", KEEPS, {**CHAT, "model": "tiny"}),
    Row("/messages/count_tokens", KEEPS, {"messages": [HI], "model": "tiny"}),
    Row("/tokenize", KEEPS, {"prompt": "Hi"}),
    Row("/detokenize", KEEPS, {"tokens": [1]}),
    Row("/ping", KEEPS, {}),
    Row("/live/watch", KEEPS, {"input": [MINE], "store": False}),
    Row("/conversations", MAKES, {"metadata": {"k": "v"}}),
    Row("/conversations", MAKES, {"items": [MINE]}),
    Row("/conversations", MAKES, {"items": [MINE]}, {"items": [OTHER]}),
    Row(
        "/conversations", MAKES, {"items": [REFERENCE]}, {"items": [REFERENCE], "metadata": {"of": "{conversation_id}"}}
    ),
    Row(CONVERSATION, KEEPS, {"metadata": {"k": "v"}}),
    Row(CONVERSATION, REPLACES, {"metadata": {"k": "v"}}, {"metadata": {"l": "w"}}, frozenset({"metadata"})),
    Row(CONVERSATION, REFUSES, {"metadata": {"k": "v"}}, {}),
    Row(f"{CONVERSATION}/items", MAKES, {"items": [HI]}),
    Row(f"{CONVERSATION}/items", REFUSES, {"items": [MINE]}),
    Row(f"{CONVERSATION}/items", REFUSES, {"items": [MINE]}, {"items": [OTHER]}),
    Row(f"{CONVERSATION}/items", KEEPS, {"items": [REFERENCE]}),
    Row("/files", MAKES, Upload(b"one", fields=ASSISTANTS)),
    Row("/files", MAKES, Upload(b"one", fields=ASSISTANTS), Upload(b"two", fields=ASSISTANTS)),
    Row(
        "/batches",
        MAKES,
        {"input_file_id": "{file_id}", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    Row("/uploads", KEEPS, UPLOAD),
    Row(f"{UPLOADED}/parts", KEEPS, Upload(b"one", name="data")),
    Row(f"{UPLOADED}/complete", KEEPS, {"part_ids": ["{part_id}"]}),
    Row(f"{UPLOADED}/cancel", KEEPS, {}),
    Row("/vector_stores", MAKES, {**NAMED, "file_ids": ["{file_id}"]}),
    Row("/vector_stores", MAKES, NAMED, {"name": "a"}),
    Row(STORE, KEEPS, NAMED),
    Row(STORE, KEEPS, NAMED, {}),
    Row(STORE, REPLACES, NAMED, {"name": "b"}, frozenset({"name"})),
    Row(STORE, REPLACES, NAMED, {"metadata": {"l": "w"}}, frozenset({"metadata"})),
    Row(f"{STORE}/search", KEEPS, {"query": "moon"}),
    Row(f"{STORE}/files", KEEPS, {"file_id": "{file_id}", **DESCRIBED}),
    Row(f"{STORE}/files", KEEPS, {"file_id": "{file_id}", **DESCRIBED}, {"file_id": "{file_id}"}),
    Row(
        f"{STORE}/files",
        REPLACES,
        {"file_id": "{file_id}", **DESCRIBED},
        {"file_id": "{file_id}", "attributes": {"n": 1}},
        frozenset({"attributes"}),
    ),
    Row(f"{STORE}/files/{{file_id}}", KEEPS, {"attributes": {"lang": "en"}}),
    Row(f"{STORE}/files/{{file_id}}", REFUSES, {"attributes": {"lang": "en"}}, {}),
    Row(
        f"{STORE}/files/{{file_id}}",
        REPLACES,
        {"attributes": {"lang": "en"}},
        {"attributes": {"n": 1}},
        frozenset({"attributes"}),
    ),
    # a file is in the batch that has added it last, and no more in the one before
    Row(f"{STORE}/file_batches", MAKES, BATCH, changed=frozenset({"file_counts"})),
    Row(f"{STORE}/file_batches", MAKES, BATCH, {"file_ids": ["{file_id}"]}, frozenset({"file_counts"})),
    Row(f"{STORE}/file_batches/{{batch_id}}/cancel", KEEPS, {}),
    Row("/containers", MAKES, {"name": "mine", "file_ids": ["{file_id}"]}),
    Row(CONTAINER, KEEPS, Upload(b"one")),
    Row(CONTAINER, REPLACES, Upload(b"one"), Upload(b"three"), frozenset({"bytes", "content"})),
    Row(CONTAINER, KEEPS, {"file_id": "{file_id}"}),
)
"""What a repetition does, of every request that may be repeated."""

ELSEWHERE = {
    "/rollouts/{session}/reward": "tests/flow/api/test_rollouts.py",
    "/batches/{batch_id}/cancel": "tests/flow/api/test_openai_batches.py",
    "/messages/batches": "tests/flow/api/test_message_batches.py",
    "/messages/batches/{message_batch_id}/cancel": "tests/flow/api/test_message_batches.py",
}
"""The tests of repetitions that need an object that still runs, a recording, or a list of Anthropic's form."""

OBJECTS: Mapping[str, tuple[str, Any]] = {
    "file_id": ("/files", Upload(b"The moon has no air.", fields=ASSISTANTS)),
    "upload_id": ("/uploads", UPLOAD),
    "part_id": (f"{UPLOADED}/parts", Upload(b"one", name="data")),
    "conversation_id": ("/conversations", {"items": [HI]}),
    "response_id": ("/responses", {"input": "Hi", "background": True}),
    "completion_id": ("/chat/completions", {**CHAT, "store": True}),
    "container_id": ("/containers", {"name": "stored"}),
    "vector_store_id": ("/vector_stores", {"name": "stored"}),
    "batch_id": (f"{STORE}/file_batches", {"file_ids": ["{file_id}"]}),
}
"""The requests that make the objects that a row names, by the name of their id."""

SEARCHED = ("file_id", "vector_store_id", "batch_id")
"""The ids of a vector store with a file that a batch has added."""

UNSTEADY = {"created_at", "last_active_at", "expires_at"}
"""Times, which every request may change."""

RUNNING = ("queued", "in_progress", "validating", "finalizing", "cancelling")

NAMED_BY = {
    "response": "/v1/responses/{id}",
    "chat.completion": "/v1/chat/completions/{id}",
    "conversation": "/v1/conversations/{id}",
    "vector_store.files_batch": "/v1/vector_stores/{vector_store_id}/file_batches/{id}",
}
"""The places of objects that no list has, by kind."""

LISTED = ("/v1/batches", "/v1/files", "/v1/vector_stores", "/v1/containers")

INSIDE = {
    "response": "input_items",
    "chat.completion": "messages",
    "conversation": "items",
    "vector_store": "files",
    "container": "files",
    **dict.fromkeys(("file", "vector_store.file", "container.file"), "content"),
}
"""The part of an object that has a route of its own, by kind."""

State = dict[str, Json]


@dataclass
class Client:
    """A client that sends requests with the ids that it knows, and that reads again all that it has made."""

    served: ScriptedServer
    ids: dict[str, str] = field(default_factory=dict)
    places: set[str] = field(default_factory=lambda: {*LISTED})

    async def post(self, path: str, body: Any) -> tuple[int, Json]:
        """Send a request, and note the place of what it makes."""
        path = path if path.startswith(BESIDE) else f"/v1{path}"
        headers = bearer() if path.startswith("/live") else {}
        sent: Any = {"data": body.form} if isinstance(body, Upload) else {"json": filled(body, self.ids)}
        url = self.served.url + path.format(**self.ids)
        async with self.served.client.post(url, headers=headers, **sent) as answer:
            text = await answer.read()
        made: Json = json.loads(text) if answer.content_type == "application/json" else {}
        if made.get("object") == "chat.completion":
            self.places.add(NAMED_BY["response"].format(id=made["id"].replace("chatcmpl-", "resp_")))
        if place := NAMED_BY.get(made.get("object", "")):
            self.places.add(place.format(**made))
        return answer.status, made

    async def state(self) -> State:
        """Return all objects by their places, once nothing runs any more."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found: State = {}
                for place in sorted(self.places):
                    await self._look(place, found)
                if not any(each.get("status") in RUNNING for each in found.values()):
                    return found
                await asyncio.sleep(0.02)

    async def _look(self, place: str, found: State) -> None:
        async with self.served.client.get(f"{self.served.url}{place}", params={"limit": "100"}) as answer:
            text = await answer.read()
        if answer.status != 200:
            return
        shown: dict[str, Any] = json.loads(text) if answer.content_type == "application/json" else {"content": text}
        each: dict[str, Any]
        parts = (
            {f"{place}/{each['id']}": each for each in shown["data"]}
            if shown.get("object") == "list"
            else {place: shown}
        )
        for path, each in parts.items():
            found[path] = {name: value for name, value in each.items() if name not in UNSTEADY}
            if inside := INSIDE.get(each.get("object", "")):
                await self._look(f"{path}/{inside}", found)


def filled(body: Any, ids: Mapping[str, str]) -> Any:
    """Return a body with the ids in the place of their names."""
    text = json.dumps(body)
    for name, value in ids.items():
        text = text.replace(f"{{{name}}}", value)
    return json.loads(text)


def changes(before: State, after: State) -> set[str]:
    """Return the fields that differ in objects that were there before, and the objects that are gone."""
    gone = before.keys() - after.keys()
    kept = ((was, after[place]) for place, was in before.items() if place in after)
    return {*gone, *(name for was, now in kept for name in was.keys() | now.keys() if was.get(name) != now.get(name))}


@pytest.fixture
async def client(tmp_path: Path, sandbox: Sandbox) -> AsyncGenerator[Client, None]:
    settings = read_settings([]).model_copy(update={"operator_key": SecretStr(KEY)})
    async with tool_server(
        tmp_path,
        sandbox=sandbox,
        resources=SHIPPED,
        settings=settings,
        keys=Keys(operator=KEY),
        engine=DecidingEngine(),
    ) as served:
        yield Client(served)


async def prepare(client: Client, row: Row) -> None:
    """Make the objects that the request names, and those beside them."""
    named = str((row.path, row.first, row.again))
    for name, (path, body) in OBJECTS.items():
        if f"{{{name}}}" in named or (row.path.startswith(STORE) and name in SEARCHED):
            status, made = await client.post(path, body)
            assert status == 200, made
            client.ids[name] = made["id"]
    if conversation_id := client.ids.get("conversation_id"):
        _, items = await client.served.get(f"/v1/conversations/{conversation_id}/items")
        client.ids["item_id"] = items["data"][0]["id"]


@pytest.mark.parametrize("row", TABLE, ids=str)
async def test_repeated_request_forgets_nothing(client: Client, row: Row) -> None:
    await prepare(client, row)
    beginning = await client.state()
    status, first = await client.post(row.path, row.first)
    assert status == 200, first
    before = await client.state()
    assert changes(beginning, before) <= {*(row.first if isinstance(row.first, dict) else ()), *row.changed}
    status, again = await client.post(row.path, row.first if row.again is None else row.again)
    after = await client.state()
    assert status == (400 if row.effect is Effect.REFUSES else 200), again
    assert changes(before, after) == row.changed
    assert (after.keys() > before.keys()) == (row.effect is Effect.MAKES)


async def test_every_route_has_a_row(client: Client) -> None:
    routes = client.served.api.app(1).router.routes()
    paths = {route.resource.canonical for route in routes if route.method == "POST" and route.resource}
    assert {path.removeprefix(next((base for base in BASES if path.startswith(base)), "")) for path in paths} == {
        *(row.path for row in TABLE),
        *ELSEWHERE,
    }
