"""Code in which type checkers must refuse each line that ends in ``# error``, and no other.  It is never run."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel

from penstock.pipeline.core import Pipeline, source_of
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


def out_of_order(runs: RunRegistry, encoding: HarmonyEncoding) -> None:
    understood = Pipeline.start("normalize", normalizing(Recall(store=runs.store, models=("m",))))
    understood.then("parse", ParseHarmony(encoding))  # error
    understood.then("emit", Emit())  # error
    rendered = understood.then("render", RenderHarmony(encoding))
    rendered.then("emit", Emit())  # error
    generated = rendered.then("generate", Generate(ScriptedEngine()))
    generated.then("persist", Persist(runs))  # error
    emitted = generated.then("parse", ParseHarmony(encoding)).then("emit", Emit())
    emitted.then("check", check)  # error
    unfinished: Pipeline[CreateResponse, ResponseEvent] = emitted  # error
    emitted.open(source_of(["no request"]))  # error
    Pipeline.start("no stage", lambda source: source)  # error
    str(unfinished)


class OfStage(BaseModel):
    name: str


def install(pipeline: Pipeline[Any, Any], settings: OfStage) -> Pipeline[Any, Any]:
    return pipeline.remove(settings.name)


async def installing() -> None:
    await replayed("recordings/greeting", install)  # error
    await replayed("recordings/greeting", partial(install, settings={"name": "tap"}))  # error
