"""Never run: what type checkers must accept, and the types that they must find."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar, assert_type

from pipeline.core import Pipeline
from pipeline.frames import Conversation, Prompt, TokenFrame
from pipeline.invariants import check
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.request import CreateResponse
from stages.emit.emit import emit
from stages.generate.generate import Generate
from stages.generate.scripted import ScriptedEngine
from stages.harmony import HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.render.harmony import RenderHarmony

Frame = TypeVar("Frame")


async def tap(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield frame


def in_order(live: LiveResponses, encoding: HarmonyEncoding) -> None:
    understood = Pipeline.start("normalize", Normalize(live.store, ("m",)))
    assert_type(understood, Pipeline[CreateResponse, Conversation])
    rendered = understood.then("render", RenderHarmony(encoding))
    assert_type(rendered, Pipeline[CreateResponse, Prompt])
    generated = rendered.then("generate", Generate(ScriptedEngine())).then("tap", tap)
    assert_type(generated, Pipeline[CreateResponse, TokenFrame])
    whole = generated.then("parse", ParseHarmony(encoding)).then("emit", emit).then("persist", Persist(live))
    assert_type(whole.then("check", check), Pipeline[CreateResponse, ResponseEvent])


async def consuming(pipeline: Pipeline[CreateResponse, ResponseEvent], source: AsyncGenerator[CreateResponse]) -> None:
    async with pipeline.open(source) as events:
        assert_type(await anext(events), ResponseEvent)
