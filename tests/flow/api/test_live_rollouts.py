"""The live export: each session that is over comes once, whole, as a file or as a webhook."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import openai
import pytest
from aiohttp import web
from pydantic import SecretStr
from yarl import URL

from penstock.api.http.api_key import digest_of
from penstock.api.http.auth import Keys
from penstock.extensions.rollouts import known, live
from penstock.extensions.rollouts.known import FILE
from penstock.pipeline.recordings.redaction import key_of
from penstock.services import webhooks
from tests.support.api_clients import wait_until
from tests.support.live_server import KEY, bearer, live_server
from tests.support.server import PacedEngine, Server, script
from tests.support.server_process import WEBHOOK_SECRET
from tests.support.tool_servers import web_server

pytestmark = pytest.mark.io

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"

Served: TypeAlias = Server[PacedEngine]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL", 0.02)
    monkeypatch.setattr(live, "SETTLES", 0.0)
    monkeypatch.setattr(live, "RETRY", 0.02)
    monkeypatch.setattr(webhooks, "PAUSES", (0.02, 0.1))
    monkeypatch.setattr(webhooks, "POLL", 0.02)


@asynccontextmanager
async def serving(folder: Path, to: str, **changes: Any) -> AsyncGenerator[Served, None]:
    given = {"rollouts_to": to, "rollouts_after": 600.0, "webhook_secret": SecretStr(WEBHOOK_SECRET)} | changes
    async with live_server(
        PacedEngine(script()),
        folder,
        keys=Keys(given=(ALICE, BOB), operator=KEY),
        resources=("rollouts",),
        record=True,
        changes=given | {"allow_address": ["127.0.0.1"]},
    ) as served:
        yield served


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
async def served(tmp_path: Path, out: Path) -> AsyncGenerator[Served, None]:
    async with serving(tmp_path, str(out)) as served:
        yield served


async def respond(served: Served, session: str, key: str = ALICE) -> str:
    body = {"input": "Hi", "session_id": session, "model": served.engine.models[0]}
    async with served.client.post(f"{served.url}/v1/responses", json=body, headers=bearer(key)) as answer:
        made = await answer.json()
        assert answer.status == 200, made
    return str(made["id"])


async def held(served: Served, count: int) -> None:
    """Wait until so many responses are recorded of which the last one runs, and hold that one alone."""
    recordings = served.parts.settings.record
    assert recordings
    await wait_until(lambda: len(list(recordings.glob("resp_*/tokens.jsonl"))) == count)
    names = {path.parent.name for path in recordings.glob("resp_*/tokens.jsonl")}
    served.engine.allowed |= dict.fromkeys(names, 3.0)
    served.engine.initial = inf


async def reward(served: Served, session: str, **body: Any) -> None:
    url = f"{served.url}/v1/rollouts/{session}/reward"
    async with served.client.post(url, json={"reward": 1} | body, headers=bearer()) as answer:
        assert answer.status == 200, await answer.text()


async def rows_of(served: Served, session: str) -> list[Any]:
    async with served.client.get(f"{served.url}/v1/rollouts/{session}", headers=bearer()) as answer:
        assert answer.status == 200
        return read(await answer.text())


def read(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def files(out: Path) -> dict[str, list[Any]]:
    """Return the rows of each file; a file is only there when it is whole."""
    return {path.name: read(path.read_text()) for path in sorted(out.glob("*.jsonl"))}


def responses(rows: list[Any]) -> set[str]:
    return {turn["response"] for row in rows for turn in row["turns"]}


async def test_session_comes_when_a_reward_ends_it(served: Served, out: Path) -> None:
    made = {session: {await respond(served, session) for _ in range(2)} for session in ("one", "two", "three")}
    await reward(served, "two")
    await reward(served, "three", done=True)
    await wait_until(lambda: files(out))
    await reward(served, "one", done=True)
    await wait_until(lambda: len(files(out)) == 2)
    found = {name.rpartition("-")[0]: rows for name, rows in files(out).items()}
    assert {session: responses(rows) for session, rows in found.items()} == {
        session: made[session] for session in ("one", "three")
    }
    assert {row["reward"] for rows in found.values() for row in rows} == {1}
    assert {(out / name).stat().st_mode & 0o777 for name in files(out)} == {0o600}
    assert found["one"] == await rows_of(served, "one")


async def test_session_comes_when_it_has_been_idle(tmp_path: Path, out: Path) -> None:
    async with serving(tmp_path, str(out), rollouts_after=0.3) as served:
        made = await respond(served, "idle")
        await wait_until(lambda: files(out))
    (rows,) = files(out).values()
    assert responses(rows) == {made}


async def test_session_of_which_a_response_runs_comes_when_that_has_ended(served: Served, out: Path) -> None:
    first = await respond(served, "s")
    served.engine.hold(3)
    running = asyncio.create_task(respond(served, "s"))
    await held(served, 2)
    await reward(served, "s", done=True)
    other = await respond(served, "other")
    await reward(served, "other", done=True)
    await wait_until(lambda: files(out))
    assert [responses(rows) for rows in files(out).values()] == [{other}]
    served.engine.say_all()
    last = await running
    await wait_until(lambda: len(files(out)) == 2)
    assert {first, last} in [responses(rows) for rows in files(out).values()]


async def chat(served: Served, *messages: str) -> None:
    roles = ("user", "assistant")
    sent = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
    body = {"messages": sent, "model": served.engine.models[0], "max_tokens": 50}
    async with served.client.post(f"{served.url}/v1/chat/completions", json=body, headers=bearer(ALICE)) as answer:
        assert answer.status == 200, await answer.text()


async def test_conversation_without_an_id_is_not_idle_while_its_next_response_runs(tmp_path: Path, out: Path) -> None:
    async with serving(tmp_path, str(out), rollouts_after=1.0) as served:
        await chat(served, "Good day")
        served.engine.hold(3)
        running = asyncio.create_task(chat(served, "Good day", "Hello!", "And now?"))
        await held(served, 2)
        other = await respond(served, "other")
        await wait_until(lambda: files(out))
        assert [responses(rows) for rows in files(out).values()] == [{other}]
        served.engine.say_all()
        await running
        await wait_until(lambda: len(files(out)) == 2)
        assert {len(responses(rows)) for rows in files(out).values()} == {1, 2}


async def test_session_is_idle_as_of_the_last_look(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun since then is not known yet."""
    recordings, passed = served.parts.settings.record, 0.0
    assert recordings
    real, own = time.time, time.monotonic
    clock = SimpleNamespace(time=lambda: real() + passed, monotonic=lambda: own() + passed, time_ns=time.time_ns)
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(known, "time", clock)
    monkeypatch.setattr(live, "REST", inf)
    await respond(served, "s")
    await wait_until(lambda: list(recordings.glob("*/response.json")))
    sessions = live.Sessions(recordings, 600.0)
    before, after = (live.Due(sessions, 200.0) for _ in range(2))
    await before.look()
    passed = 300.0
    await after.look()
    assert (await before.due("", 1), len(await after.due("", 1))) == ([], 1)
    await sessions.close()


