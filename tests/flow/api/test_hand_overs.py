"""How often a request waits for a thread: a light one only for its commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.protocol.events import ResponseCompleted
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages, responses_pipeline
from tests.support.server import script
from tests.support.stores import open_store

COMMITS = 2
"""Of the beginning of a response, and of its end."""

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}

pytestmark = pytest.mark.usefixtures("clock")  # events that wait for their response's end are else stored after a time


@pytest.fixture
def hand_overs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that threads were given, since the last look."""
    given: list[str] = []
    submit = ThreadPoolExecutor.submit

    def counted(self: ThreadPoolExecutor, work: Callable[..., Any], /, *more: Any, **named: Any) -> Future[Any]:
        given.append(repr(work))
        return submit(self, work, *more, **named)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    return given


async def answered(store: Store, body: dict[str, Any], raw: RawPrompt | None = None) -> str:
    engine, runs = ScriptedEngine(script()), RunRegistry(store)
    scheduler = Scheduler(responses_pipeline(harmony_stages(load_encoding()), engine, runs), engine, runs, store)
    request = read_request(json.dumps(body).encode())
    async with await scheduler.prepare(request.continuing(raw) if raw else request) as opened:
        events = [event async for event in scheduler.run(opened)]
    assert isinstance(events[-1], ResponseCompleted)
    return opened.request.facts.response_id


@pytest.mark.parametrize(
    ("body", "is_light"),
    [
        ({"input": "Hi"}, True),
        ({"input": [{"role": "user", "content": "Hi"}], "instructions": "Be kind.", "temperature": 0.5}, True),
        ({"input": "a" * 9_000}, False),
        ({"input": [{"role": "user", "content": "Hi"}] * 20}, False),
        ({"input": "Hi", "instructions": "a" * 9_000}, False),
        ({"input": "Hi", "tools": [TOOL]}, False),
    ],
)
async def test_light_request_waits_for_no_thread_but_for_its_commits(
    body: dict[str, Any], is_light: bool, hand_overs: list[str], tmp_path: Path
) -> None:
    async with open_store(str(tmp_path / "store.sqlite3")) as store:
        await answered(store, body)
        hand_overs.clear()
        await answered(store, body)
        assert (len(hand_overs) == COMMITS) == is_light, hand_overs


@pytest.mark.parametrize(
    ("raw", "is_light"),
    [
        (RawPrompt("Once"), True),
        (RawPrompt(token_ids=(1,) * 2_000), True),
        (RawPrompt("a" * 9_000), False),
        (RawPrompt(token_ids=(1,) * 9_000), False),
    ],
    ids=["text", "tokens", "long text", "many tokens"],
)
async def test_light_prompt_without_template_waits_for_no_thread_but_for_its_commits(
    raw: RawPrompt, is_light: bool, hand_overs: list[str], tmp_path: Path
) -> None:
    async with open_store(str(tmp_path / "store.sqlite3")) as store:
        await answered(store, {}, raw)
        hand_overs.clear()
        await answered(store, {}, raw)
        assert (len(hand_overs) == COMMITS) == is_light, hand_overs


async def test_light_request_that_continues_a_light_one_waits_for_the_store_alone(
    hand_overs: list[str], tmp_path: Path
) -> None:
    async with open_store(str(tmp_path / "store.sqlite3")) as store:
        before = await answered(store, {"input": "Hi"})
        hand_overs.clear()
        await answered(store, {"input": "And?", "previous_response_id": before})
        assert len([work for work in hand_overs if "SqliteDatabase.write" in work]) == COMMITS
        assert all("SqliteDatabase" in work for work in hand_overs), hand_overs
