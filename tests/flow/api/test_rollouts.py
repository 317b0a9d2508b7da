"""The routes of rollouts: what a session was worth, and its rows as they are now, for the operator alone."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import pytest
from aiohttp import ClientPayloadError
from yarl import URL

from penstock.api.http.api_key import digest_of
from penstock.api.http.auth import Keys
from penstock.extensions.rollouts import resource
from penstock.extensions.rollouts.known import KnownSessions
from penstock.extensions.rollouts.rewards import FILE, RewardLine
from penstock.pipeline import audit
from penstock.pipeline.recordings.redaction import key_of
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.normalize.facts import recorded_session
from tests.support.api_clients import wait_until
from tests.support.live_server import KEY, bearer, live_server
from tests.support.processes import PATIENCE
from tests.support.server import Server, script

pytestmark = pytest.mark.io

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"

ODD = ("a/b", "a%2Fb", "..%", "é" * 500, '"', "x" * 4096, "a b?c#d", "%FF", "{}", "\u2028")
"""Ids of sessions that a client may choose."""

Served: TypeAlias = Server[ScriptedEngine]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Served, None]:
    keys = Keys(given=(ALICE, BOB), operator=KEY)
    async with live_server(
        ScriptedEngine(script()), tmp_path, keys=keys, resources=("rollouts",), record=True
    ) as server:
        yield server


async def respond(served: Served, session: str | None, key: str = ALICE, **more: Any) -> str:
    body = {"input": "Hi", "session_id": session, "model": served.engine.models[0], **more}
    async with served.client.post(f"{served.url}/v1/responses", json=body, headers=bearer(key)) as answer:
        made = await answer.json()
        assert answer.status == 200, made
    recording = served.parts.settings.record
    assert recording
    await wait_until((recording / made["id"] / "response.json").exists)
    return str(made["id"])


def at(served: Served, session: str, end: str = "") -> URL:
    return URL(f"{served.url}/v1/rollouts/{quote(session, safe='')}{end}", encoded=True)


async def reward(served: Served, session: str, by: str = KEY, **body: Any) -> tuple[int, Any]:
    async with served.client.post(at(served, session, "/reward"), json=body, headers=bearer(by)) as answer:
        return answer.status, await answer.json()


async def rows(served: Served, session: str) -> list[Any]:
    async with served.client.get(at(served, session), headers=bearer()) as answer:
        text = await answer.text()
        assert answer.status in (200, 404), text
        return [json.loads(each) for each in text.split("\n")[:-1]] if answer.status == 200 else []


async def listed(served: Served, query: str = "") -> Any:
    async with served.client.get(f"{served.url}/v1/rollouts{query}", headers=bearer()) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_session_has_its_rows_and_the_last_reward(served: Served) -> None:
    first = await respond(served, "s")
    second = await respond(served, None, previous_response_id=first)
    given: dict[str, Any]
    for given in ({"reward": 1}, {"reward": 0.25, "done": True}, {"reward": -3, "name": "style", "response": first}):
        status, answer = await reward(served, "s", **given)
        assert (status, answer["responses"], answer["reward"]) == (200, 2, given["reward"])
    got = await rows(served, "s")
    assert {turn["response"] for row in got for turn in row["turns"]} == {first, second}
    whole, style = {"reward": 0.25}, {"reward": -3.0, "name": "style", "response": first}
    for row in got:
        has_first = first in {turn["response"] for turn in row["turns"]}
        assert (row["session"], row["key"], row["reward"]) == ("s", key_of(digest_of(ALICE)), 0.25)
        assert row["rewards"] == [whole, style][: 1 + has_first]
        assert sum(row["mask"]) > 0


async def test_sessions_are_listed_page_by_page_the_newest_first(served: Served) -> None:
    for number in range(5):
        await respond(served, f"s{number}", (ALICE, BOB)[number % 2])
    found, after = [], ""
    while True:
        page = await listed(served, f"?limit=2{after}")
        found += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert [each["session"] for each in found] == [f"s{number}" for number in (4, 3, 2, 1, 0)]
    assert [each["key"] for each in found[:2]] == [key_of(digest_of(key)) for key in (ALICE, BOB)]
    assert {each["responses"] for each in found} == {1}
    await reward(served, "s1", reward=1, done=True)
    assert {each["session"] for each in (await listed(served))["data"] if each["done"]} == {"s1"}
    await respond(served, "s1", BOB)
    assert not any(each["done"] for each in (await listed(served))["data"])


@pytest.mark.parametrize("session", ODD, ids=lambda session: ascii(session)[:12])
async def test_any_id_names_its_session(served: Served, session: str) -> None:
    await respond(served, session)
    assert (await reward(served, session, reward=0.5))[1]["session"] == recorded_session(session)
    (row,) = await rows(served, session)
    assert (row["session"], row["reward"]) == (recorded_session(session), 0.5)


async def test_reward_may_come_first(served: Served) -> None:
    status, answer = await reward(served, "later", reward=7)
    assert (status, answer["responses"]) == (200, 0)
    assert await rows(served, "later") == []
    await respond(served, "later")
    assert [row["reward"] for row in await rows(served, "later")] == [7]


async def test_reward_of_a_session_of_two_keys_names_one(served: Served) -> None:
    ids = {key: await respond(served, "shared", key) for key in (ALICE, BOB)}
    digests = {key: key_of(digest_of(key)) for key in ids}
    status, answer = await reward(served, "shared", reward=1)
    assert (status, answer["error"]["param"]) == (400, "key")
    assert all(digest in answer["error"]["message"] for digest in digests.values())
    assert (await reward(served, "shared", reward=1, key=digests[BOB]))[0] == 200
    assert (await reward(served, "shared", reward=2, response=ids[ALICE]))[0] == 200
    found = {row["key"]: row for row in await rows(served, "shared")}
    assert {key: found[digests[key]]["reward"] for key in ids} == {ALICE: None, BOB: 1}
    assert found[digests[ALICE]]["rewards"] == [{"reward": 2.0, "response": ids[ALICE]}]


async def test_reward_that_came_before_a_second_key_goes_to_none(served: Served) -> None:
    await respond(served, "shared")
    assert (await reward(served, "shared", reward=1))[0] == 200
    assert [row["reward"] for row in await rows(served, "shared")] == [1]
    await respond(served, "shared", BOB)
    assert [row["reward"] for row in await rows(served, "shared")] == [None, None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward": 1, "name": "x" * 257}, "name"),
        ({"reward": 1, "response": 5}, "response"),
        ({"reward": 1, "key": "nothing"}, "key"),
        ({"reward": 1, "done": "yes"}, "done"),
    ],
)
async def test_wrong_reward_is_refused(served: Served, body: Any, param: str) -> None:
    status, answer = await reward(served, "s", **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert served.parts.settings.record
    assert not (served.parts.settings.record / FILE).exists()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
async def test_reward_is_a_finite_number(served: Served, number: str) -> None:
    url, headers = at(served, "s", "/reward"), bearer() | {"Content-Type": "application/json"}
    async with served.client.post(url, data=f'{{"reward": {number}}}', headers=headers) as answer:
        assert answer.status == 400, await answer.text()


async def test_client_gets_nothing(served: Served) -> None:
    await respond(served, "s")
    assert (await reward(served, "s", ALICE, reward=1))[0] == 401
    for path in ("", "/s"):
        async with served.client.get(f"{served.url}/v1/rollouts{path}", headers=bearer(ALICE)) as answer:
            assert answer.status == 401


async def test_unknown_session_and_page_are_not_found(served: Served) -> None:
    await respond(served, "s")
    for path, param in (("/t", "session"), ("/%FE", "session"), ("?after=rollout_0", "after")):
        url = URL(f"{served.url}/v1/rollouts{path}", encoded=True)
        async with served.client.get(url, headers=bearer()) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (404, param)


async def test_server_that_records_nothing_has_no_rollouts(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script()), tmp_path, resources=("rollouts",)) as served:
        status, answer = await reward(served, "s", reward=1)
        assert (status, "--record" in answer["error"]["message"]) == (400, True)
        for path in ("", "/s"):
            async with served.client.get(f"{served.url}/v1/rollouts{path}", headers=bearer()) as got:
                assert got.status == 400


async def test_reward_is_a_line_of_the_audit_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    audit.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", audit.LOGGER):
            await reward(served, "s", reward=0.5, name="style")
    finally:
        audit.logger.removeHandler(caplog.handler)
    (line,) = [record.__dict__["audit"] for record in caplog.records if record.name == audit.LOGGER]
    assert line == {"rule": "rewards", "decision": "changed", "subject": "s", "reward": 0.5, "name": "style"}


async def test_index_that_is_busy_holds_neither_rewards_nor_responses(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, refresh = threading.Event(), KnownSessions.refresh

    def slow(known: KnownSessions) -> None:
        held.wait(20)
        refresh(known)

    monkeypatch.setattr(resource, "KNOWN_WAIT", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(KnownSessions, "refresh", slow)
        status, answer = await reward(served, "s", reward=1)
        assert (status, answer["responses"]) == (200, None)
        await respond(served, "s")
        held.set()
    assert [row["reward"] for row in await rows(served, "s")] == [1]


async def test_rows_are_sent_as_they_are_made(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long session is never a list of all its lines."""
    is_read = threading.Event()

    def rows_of(*_: object) -> Iterator[RewardLine]:
        yield RewardLine("s", 1)
        assert is_read.wait(PATIENCE)
        yield RewardLine("s", 2)

    await respond(served, "s")
    monkeypatch.setattr(KnownSessions, "rows", rows_of)
    async with served.client.get(at(served, "s"), headers=bearer()) as answer:
        first = await answer.content.readline()
        is_read.set()
        rest = await answer.content.read()
    assert [json.loads(each)["reward"] for each in (first, rest)] == [1, 2]


@pytest.mark.parametrize("sent", [0, 1])
async def test_rows_that_cannot_be_read_are_an_error_or_an_answer_that_breaks_off(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    def rows_of(*_: object) -> Iterator[RewardLine]:
        yield from [RewardLine("s", 1)] * sent
        raise OSError(errno.EIO, "Input/output error")

    await respond(served, "s")
    monkeypatch.setattr(KnownSessions, "rows", rows_of)
    async with served.client.get(at(served, "s"), headers=bearer()) as answer:
        if sent:
            with pytest.raises(ClientPayloadError):
                await answer.read()
        else:
            assert answer.status == 503


async def test_rewards_that_cannot_be_written_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resource, "write_reward", full)
    status, answer = await reward(served, "s", reward=1)
    assert (status, "No space left" in answer["error"]["message"]) == (503, True)
