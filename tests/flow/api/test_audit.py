"""The audit log of a server: who did what, and by which rule it was allowed or refused, without any text."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.keys import main
from penstock.api.http.api_key import digest_of
from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.resources.resources import SHIPPED, check_resources
from penstock.api.settings import Settings
from penstock.api.start.serving import FileReader
from penstock.extensions.audit.records import METHODS, VERBS, action_of
from penstock.extensions.audit.resource import check
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import CannotStart
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.prompts import Prompts
from tests.examples import guard_words
from tests.support.api_clients import openai_client
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
SECRET = "the quick brown fox"


@asynccontextmanager
async def audited(folder: Path, *arguments: str, **options: Any) -> AsyncGenerator[ScriptedServer, None]:
    file = folder / "keys"
    file.write_text(f"{ALICE} name=alice team=research limits=slow\n{BOB}\n")
    limits = folder / "limits.toml"
    limits.write_text("[slow]\nrequests_per_minute = 3\n")
    keys, admission = Keys(file), Admission(limits)
    admission.name_of = keys.limits
    settings = read_settings(["--audit", str(folder / "audit.jsonl"), *arguments])
    options |= {"keys": keys, "settings": settings, "admission": admission}
    async with running_server(ScriptedEngine(script()), folder, resources=("audit",), **options) as server:
        yield server


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, without times, which are checked, and what differs in each run."""
    found = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    for line in found:
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert re.fullmatch(r".*\.\d{3}\+00:00", line.pop("time"))
        line.pop("request_id", None)
        line.pop("client", None)
    return found


async def test_lines_say_who_did_what_and_by_which_rule(tmp_path: Path) -> None:
    async with audited(tmp_path) as server:
        async with openai_client(server.url, ALICE) as client:
            created = await client.responses.create(input=SECRET)
            await client.responses.retrieve(created.id)
            await client.responses.delete(created.id)
        for key in (ALICE, ALICE, ALICE, BOB, f"{ALICE}x"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"input": SECRET, "previous_response_id": "resp_none"}
            async with server.client.post(f"{server.url}/v1/responses", json=body, headers=headers):
                pass
        async with server.client.get(f"{server.url}/health"):
            pass
    alice = {"key": "alice", "owner": lines(tmp_path)[0]["owner"], "team": "research", "api": "responses"}
    of_one = {"object": "responses", "response_id": created.id, "decision": "allowed", "status": 200, **alice}
    first, read, deleted, *others = lines(tmp_path)
    assert first == {"action": "create", "model": "tiny", **of_one}
    assert read == {"action": "read", **of_one}
    assert deleted == {"action": "delete", **of_one}
    assert [(each["decision"], each["rule"], each["status"], each.get("key")) for each in others] == [
        ("refused", "previous_response_not_found", 400, "alice"),
        ("refused", "previous_response_not_found", 400, "alice"),
        ("refused", "rate_limit_exceeded", 429, "alice"),
        ("refused", "previous_response_not_found", 400, first_of(BOB)),
        ("refused", "invalid_api_key", 401, None),
    ]
    assert "requests per minute: limit 3" in others[2]["reason"]
    assert others[4]["refused_key"] == first_of(f"{ALICE}x")
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(part in text for part in (SECRET, "Hello", ALICE, BOB))


def first_of(key: str) -> str:
    return digest_of(key)[:8]


async def test_sockets_have_a_line_for_each_response(tmp_path: Path) -> None:
    bob = {"Authorization": f"Bearer {BOB}"}
    async with audited(tmp_path) as server, connected(server, headers=bob) as client:
        response = await client.create(input=SECRET)
    created, opened = lines(tmp_path)
    assert (created["action"], created["object"], created["response_id"]) == ("create", "responses", response.id)
    assert (opened["action"], opened["object"], opened["status"]) == ("connect", "responses", 101)


