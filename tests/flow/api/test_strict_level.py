"""The operator's level of strictness at every door, over engines and for requests that cannot be held, and replayed."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from penstock.api.cli.replayer import replay_of
from penstock.api.settings import Settings
from penstock.api.start.assembly import strict_level
from penstock.api.start.backends import stages
from penstock.pipeline.core import source_of
from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import StrictLevel
from penstock.pipeline.recordings.recorder import Recorder
from penstock.server import pipeline
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.tools import Toolbox
from tests.support.chat_families import load_model, model_of_unknown_syntax
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.harmony import accepted_markup, call_markup, final_markup
from tests.support.messages import PATH
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.socket_client import connected

Json = dict[str, Any]

SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Json = {"name": "get_weather", "parameters": SCHEMA}
FLAT: Json = {"type": "function", **FUNCTION}
ASKING: Json = {"model": "tiny", "input": "Hi", "tools": [FLAT]}
CHAT: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
MESSAGES: Json = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
}
DOORS: dict[str, tuple[str, Json]] = {
    "responses": ("/v1/responses", ASKING),
    "open responses": ("/openresponses/v1/responses", ASKING),
    "chat": ("/v1/chat/completions", CHAT),
    "messages": (PATH, MESSAGES),
}


def holds(prompt: Prompt) -> str:
    """Return the level to which a prompt holds calls of the function; empty for none."""
    if prompt.grammar is None:
        return ""
    for right in (call_markup("functions.get_weather", '{"city":"Paris"}') + "<|call|>", final_markup("Hello!")):
        assert accepted_markup(prompt.grammar, right) == right
    other = call_markup("functions.get_climate", "{}") + "<|call|>"
    assert accepted_markup(prompt.grammar, other) != other
    wrong = call_markup("functions.get_weather", '{"city":5}') + "<|call|>"
    return "function" if accepted_markup(prompt.grammar, wrong) == wrong else "parameter"


def server(where: Path, level: StrictLevel | None = "parameter", **options: Any) -> Any:
    toolbox = Toolbox(strict_level=lambda _: level or UNSET)
    return running_server(ScriptedEngine(script(HELLO)), where, toolbox=toolbox, **options)


@pytest.mark.parametrize("level", [None, "function", "parameter"])
@pytest.mark.parametrize("door", DOORS)
async def test_level_holds_at_every_door(tmp_path: Path, door: str, level: StrictLevel | None) -> None:
    path, body = DOORS[door]
    async with server(tmp_path, level) as served:
        assert (await served.post(body, path))[0] == 200
        await served.stream(body, path)
        assert [holds(prompt) for prompt in served.engine.prompts] == [level or ""] * 2


async def test_level_holds_in_the_background_and_over_a_socket(tmp_path: Path) -> None:
    async with server(tmp_path) as served:
        ended = await served.wait_for_end(await served.start_background(ASKING))
        assert (ended["status"], ended["tools"][0]["strict"]) == ("completed", None)
        async with connected(served) as socket:
            await socket.create(**ASKING)
        assert [holds(prompt) for prompt in served.engine.prompts] == ["parameter"] * 2


@pytest.mark.parametrize(
    "options", [{"tool_choice": "none"}, {"tools": []}, {"ignore_eos": True}, {"min_tokens": 9}], ids=str
)
async def test_request_that_cannot_be_held_is_answered_as_without_the_level(tmp_path: Path, options: Json) -> None:
    async with server(tmp_path) as served:
        assert (await served.post({**ASKING, **options}))[0] == 200
        assert [prompt.grammar for prompt in served.engine.prompts] == [None]


async def test_continued_answer_of_gpt_oss_goes_on(tmp_path: Path) -> None:
    cut = {"type": "message", "role": "assistant", "status": "incomplete", "content": "It is"}
    async with server(tmp_path) as served:
        assert (await served.post({**ASKING, "input": [{"role": "user", "content": "Hi"}, cut]}))[0] == 200
        [prompt] = served.engine.prompts
        assert (prompt.grammar, prompt.channel) == (None, "final")


async def test_replay_holds_what_was_held(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", pause=0.01)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(recorder.close)
        served: ScriptedServer = await closing.enter_async_context(server(tmp_path, edit=recorder.tapped))
        assert (await served.post(ASKING))[0] == 200
    [folder] = (tmp_path / "recordings").iterdir()
    replay = await replay_of(folder, "render")
    [prompt] = [frame for frame in replay.trace.after("render").frames if isinstance(frame, Prompt)]
    assert holds(prompt) == "parameter"


# Engines


class Refusing(ScriptedEngine):
    """An engine that may lose its ability to hold output to a grammar."""

    holds_grammars = True


async def test_level_follows_what_the_engine_can_hold() -> None:
    engine = Refusing()
    assert strict_level("parameter", engine) == "parameter"
    engine.holds_grammars = False
    assert strict_level("parameter", engine) is UNSET
    assert strict_level("function", ScriptedEngine()) == "function"
    assert strict_level("auto", ScriptedEngine()) is UNSET


@pytest.mark.parametrize("grammars", ["held", "ignored", "refused"])
async def test_engine_without_grammars_answers_without_the_level(
    grammars: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = FakeVllm(grammars=grammars)
    async with running_fakes(vllm):
        settings = Settings(engine=[vllm.url], store="none", sandbox=False, tool_strict_level="parameter")
        async with pipeline(settings) as responses:
            request = CreateResponse.model_validate(ASKING)
            async with responses.open(source_of([request])) as events:
                assert [event async for event in events]
    is_held = grammars == "held"
    assert ("structured_outputs" in str(vllm.prompts[-1])) is is_held
    assert ("--tool-strict-level holds no calls" in caplog.text) is not is_held


@pytest.mark.vllm
@pytest.mark.parametrize("level", ["auto", "function"])
def test_family_whose_calls_cannot_be_held_is_named_at_the_start(level: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(tool_strict_level=level)
    with caplog.at_level(logging.WARNING):
        stages(settings, load_model())
        assert "--tool-strict-level" not in caplog.text
        stages(settings, model_of_unknown_syntax())
    assert ("--tool-strict-level holds no calls" in caplog.text) is (level == "function")
