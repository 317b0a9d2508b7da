"""The pipeline that makes a response: all stages, in order, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import ConversedFrame, Origin, ParsedFrame, Prompt, ResolvedRequest
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.format import Encoding
from penstock.services.engines.engine import Engine, TextBackend, reads_tokens
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.file_reading import Files
from penstock.services.model_names import served_instead
from penstock.services.prompts import Prompts
from penstock.services.runs.run import RunRegistry
from penstock.services.sealing import Sealer
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.services.web.image_cache import ImageCache
from penstock.stages.converse.converse import Converse, Steering
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.emit.emit import Emit
from penstock.stages.generate import Generate
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, encoding_on_demand
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.normalize.normalize import NO_TOOLS, normalizing
from penstock.stages.normalize.recall import Recall
from penstock.stages.normalize.resolve import DEFAULT_SHARING, CacheSharing
from penstock.stages.parse.chat.parse import ParseChat
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.stages.parse.parser import ParseStage
from penstock.stages.persist import Persist
from penstock.stages.recordings.converse import ConverseAsRecorded, RenderIfRecorded
from penstock.stages.recordings.recordings import Recordings
from penstock.stages.render.chat.render import RenderChat
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.stages.summarize import Summarize

DEFAULT_LIMITS = Limits()
NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


def responses_pipeline(
    model: ModelStages,
    engine: Engine | TextBackend,
    runs: RunRegistry,
    toolbox: Toolbox = NO_TOOLS,
    limits: Limits = DEFAULT_LIMITS,
    caches: CacheSharing = DEFAULT_SHARING,
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline that answers requests with a model, its engine and the tools in ``toolbox``.

    It seals nothing (see `sealing`), so that a replay repeats its bytes.
    """
    limits = replace(limits, context_length=engine.context_length)
    toolbox = replace(toolbox, approvals=runs.store.approvals, tallies=runs.tallies)
    reads = partial(reads_tokens, engine)
    recall = Recall(store=runs.store, models=engine.models, traits_of=model.traits_of, reads=reads)
    turn = model.turn(engine, runs, limits.retry_seconds)
    return (
        Pipeline.start("normalize", normalizing(recall, toolbox, caches))
        .then("converse", model.converse(turn, toolbox, limits, Steering(runs.is_steered, engine.cancel)))
        .then("emit", Emit(tallies=runs.tallies))
        .then("persist", Persist(runs))
    )


