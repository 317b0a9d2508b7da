"""The stages of several models: each lets the stage of the model that a request is for do the work."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NoReturn

from msgspec import structs

from penstock.extensions.models.catalogue import Catalogue
from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineDead, EngineOverloaded, InvalidRequest, ModelUnavailable, StageError
from penstock.pipeline.frames import ConversedFrame, ParsedFrame, Prompt, ResolvedRequest, TokenFrame, with_facts
from penstock.pipeline.halfway import handed_over
from penstock.services.engines.engine import Engine, TextBackend
from penstock.services.runs.run import RunRegistry
from penstock.stages.converse.converse import Converse
from penstock.stages.converse.tool_loop import Limits
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.parse.parser import ParseStage, TurnParser
from penstock.stages.parse.text import TokenVocabulary
from penstock.stages.responses import ModelStages

logger = logging.getLogger(__name__)

AWAY = (EngineDead, EngineOverloaded, ModelUnavailable)
"""The errors after which another model may answer, if the operator names one."""


@dataclass(frozen=True)
class SummarizeBy:
    """The stage ``summarize``: the model that a table names for it writes the summary, and is measured for it."""

    models: Catalogue

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield one request for each."""
        async for request in source:
            other = self.models.of_response(request.facts).table.summaries if request.facts.purpose.summarizes else None
            writing = [_for_model(request, other) if other else request]
            stage = await self.models.stage(writing[0].facts, "summarize")
            async with aclosing(stage(handed_over(writing))) as asked:
                async for each in asked:
                    yield each


@dataclass(frozen=True)
class RenderFor:
    """The stage ``render``."""

    models: Catalogue

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[Prompt, None]:
        """Yield the prompt of each request."""
        async for request in source:
            stage = await self.models.stage(request.facts, "render")
            async with aclosing(stage(handed_over([request]))) as prompts:
                async for prompt in prompts:
                    yield prompt


@dataclass(frozen=True)
class GenerateBy:
    """The stage ``generate``: the response holds its model from here on, which is up when this begins."""

    models: Catalogue

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Yield the tokens of each prompt, as `Generate` does."""
        async for prompt in source:
            facts = prompt.facts
            model = await self.models.held(facts)
            upstream = model.upstream(facts.model)
            origin = structs.replace(facts.origin, model=upstream)
            asked = [prompt if upstream == facts.model else with_facts(prompt, origin=origin)]
            del prompt  # it may be long, and the generation may take long
            async with aclosing(model.turn["generate"](handed_over(asked))) as tokens:
                async for frame in tokens:
                    if isinstance(frame, frames.GenerationStarted):
                        yield structs.replace(frame, facts=facts)
                        continue
                    yield frame


@dataclass(frozen=True)
class ParseFor(ParseStage):
    """The stage ``parse``: each generation is read by the parser of its model."""

    models: Catalogue = field(kw_only=True)

    async def __call__(self, source: AsyncIterator[TokenFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Parse one generation, or several in a row."""
        first = await anext(source, None)
        begun = [] if first is None else [first]
        while begun:
            started = begun.pop()
            assert isinstance(started, frames.GenerationStarted), "a turn begins with GenerationStarted"
            stage = await self.models.stage(started.facts, "parse")
            async with aclosing(stage(_generation(started, source, begun))) as parsed:
                async for frame in parsed:
                    yield frame

    @property
    def vocabulary(self) -> TokenVocabulary:
        """That of no model."""
        raise LookupError("several models have a vocabulary each")

    def vocabulary_of(self, model: str) -> TokenVocabulary | None:
        """Return the vocabulary of a model that has been open."""
        stages = self.models.of(model).stages
        return stages.parse.vocabulary if stages else None

    async def _begin(self, started: frames.GenerationStarted) -> TurnParser:
        raise NotImplementedError  # the parser of the model does it


async def _generation(
    started: TokenFrame, source: AsyncIterator[TokenFrame], following: list[TokenFrame]
) -> AsyncGenerator[TokenFrame, None]:
    """Yield the frames of one generation; the beginning of the next one is put into ``following``."""
    yield started
    async for frame in source:
        if isinstance(frame, frames.GenerationStarted):
            following.append(frame)
            return
        yield frame


