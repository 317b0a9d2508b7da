from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.pipeline.plugins import load
from penstock.pipeline.protocol.events import OutputTextDelta
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples import translate_answers
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import item_texts
from tests.support.server import running_server, script

STAGE = load(["tests.examples.translate_answers:install"])
TEXT = "Good day. How are you?\n\nI am well, thanks"
MARKUP = f"<|channel|>analysis<|message|>Be kind.<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}<|return|>"


@pytest.fixture
async def queries(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[Any], None]:
    """What the translator was asked, which answers in capitals, or not at all if asked for ``thanks``."""
    seen = []

    async def translate(request: web.Request) -> web.Response:
        seen.append(query := await request.json())
        if "thanks" in query["q"]:
            return web.Response(status=503)
        return web.json_response({"translatedText": query["q"].upper()})

    app = web.Application()
    app.router.add_post("/translate", translate)
    async with TestServer(app) as server:
        monkeypatch.setattr(translate_answers, "URL", str(server.make_url("/translate")))
        yield seen


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
async def test_answers_are_translated_by_sentence(chunk_size: int, queries: list[Any], tmp_path: Path) -> None:
    engine = ScriptedEngine(script(MARKUP, chunk_size=chunk_size))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        events = read_sse(await served.stream({"input": "Hi"}))
        answer = final(events)
        deltas = [str(event.delta) for event in events if isinstance(event, OutputTextDelta)]
        assert "".join(deltas) == "GOOD DAY. HOW ARE YOU?\n\nI am well, thanks"
        assert item_texts(answer) == ["Be kind.", "".join(deltas)]
        assert [query["q"] for query in queries] == ["Good day.", "How are you?", "I am well, thanks"]
        await served.post({"input": "And?", "previous_response_id": answer.id})
        assert "GOOD DAY. HOW ARE YOU?" in served.prompt_text()


async def test_structured_answers_are_not_translated(queries: list[Any], tmp_path: Path) -> None:
    engine = ScriptedEngine(script('<|channel|>final<|message|>{"a": "Good day. "}<|return|>'))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        _, answer = await served.post({"input": "Hi", "text": {"format": {"type": "json_object"}}})
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": "Good day. "}
    assert queries == []
