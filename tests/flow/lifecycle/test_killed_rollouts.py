"""Servers that are killed while they export rollouts: each session that is over comes, whole, under one id."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from penstock.pipeline.recordings.response_folder import RESPONSE
from tests.support.api_clients import wait_until
from tests.support.server_process import (
    OPERATOR_KEY,
    WEBHOOK_SECRET,
    ServerProcess,
    serve_with_rollouts,
    serving_process,
)
from tests.support.tool_servers import web_server

SESSIONS = 12


async def finished(server: ServerProcess, recordings: Path, session: str, turns: int = 2) -> set[str]:
    """Make a session, say that it is over once it is recorded, and return its responses."""
    made = set()
    for _ in range(turns):
        status, response = await server.post({"input": "Hi", "session_id": session})
        assert status == 200, response
        made.add(response["id"])
        await wait_until((recordings / response["id"] / RESPONSE).exists)
    url, headers = f"{server.url}/v1/rollouts/{session}/reward", {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with server.client.post(url, json={"reward": 0.5, "done": True}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    return made


def options(folder: Path, to: str, script: str = "quick") -> tuple[str, ...]:
    known = ("--heartbeat", "0.2", "--stale-after", "2", "--no-sandbox", "--allow-address", "127.0.0.1")
    return (script, *known, "--record", str(folder / "recordings"), "--rollouts-to", to)


def responses(rows: list[Any]) -> set[str]:
    return {turn["response"] for row in rows for turn in row["turns"]}


def exported(out: Path) -> dict[str, set[str]]:
    found = {}
    for path in out.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["reward"] for row in rows} == {0.5}
        found[rows[0]["session"]] = responses(rows)
    return found


async def test_files_of_all_sessions_come_whatever_is_killed(tmp_path: Path) -> None:
    """The server is killed at once after each few sessions: before it looks, while it reads, or while it writes."""
    out, made = tmp_path / "out", dict[str, set[str]]()
    store = str(tmp_path / "store.sqlite3")
    async with serving_process(serve_with_rollouts, options(tmp_path, str(out)), store, tmp_path) as server:
        for number in range(SESSIONS):
            made[f"s{number}"] = await finished(server, tmp_path / "recordings", f"s{number}")
            if number % 3 == 2:
                await asyncio.sleep(number / 10)
                await server.kill()
                await server.start()
        await wait_until(lambda: len(exported(out)) == SESSIONS)
        assert all(found <= made[session] for session, found in exported(out).items())
        await wait_until(lambda: exported(out) == made)


async def test_webhooks_of_all_sessions_come_whatever_is_killed(tmp_path: Path) -> None:
    """The server is killed while the receiver is down, and in the middle of a delivery."""
    client = openai.OpenAI(api_key="none", webhook_secret=WEBHOOK_SECRET)
    got: list[Any] = []
    state = {"answers": "refuse"}
    gate = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        client.webhooks.verify_signature(body, dict(request.headers))
        got.append(json.loads(body))
        if state["answers"] == "hang":
            await gate.wait()
        return web.Response(status=503 if state["answers"] == "refuse" else 204)

    store = str(tmp_path / "store.sqlite3")
    async with (
        web_server(take) as receiver,
        serving_process(serve_with_rollouts, options(tmp_path, receiver), store, tmp_path) as server,
    ):
        made = {"refused": await finished(server, tmp_path / "recordings", "refused")}
        await wait_until(lambda: len(got) >= 2)
        await server.kill()
        state["answers"], before = "hang", len(got)
        await server.start()
        await wait_until(lambda: len(got) > before)
        made["late"] = await finished(server, tmp_path / "recordings", "late")
        await server.kill()  # the receiver may have taken the first, or not
        state["answers"] = "take"
        gate.set()
        await server.start()
        made["new"] = await finished(server, tmp_path / "recordings", "new")
        await wait_until(lambda: {event["data"]["session"] for event in got} == made.keys())
        await wait_until(lambda: {each: latest(got)[each] for each in made} == made)
    assert len({event["id"] for event in got if event["data"]["session"] == "refused"}) == 1


def latest(got: list[Any]) -> dict[str, set[str]]:
    """Return the responses of the latest webhook of each session."""
    return {event["data"]["session"]: responses(event["data"]["rows"]) for event in got}


async def test_response_of_a_killed_server_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """A killed server leaves a recording without an end, and its session comes once nothing was written for long."""
    out, recordings = tmp_path / "out", tmp_path / "recordings"
    slow, store = options(tmp_path, str(out), "slow"), str(tmp_path / "store.sqlite3")
    async with serving_process(serve_with_rollouts, slow, store, tmp_path, "--rollouts-after", "3") as server:
        status, first = await server.post({"input": "Hi", "session_id": "s"})
        assert status == 200
        cut = asyncio.create_task(server.post({"input": "Hi", "session_id": "s"}))
        await wait_until(lambda: len(list(recordings.glob("resp_*/tokens.jsonl"))) == 2)
        await server.kill()
        await asyncio.gather(cut, return_exceptions=True)
        await server.start()
        await wait_until(lambda: out.is_dir() and list(out.glob("*.jsonl")))
    ((rows,),) = ([path.read_text() for path in out.glob("*.jsonl")],)
    assert responses([json.loads(row) for row in rows.splitlines()]) == {first["id"]}
