"""The one screen: which stages make a response, in which order."""

from __future__ import annotations

from pipeline.core import Pipeline
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.request import CreateResponse
from stages.converse.converse import Converse
from stages.converse.exchange import Limits
from stages.converse.tools import Toolbox
from stages.emit.emit import emit
from stages.generate.engine import Engine
from stages.generate.generate import Generate
from stages.generate.scripted import ScriptedEngine
from stages.harmony import HarmonyEncoding, load_encoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.database import Nowhere
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.persist.store import Store
from stages.render.harmony import RenderHarmony

NO_TOOLS = Toolbox()
DEFAULT_LIMITS = Limits()


def harmony_responses(
    models: tuple[str, ...],
    engine: Engine,
    encoding: HarmonyEncoding,
    live: LiveResponses,
    toolbox: Toolbox = NO_TOOLS,
    limits: Limits = DEFAULT_LIMITS,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Responses of a model that speaks Harmony, under any of its names; ``live`` are those that are being made."""
    turn = (
        Pipeline.start("render", RenderHarmony(encoding, engine.context_length))
        .then("generate", Generate(engine))
        .then("parse", ParseHarmony(encoding))
    )
    return (
        Pipeline.start("normalize", Normalize(live.store, models, toolbox.kinds, toolbox.mcp.labels))
        .then("converse", Converse(turn, toolbox, limits))
        .then("emit", emit)
        .then("persist", Persist(live))
    )


def recorded_responses() -> Pipeline[CreateResponse, ResponseEvent]:
    """The same flow with no model and no store behind it: to look at, and to replay recordings through."""
    return harmony_responses(("recorded",), ScriptedEngine(), load_encoding(), LiveResponses(Store(Nowhere())))