def sealing(
    pipeline: Pipeline[CreateResponse, ResponseEvent], sealer: Sealer
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with ``sealer`` in both stages that need it: one opens what the other has sealed."""
    for name in ("recall", "emit"):
        pipeline = pipeline.replace(name, replace(pipeline.stage(name), sealer=sealer))
    return pipeline


def aliasing(
    pipeline: Pipeline[CreateResponse, ResponseEvent], aliases: Mapping[str, str]
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with other names for the models; raises `CannotStart` for a model that is not served."""
    recall = pipeline.stage("recall")
    for pattern, model in aliases.items():
        if model not in recall.models:
            instead = served_instead(model, recall.models)
            raise CannotStart(f"--model-alias {pattern}={model}: this server serves {instead}")
    return pipeline.replace("recall", replace(recall, aliases=aliases))


def allowing(
    pipeline: Pipeline[CreateResponse, ResponseEvent], allowed: Callable[[str], Collection[str] | None]
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with the patterns of the models that an owner may use, or None for all."""
    return pipeline.replace("recall", replace(pipeline.stage("recall"), allowed=allowed))


def reading_files(
    pipeline: Pipeline[CreateResponse, ResponseEvent], files: Files
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with another reader of files."""
    return pipeline.replace("resolve", replace(pipeline.stage("resolve"), files=files))


def scoring(
    pipeline: Pipeline[CreateResponse, ResponseEvent], is_scored: Callable[[str, Origin], bool]
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline whose engine also reports log probabilities for the responses that ``is_scored`` names.

    Raises `CannotStart` if the pipeline has no tokens.
    """
    if "generate" not in pipeline.names():
        raise CannotStart(
            "--record-logprobs needs the stage generate, which this pipeline lacks: its backend gives texts"
        )
    return pipeline.replace("generate", replace(pipeline.stage("generate"), is_scored=is_scored))


def prompting(
    pipeline: Pipeline[CreateResponse, ResponseEvent], prompts: Prompts
) -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the pipeline with prompts of the operator."""
    return pipeline.replace("normalize", replace(pipeline.stage("normalize"), prompts=prompts))


MakeConverse: TypeAlias = Callable[
    [Pipeline[ResolvedRequest, ParsedFrame], Toolbox, Limits, Steering], Stage[ResolvedRequest, ConversedFrame]
]
"""Makes the converse stage from the stages of one turn, the tools, the limits and the wishes of clients."""


@dataclass(frozen=True, kw_only=True)
class ModelStages:
    """The stages that depend on the model, and the traits of the model that normalize must know.

    ``render`` takes the context length of the engine.  ``description`` continues a sentence that begins with the name
    of the model.  ``decode`` returns the text of token ids, for the log.
    """

    encoding: Encoding
    description: str
    traits: ModelTraits
    render: Callable[[int], Stage[ResolvedRequest, Prompt]]
    parse: ParseStage
    decode: Callable[[Sequence[int]], str]
    converse: MakeConverse = Converse

    def of(self, model: str) -> ModelStages:
        """Return the stages for one of the names that the engine serves: here, all are of one model."""
        return self

    async def traits_of(self, model: str, owner: str) -> ModelTraits:
        """Return the traits of the model that the engine serves an owner under a name."""
        return self.traits

    def allowing(self, allowed: Callable[[str], Collection[str] | None]) -> ModelStages:
        """Return the stages with the patterns of the models that an owner may use: they matter if one stands in."""
        return self

    def turn(
        self, engine: Engine | TextBackend, runs: RunRegistry, retry_seconds: float
    ) -> Pipeline[ResolvedRequest, ParsedFrame]:
        """Return the stages of one turn of the model."""
        if isinstance(engine, TextBackend):
            return Pipeline.start("summarize", Summarize(engine.context_length)).then("parse", engine.answer)
        render = self.render(engine.context_length)
        return (
            Pipeline.start("summarize", Summarize(engine.context_length, render))
            .then("render", render)
            .then("generate", Generate(engine, runs.is_accepted, retry_seconds))
            .then("parse", replace(self.parse, tallies=runs.tallies))
        )


def harmony_stages(
    encoding: HarmonyEncoding, sampling: Mapping[str, float] = NO_DEFAULTS, *, system_instructions: bool = False
) -> ModelStages:
    """Return the stages for a gpt-oss, which speaks Harmony; ``sampling`` are its defaults.

    It reads its instructions in the developer message, or in the system message if ``system_instructions`` is True.
    """
    traits = ModelTraits(sampling=sampling)
    render = partial(RenderHarmony, encoding, system_instructions=system_instructions)
    return ModelStages(
        encoding="harmony",
        description="speaks Harmony",
        traits=traits,
        render=render,
        parse=ParseHarmony(encoding),
        decode=encoding.decode,
    )


def chat_stages(chat: ChatModel, images: ImageCache, sampling: Mapping[str, float] = NO_DEFAULTS) -> ModelStages:
    """Return the stages for a model with a chat template; ``images`` fetches images from the web."""
    parsers = f"the parsers {' and '.join(chat.parser_names)}" if chat.parser_names else "no parser"
    return ModelStages(
        encoding="chat",
        description=f"has a chat template, is read by {parsers}",
        traits=ModelTraits(chat.sees_images, has_template=True, sampling=sampling),
        render=partial(RenderChat, chat, images=images),
        parse=ParseChat(chat),
        decode=chat.vocabulary.decode,
    )


def text_stages() -> ModelStages:
    """Return the stages for a `TextBackend`, which renders, generates and parses by itself."""
    stages = harmony_stages(encoding_on_demand())
    return replace(stages, description="answers with texts", traits=ModelTraits(sees_images=True, takes_prompts=False))


def recorded_stages(encoding: HarmonyEncoding, recordings: Recordings, speed: float | None = None) -> ModelStages:
    """Return stages that answer from recordings, ``speed`` times as fast as recorded; None means without waiting."""
    harmony = harmony_stages(encoding)
    return ModelStages(
        encoding="harmony" if "harmony" in recordings.encodings else "chat",
        description=f"is answered from {counted(len(recordings.all), 'recording')}",
        traits=ModelTraits(sees_images=True, has_template="chat" in recordings.encodings),
        render=lambda context_length: RenderIfRecorded(recordings, harmony.render(context_length)),
        parse=harmony.parse,
        decode=harmony.decode,
        converse=lambda turn, *_: ConverseAsRecorded(turn, recordings, speed),
    )


def recorded_responses() -> Pipeline[CreateResponse, ResponseEvent]:
    """Return the same pipeline without a model or a store, to draw it and to replay recordings through it."""
    engine = ScriptedEngine(models=("recorded",))
    return responses_pipeline(harmony_stages(encoding_on_demand()), engine, RunRegistry(Store(NullDatabase())))
