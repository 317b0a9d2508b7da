"""Never run: each line that ends in ``# error`` must be refused by type checkers, and no other line."""

from __future__ import annotations

from pipeline.core import Pipeline
from pipeline.invariants import check
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.request import CreateResponse
from pipeline.record import replay
from stages.emit.emit import emit
from stages.generate.generate import Generate
from stages.generate.scripted import ScriptedEngine
from stages.harmony import HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.render.harmony import RenderHarmony


def out_of_order(live: LiveResponses, encoding: HarmonyEncoding) -> None:
    understood = Pipeline.start("normalize", Normalize(live.store, ("m",)))
    understood.then("parse", ParseHarmony(encoding))  # error
    understood.then("emit", emit)  # error
    rendered = understood.then("render", RenderHarmony(encoding))
    rendered.then("emit", emit)  # error
    generated = rendered.then("generate", Generate(ScriptedEngine()))
    generated.then("persist", Persist(live))  # error
    emitted = generated.then("parse", ParseHarmony(encoding)).then("emit", emit)
    emitted.then("check", check)  # error
    unfinished: Pipeline[CreateResponse, ResponseEvent] = emitted  # error
    emitted.open(replay(["no request"]))  # error
    Pipeline.start("no stage", lambda source: source)  # error
    str(unfinished)
