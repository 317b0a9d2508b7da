from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TokenChunk,
)
from penstock.pipeline.plugins import WrongPlugin, function_named
from penstock.services.engines.custom import guarded_engine, misfit, open_engine
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import ModelStages, harmony_stages, responses_pipeline, text_stages
from tests.support.event_streams import final, run_request

ENGINES = """
from contextlib import asynccontextmanager
from penstock.pipeline.errors import CannotStart
from penstock.services.engines.scripted import ScriptedEngine

opened = []

def plain(settings):
    return ScriptedEngine(models=(settings.model,))

@asynccontextmanager
async def managed(settings):
    engine = ScriptedEngine()
    opened.append(engine)
    yield engine
    assert not engine.is_alive  # closed before the block ends
    opened.remove(engine)

def bare():
    return ScriptedEngine()

async def coroutine(settings):
    return ScriptedEngine()

async def generator(settings):
    yield ScriptedEngine()

def failing(settings):
    raise RuntimeError("no GPU")

def unready(settings):
    raise CannotStart("no weights")

def nothing(settings):
    return None

def class_(settings):
    return ScriptedEngine
"""


@pytest.fixture
def engines(tmp_path: Path) -> str:
    (tmp_path / "engines.py").write_text(ENGINES)
    return str(tmp_path / "engines.py")


async def test_factory_returns_an_engine_or_a_context_manager(engines: str) -> None:
    settings = SimpleNamespace(model="mine")
    async with open_engine(f"{engines}:plain", settings) as engine:
        assert engine.models == ("mine",)
    assert not engine.is_alive
    async with open_engine(f"{engines}:managed", settings) as engine:
        assert engine.is_alive
    assert not engine.is_alive


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("absent", "has no function absent"),
        ("bare", "it takes one argument: the settings of the server"),
        ("coroutine", "it returned a coroutine: make it an async generator function, and decorate it with"),
        ("generator", "it returned an async generator: make it an async generator function, and decorate it with"),
        ("failing", r"it raised RuntimeError: no GPU \(.*engines.py:29\)"),
        ("nothing", "NoneType has neither a method open, for token ids, nor a method answer, for texts"),
        ("class_", "it returned the class ScriptedEngine: give an instance"),
    ],
)
async def test_a_wrong_factory_is_refused_with_its_cure(engines: str, function: str, problem: str) -> None:
    with pytest.raises(WrongPlugin, match=f"^--engine {engines}:{function}: .*{problem}"):
        async with open_engine(f"{engines}:{function}", None):
            raise NotImplementedError


async def test_a_factory_that_cannot_start_says_why_itself(engines: str) -> None:
    with pytest.raises(CannotStart, match=r"^no weights$"):
        async with open_engine(f"{engines}:unready", None):
            raise NotImplementedError


class Answering(ScriptedEngine):
    async def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for _ in source:
            raise NotImplementedError
        nothing: tuple[ParsedFrame, ...] = ()
        for frame in nothing:
            yield frame


def test_engines_and_text_backends_fit() -> None:
    assert misfit(ScriptedEngine()) is None
    assert misfit(Answering()) is None


def changed(**members: Any) -> Any:
    """Return an engine with other attributes and methods."""
    mine = type("Mine", (ScriptedEngine,), {name: member for name, member in members.items() if callable(member)})()
    vars(mine).update({name: member for name, member in members.items() if not callable(member)})
    return mine


async def cancel_all(self: Any) -> bool:
    raise NotImplementedError


def stop_at_once(self: Any) -> None:
    raise NotImplementedError


async def open_later(self: Any, prompt: Any) -> None:
    raise NotImplementedError


async def answer_anything(self: Any, source: Any) -> AsyncGenerator[Any, None]:
    raise NotImplementedError
    yield