async def test_session_that_goes_on_comes_again(served: Served, out: Path) -> None:
    first = await respond(served, "s")
    await reward(served, "s", done=True)
    await wait_until(lambda: files(out))
    assert responses(*files(out).values()) == {first}
    second = await respond(served, "s")
    await reward(served, "s", reward=2, done=True)
    await wait_until(lambda: responses(*files(out).values()) == {first, second})
    assert {row["reward"] for row in next(iter(files(out).values()))} == {2}


async def test_sessions_of_two_keys_have_two_files(served: Served, out: Path) -> None:
    made = {key_of(digest_of(key)): await respond(served, "s", key) for key in (ALICE, BOB)}
    for key in made:
        await reward(served, "s", done=True, key=key)
    await wait_until(lambda: len(files(out)) == 2)
    assert {row["key"]: responses([row]) for rows in files(out).values() for row in rows} == {
        key: {response} for key, response in made.items()
    }


@pytest.mark.parametrize("session", ["..%2F..%2Fetc", "a%2F%2Fb", "%00", "%E2%82%AC" * 99, ".hidden", "x" * 3000])
async def test_any_session_has_a_file_in_the_folder(served: Served, out: Path, session: str) -> None:
    await respond(served, URL(f"/{session}", encoded=True).path[1:] if "%" in session else session)
    await reward(served, session, done=True)
    await wait_until(lambda: files(out))
    assert len(files(out)) == 1


