"""The pipelines that make a response: all stages, in order, on one screen."""

from __future__ import annotations

from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.frames import ParsedFrame, Prompt, ResolvedRequest, TokenFrame
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.stages.converse.converse import Converse
from penstock.stages.converse.exchange import Limits
from penstock.stages.emit.emit import emit
from penstock.stages.generate import Generate
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, encoding_on_demand
from penstock.stages.normalize.normalize import Normalize
from penstock.stages.parse.chat.parse import ParseChat
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.stages.persist import Persist
from penstock.stages.render.chat.chat import RenderChat
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.stages.services.engines.engine import Engine
from penstock.stages.services.engines.scripted import ScriptedEngine
from penstock.stages.services.runs.run import RunRegistry
from penstock.stages.services.store.database import Nowhere
from penstock.stages.services.store.store import Store
from penstock.stages.services.tools import Toolbox

NO_TOOLS = Toolbox()
DEFAULT_LIMITS = Limits()


def harmony_responses(
    models: tuple[str, ...],
    engine: Engine,
    encoding: HarmonyEncoding,
    runs: RunRegistry,
    toolbox: Toolbox = NO_TOOLS,
    limits: Limits = DEFAULT_LIMITS,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline for a model that speaks Harmony.

    ``models`` are the names that clients may use for it, and ``runs`` holds the responses in progress.
    """
    normalize = Normalize(runs.store, models, toolbox.kinds, toolbox.mcp.labels)
    turn = _turn(RenderHarmony(encoding, engine.context_length), engine, ParseHarmony(encoding))
    return _responses(normalize, Converse(turn, toolbox, limits), runs)


def chat_responses(
    models: tuple[str, ...],
    engine: Engine,
    chat: ChatModel,
    runs: RunRegistry,
    toolbox: Toolbox = NO_TOOLS,
    limits: Limits = DEFAULT_LIMITS,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline for a model with a chat template; the arguments are as in `harmony_responses`."""
    normalize = Normalize(
        runs.store,
        models,
        toolbox.kinds,
        toolbox.mcp.labels,
        sees_images=chat.sees_images,
        has_template=True,
        recommended=chat.sampling,
    )
    turn = _turn(RenderChat(chat, engine.context_length), engine, ParseChat(chat))
    return _responses(normalize, Converse(turn, toolbox, limits), runs)


def _turn(
    render: Stage[ResolvedRequest, Prompt], engine: Engine, parse: Stage[TokenFrame, ParsedFrame]
) -> Pipeline[ResolvedRequest, ParsedFrame]:
    return Pipeline.start("render", render).then("generate", Generate(engine)).then("parse", parse)


def _responses(normalize: Normalize, converse: Converse, runs: RunRegistry) -> Pipeline[CreateResponse, ResponseEvent]:
    return (
        Pipeline.start("normalize", normalize)
        .then("converse", converse)
        .then("emit", emit)
        .then("persist", Persist(runs))
    )


def recorded_responses() -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the same pipeline without a model or a store, to draw it and to replay recordings through it."""
    return harmony_responses(("recorded",), ScriptedEngine(), encoding_on_demand(), RunRegistry(Store(Nowhere())))