@dataclass(frozen=True)
class ConverseWith(Converse):
    """The stage ``converse`` over several models; another one answers for a model that is full or down.

    The other model is the ``instead`` of its table.  It answers only if no frame has been yielded and its owner may use
    it, and under its own name.  If it cannot take the request, the client gets the error of the first model.
    """

    models: Catalogue = field(kw_only=True)

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ConversedFrame, None]:
        """Yield the frames of all turns of each conversation, as `Converse` does."""
        async for request in source:
            response_id = request.facts.response_id
            asked: ResolvedRequest | None = request
            failed: StageError | None = None
            del request  # it may be long, and the response may take long
            try:
                while asked is not None:
                    has_begun, other = False, self._instead(asked)
                    try:
                        async with aclosing(super().__call__(handed_over([asked]))) as conversed:
                            if other is None:
                                asked = None
                            async for frame in conversed:
                                has_begun = True
                                yield frame
                        asked = None
                    except AWAY as error:
                        if has_begun or asked is None:
                            raise
                        logger.warning("Model %s answers in place of %s: %s", other, asked.facts.model, error)
                        self.models.release(response_id)
                        asked, failed = _for_model(asked, other or "", answers=True), error
                    except InvalidRequest as error:
                        if has_begun or failed is None:
                            raise
                        raise failed from error
            finally:
                self.models.release(response_id)

    def _instead(self, request: ResolvedRequest) -> str | None:
        return self.models.instead(self.models.of(request.facts.model), request.facts.origin.owner)

    def limits_of(self, request: ResolvedRequest) -> Limits:
        """Return the limits of a request, with the context length of its model."""
        length = self.models.of(request.facts.model).context_length
        return self.limits if length is None else replace(self.limits, context_length=length)


def _for_model(request: ResolvedRequest, model: str, *, answers: bool = False) -> ResolvedRequest:
    """Return a request for another model, which names itself in the response if it ``answers``."""
    facts, request = request.facts, structs.replace(request, tokens={})
    if answers:
        response = structs.replace(facts.response, model=model)
        return with_facts(request, response=response, origin=structs.replace(facts.origin, model=""))
    return with_facts(request, origin=structs.replace(facts.origin, model=model))


@dataclass(frozen=True, kw_only=True)
class SeveralStages(ModelStages):
    """The stages for several models."""

    models: Catalogue

    def of(self, model: str) -> ModelStages:
        """Return the stages of a model that has been open, or else these, of which nothing is known."""
        known = self.models.names.models.get(model)
        return known.stages if known and known.stages else self

    async def traits_of(self, model: str, owner: str) -> ModelTraits:
        """Return the traits of a model, which is loaded if it has never been."""
        return await self.models.traits_of(model, owner)

    def allowing(self, allowed: Callable[[str], Collection[str] | None]) -> SeveralStages:
        """Have a model answer in place of another one only if its owner may use it."""
        self.models.allowed = allowed
        return self

    def turn(
        self, engine: Engine | TextBackend, runs: RunRegistry, retry_seconds: float
    ) -> Pipeline[ResolvedRequest, ParsedFrame]:
        """Return the stages of one turn of the model that its request is for."""
        self.models.turns_begin(runs, retry_seconds)
        return (
            Pipeline.start("summarize", SummarizeBy(self.models))
            .then("render", RenderFor(self.models))
            .then("generate", GenerateBy(self.models))
            .then("parse", ParseFor(models=self.models))
        )


def stages_of(models: Catalogue) -> SeveralStages:
    """Return the stages for several models."""
    return SeveralStages(
        encoding="chat",
        description=f"are {len(models.all)} models",
        traits=ModelTraits(),
        render=_none,
        parse=ParseFor(models=models),
        decode=_none,
        converse=lambda turn, toolbox, limits, steering: ConverseWith(turn, toolbox, limits, steering, models=models),
        models=models,
    )


def _none(_: object) -> NoReturn:
    raise LookupError("several models have stages each")