async def test_folder_that_comes_back_gets_what_was_due(served: Served, out: Path, caplog: Any) -> None:
    shutil.rmtree(out)
    await respond(served, "s")
    await reward(served, "s", done=True)
    await wait_until(lambda: "wait to be written" in caplog.text)
    await asyncio.to_thread(out.mkdir)
    await wait_until(lambda: files(out))


class Receiver:
    """A receiver of webhooks that answers with ``statuses`` first, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.events: list[Any] = []
        self.client = openai.OpenAI(api_key="none", webhook_secret=WEBHOOK_SECRET)

    async def take(self, request: web.Request) -> web.Response:
        body, headers = await request.read(), dict(request.headers)
        self.client.webhooks.verify_signature(body, headers)
        event = json.loads(body)
        assert headers["webhook-id"] == event["id"]
        self.events.append(event)
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)


async def test_webhook_has_the_rows_and_comes_until_it_is_taken(tmp_path: Path) -> None:
    receiver = Receiver(503, 500)
    async with web_server(receiver.take) as url, serving(tmp_path, url) as served:
        made = await respond(served, "s")
        await reward(served, "s", done=True)
        await wait_until(lambda: len(receiver.events) == 3)
        other = await respond(served, "other", BOB)
        await reward(served, "other", done=True)
        await wait_until(lambda: len(receiver.events) == 4)
        rows = await rows_of(served, "s")
    first, second, third, fourth = receiver.events
    assert first == second == third
    assert (first["type"], first["data"]["session"], first["data"]["rows"]) == ("rollout.done", "s", rows)
    assert (responses(rows), responses(fourth["data"]["rows"])) == ({made}, {other})
    assert fourth["id"] != first["id"]


async def test_long_session_has_no_rows_in_its_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_BODY", 100)
    receiver = Receiver()
    async with web_server(receiver.take) as url, serving(tmp_path, url) as served:
        await respond(served, "s")
        await reward(served, "s", done=True)
        await wait_until(lambda: receiver.events)
    (event,) = receiver.events
    assert (event["data"]["session"], event["data"]["rows"]) == ("s", None)


async def restarted(tmp_path: Path, receiver: Receiver, **changes: Any) -> Mapping[str, set[str]]:
    """Serve again, until a new session has come, and return the ids of the webhooks of each session."""
    async with web_server(receiver.take) as url, serving(tmp_path, url, **changes) as served:
        name = f"s{len(receiver.events)}"
        await respond(served, name)
        await reward(served, name, done=True)
        await wait_until(lambda: any(event["data"]["session"] == name for event in receiver.events))
        await wait_until(
            lambda: len({event["data"]["session"] for event in receiver.events}) >= served_sessions(served)
        )
        await wait_until(lambda: not unsent(served))  # else what has arrived comes again after a restart
    return {
        session: {event["id"] for event in receiver.events if event["data"]["session"] == session}
        for session in {event["data"]["session"] for event in receiver.events}
    }


def served_sessions(served: Served) -> int:
    recordings = served.parts.settings.record
    assert recordings
    return len(list(recordings.glob("resp_*")))


def unsent(served: Served) -> int:
    """Return how many sessions have not arrived, as far as the index knows."""
    recordings = served.parts.settings.record
    assert recordings
    with closing(sqlite3.connect(recordings / FILE)) as index:
        ((count,),) = index.execute("SELECT count(*) FROM known WHERE version > sent_version")
    return int(count)


@pytest.mark.parametrize("lost", ["nothing", "index", "broken"])
async def test_restart_exports_nothing_under_another_id(tmp_path: Path, lost: str) -> None:
    receiver = Receiver()
    before = await restarted(tmp_path, receiver)
    index = tmp_path / "recordings" / FILE
    if lost == "index":
        index.unlink()
    elif lost == "broken":
        index.write_bytes(b"no database" * 999)
    count = len(receiver.events)
    after = await restarted(tmp_path, receiver)
    assert {session: after[session] for session in before} == before
    assert {len(ids) for ids in after.values()} == {1}
    if lost == "nothing":
        assert len(receiver.events) == count + 1