async def answer_prompts(self: Any, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    raise NotImplementedError
    yield


def without(name: str) -> Any:
    """Return an engine without one member of the protocol."""
    mine = ScriptedEngine()
    members = {key: getattr(mine, key) for key in vars(mine) if not key.startswith("_") and key != name}
    methods = {key: getattr(ScriptedEngine, key) for key in ("open", "cancel", "stop", "close") if key != name}
    return type("Mine", (), members | methods)()


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (
            without("models"),
            "Mine.models is missing: give it as an attribute or a property, of type collections.abc.Sequence[str]",
        ),
        (changed(models=()), "Mine.models is (): it must not be empty or 0"),
        (changed(models="mine"), "Mine.models is 'mine': Expected `array`, got `str`"),
        (changed(vocabulary_size=None), "Mine.vocabulary_size is None: Expected `int`, got `null`"),
        (
            without("cancel"),
            "the method cancel of Mine is missing: write it as `async def cancel(self, response_id: str) -> bool`",
        ),
        (
            changed(cancel=cancel_all),
            "the method cancel of Mine does not take its arguments (too many positional arguments): "
            "write it as `async def cancel(self, response_id: str) -> bool`",
        ),
        (
            changed(stop=stop_at_once),
            "the method stop of Mine is not async: write it as `async def stop(self) -> None`",
        ),
        (
            changed(open=open_later),
            "the method open of Mine gives no async context manager: make it an async generator function, and "
            "decorate it with contextlib.asynccontextmanager",
        ),
        (
            changed(answer=answer_prompts),
            "Mine.answer -> converse: Mine.answer gives ResolvedRequest, and converse takes ParsedFrame",
        ),
    ],
)
def test_a_misfit_is_named_with_its_cure(engine: Any, problem: str) -> None:
    assert misfit(engine) == problem


class Mute(ScriptedEngine):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[Any], None]:
        yield source_of([TokenChunk(()), GenerationFinished("stop", 0, 0.0)])


class Failing(ScriptedEngine):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[Any], None]:
        yield self.given()

    async def given(self) -> AsyncGenerator[Any, None]:
        yield TokenChunk((dict[str, int]()["oops"],))


class Listing(ScriptedEngine):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[Any, None]:
        yield [GenerationFinished("stop", 0, 0.0)]


class MuteBackend(ScriptedEngine):
    async def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for request in source:
            yield GenerationStarted(request.facts, 1)


@pytest.mark.parametrize(
    ("engine", "stages", "message", "line"),
    [
        (
            Mute(),
            harmony_stages(load_encoding()),
            "The engine, in stage 'generate', of this server broke a rule: a TokenChunk is never empty.",
            inspect.getsourcelines(inspect.unwrap(Mute.open))[1],
        ),
        (
            Failing(),
            harmony_stages(load_encoding()),
            "The engine, in stage 'generate', of this server raised KeyError.",
            inspect.getsourcelines(inspect.unwrap(Failing.given))[1] + 1,
        ),
        (
            Listing(),
            harmony_stages(load_encoding()),
            "The engine, in stage 'generate', of this server raised TypeError.",
            inspect.getsourcelines(inspect.unwrap(Listing.open))[1],
        ),
        (
            MuteBackend(),
            text_stages(),
            "The engine, in stage 'parse', of this server ended too early: after GenerationStarted: expected"
            " MessageOpened, ReasoningOpened, RefusalOpened, ClientCallOpened, ShellCallOpened, ToolSearchOpened,"
            " ProgramOpened, McpCallOpened, CodeCallOpened, WebCallOpened, FileSearchOpened or TurnFinished,"
            " got the end.",
            inspect.getsourcelines(MuteBackend.answer)[1],
        ),
    ],
)
async def test_frames_of_an_own_engine_are_checked(
    engine: Any, stages: ModelStages, message: str, line: int, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = guarded_engine(engine, responses_pipeline(stages, engine, RunRegistry(Store(NullDatabase()))))
    response = final(await run_request(pipeline, {"input": "Hi", "model": engine.models[0]}))
    assert response.error is not None
    assert response.error.message == message
    assert f"{__file__}:{line};" in caplog.text


CLIENT = """\
from penstock.pipeline.frames import TokenChunk

async def generated():
    yield TokenChunk((dict()["oops"],))
"""


async def test_error_in_another_file_of_an_engine_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    generated = function_named(f"{tmp_path}/client.py:generated", "--engine")

    class InTwoFiles(ScriptedEngine):
        @asynccontextmanager
        async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[Any], None]:
            yield generated()

    engine = InTwoFiles()
    stages = harmony_stages(load_encoding())
    pipeline = guarded_engine(engine, responses_pipeline(stages, engine, RunRegistry(Store(NullDatabase()))))
    await run_request(pipeline, {"input": "Hi", "model": engine.models[0]})
    assert f"the engine, in stage 'generate', raised KeyError: 'oops' (at {tmp_path}/client.py:4;" in caplog.text
