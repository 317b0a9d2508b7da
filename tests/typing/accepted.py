"""Code that type checkers must accept, with the types that they must find.  It is never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any, TypeVar, assert_type

from pydantic import BaseModel

from penstock.api.settings import Settings
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import GenerationStarted, Prompt, ResolvedRequest, ResponseStarted, TokenFrame, with_facts
from penstock.pipeline.lifecycle.checker import check
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.stages.emit.emit import Emit
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.stages.persist import Persist
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.testing import replayed

Frame = TypeVar("Frame")


async def tap(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


def in_order(runs: RunRegistry, encoding: HarmonyEncoding) -> None:
    understood = Pipeline.start("normalize", normalizing(Recall(store=runs.store, models=("m",))))
    assert_type(understood, Pipeline[CreateResponse, ResolvedRequest])
    rendered = understood.then("render", RenderHarmony(encoding))
    assert_type(rendered, Pipeline[CreateResponse, Prompt])
    generated = rendered.then("generate", Generate(ScriptedEngine())).then("tap", tap)
    assert_type(generated, Pipeline[CreateResponse, TokenFrame])
    whole = generated.then("parse", ParseHarmony(encoding)).then("emit", Emit()).then("persist", Persist(runs))
    assert_type(whole.then("check", check), Pipeline[CreateResponse, ResponseEvent])


def with_the_facts_of_any(frame: ResponseStarted | GenerationStarted) -> None:
    assert_type(with_facts(frame, date="2026-11-22"), ResponseStarted | GenerationStarted)


def settings() -> Settings:
    return Settings(engine=["replay:recordings"], store="none", store_ttl=3600.0, max_turns=3)


class OfStage(BaseModel):
    name: str


def install(pipeline: Pipeline[Any, Any], settings: OfStage) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", settings.name, tap)


async def installing() -> None:
    await replayed("recordings/greeting", partial(install, settings=OfStage(name="tap")))


async def consuming(pipeline: Pipeline[CreateResponse, ResponseEvent], source: AsyncGenerator[CreateResponse]) -> None:
    async with pipeline.open(source) as events:
        assert_type(await anext(events), ResponseEvent)