async def test_level_of_the_log_leaves_no_line_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the audit log brings no line into the log."""
    caplog.set_level(logging.WARNING, "penstock")
    async with audited(tmp_path) as server, openai_client(server.url, BOB) as client:
        await client.responses.create(input="Hi")
        decided("a rule", "changed", "a thing")
        assert not [record for record in caplog.records if record.name == "penstock.api.http.access_log"]
    assert [line["action"] for line in lines(tmp_path)] == ["create", "decide"]
    (tmp_path / "audit.jsonl").unlink()
    decided("a rule", "changed", "after the end")
    assert not (tmp_path / "audit.jsonl").exists()


async def test_decision_of_a_stage_is_a_line(tmp_path: Path) -> None:
    def edit(pipeline: Any) -> Any:
        return guard_words.install(pipeline, guard_words.Settings(words=["hello"]))

    async with audited(tmp_path, edit=edit) as server, openai_client(server.url, BOB) as client:
        response = await client.responses.create(input="Hi")
        assert response.status == "incomplete"
    decision, created = lines(tmp_path)
    assert decision == {"action": "decide", "rule": "guard words", "decision": "refused", "subject": response.id}
    assert created["response_id"] == response.id


async def test_facts_of_a_decision_are_short_names_and_numbers(tmp_path: Path) -> None:
    async with audited(tmp_path):
        decided("r", "allowed", "s" * 9_999, count=2, none=None, made=["x"])  # type: ignore[arg-type]
    (line,) = lines(tmp_path)
    assert len(line.pop("subject")) < 200
    assert line == {"action": "decide", "rule": "r", "decision": "allowed", "count": 2, "made": "['x']"}


async def test_every_route_says_what_it_does(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, resources=SHIPPED) as server:
        routes = [route for route in server.api.app(1).router.routes() if route.resource]
    known = {*VERBS.values(), *METHODS.values(), "read", "update"}
    for route in routes:
        assert route.resource is not None
        action, kind = action_of(route.method, route.resource.canonical)
        assert action in known, route
        assert kind, route
        assert not set(kind.split("/")) & VERBS.keys(), f"{route}: {kind} ends with what is done"


async def test_keys_that_a_command_changes_have_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_AUDIT", str(tmp_path / "audit.jsonl"))
    for arguments in (("make", "alice", "--team", "research"), ("list",), ("revoke", "alice")):
        await asyncio.to_thread(main, [*arguments, "--file", str(tmp_path / "keys")])
    made, revoked = lines(tmp_path)
    facts = {"action": "decide", "rule": "penstock keys", "decision": "changed", "subject": "alice"}
    assert made.items() >= (facts | {"change": "make", "team": "research"}).items()
    assert revoked.items() >= (facts | {"change": "revoke"}).items()
    assert made["user"] == revoked["user"]
    assert "sk-" not in (tmp_path / "audit.jsonl").read_text()


async def test_files_that_are_read_again_have_lines(tmp_path: Path) -> None:
    async with audited(tmp_path) as server:
        keys, admission = server.api.keys, server.scheduler.admission
        parts: Any = SimpleNamespace(
            keys=keys, scheduler=server.scheduler, prompts=Prompts(), take_models=None, at_sighup=()
        )
        settings = read_settings(["--api-key-file", str(tmp_path / "keys"), "--limits", str(tmp_path / "limits.toml")])
        assert isinstance(settings, Settings)
        reader = FileReader(settings, parts)
        reader.read_again()
        write(tmp_path / "keys", f"{ALICE} name=alice limits=fast\nsk-carol-0123456789 name=carol\n")
        write(tmp_path / "limits.toml", "[fast]\nresponses = 3\n")
        reader.read_again()
        write(tmp_path / "limits.toml", "[fast]\nresponse = 3\n")
        reader.read_again()
        assert admission.tables.keys() == {"fast"}
    usual = {"action": "decide", "rule": "SIGHUP"}
    carol, alice, bob = first_of("sk-carol-0123456789"), first_of(ALICE), first_of(BOB)
    assert lines(tmp_path) == [
        {**usual, "decision": "changed", "subject": "the limits", "new": "fast", "gone": "slow"},
        {
            **usual,
            "decision": "changed",
            "subject": "the API keys",
            "new": f"carol ({carol})",
            "changed": f"alice ({alice})",
            "gone": bob,
        },
        {**usual, "decision": "refused", "subject": "the limits"},
    ]


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def test_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    settings = read_settings(["--audit", str(tmp_path / "none" / "audit.jsonl")])
    with pytest.raises(CannotStart, match=r"--audit .*: No such file or directory"):
        check_resources(settings)
    with pytest.raises(CannotStart, match=r"--audit .*: No such file or directory"):
        await check(settings)
    assert await check(read_settings([])) == "none"
