"""The engine that reads given tokens: what the option ``--engine`` of a command names."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from penstock.api.cli.arguments import Parser
from penstock.api.cli.command_line import parsed_settings, refuse_unknown
from penstock.api.cli.mistakes import explained, location
from penstock.api.metrics.log_settings import LogSettings
from penstock.api.settings import Settings
from penstock.api.settings.engine_settings import FACTORY, REPLAY, ChatSettings, EngineSettings
from penstock.api.settings.options import options
from penstock.api.settings.sources import option_name
from penstock.api.start.backends import model_here, over_http, start_shown
from penstock.api.start.parts import UNSTARTABLE
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.errors import CannotRun
from penstock.services.engines.engine import Engine, ScoresPrompts, TextBackend
from penstock.services.engines.replicas import ForeignServer
from penstock.stages.parse.parser import ParseStage

ENGINE_OPTIONS = frozenset(settings.SECTION for settings in (EngineSettings, ChatSettings, LogSettings))
"""The sections of the options of ``penstock serve`` that these commands take, too."""

ENGINE_WAIT = 30.0
"""Seconds to wait for a server that does not answer."""

ADVICE = (
    "This needs the log probabilities of given tokens, which `vllm serve` returns; so can"
    " an engine of your own with scores_prompts (docs/ENGINES.md)."
)
"""The advice about a server of another make."""

NO_MODEL = re.compile(rf"https?://|{REPLAY}|{FACTORY}$")
"""The beginning of what ``--engine`` names, if it is not a model."""


@dataclass(frozen=True)
class ReadingEngine:
    """An engine that reads given tokens, with the vocabulary and the stage ``parse`` of its model."""

    engine: Engine
    vocabulary: Vocabulary
    parse: ParseStage


def engine_settings(engines: Sequence[str], others: Sequence[str], parser: Parser, work: str) -> Settings:
    """Return the settings of a server with this engine, for the ``work`` of a command; raise `CannotRun`.

    ``others`` are the arguments that the parser of the command does not know.
    """
    typed = {option_name(argument).replace("--no-", "--", 1) for argument in others}
    if useless := [each.flag for each in options() if each.flag in typed and each.section not in ENGINE_OPTIONS]:
        raise CannotRun(f"{', '.join(useless)}: of penstock serve, and without effect on {work}")
    is_model = len(engines) == 1 and not NO_MODEL.match(engines[0])
    named = engines if is_model else [f"--engine={engine}" for engine in engines]
    settings = parsed_settings([*named, *others], parser.flags)
    if is_model and settings.engine:
        raise CannotRun(f"{location('engine', [])}: it names another engine than --engine {engines[0]}")
    if settings.recordings:
        raise CannotRun("--engine: recordings say nothing of the probabilities of other tokens")
    refuse_unknown(settings, others)
    return settings


@contextmanager
def engine_failures(arguments: Sequence[str]) -> Generator[None, None, None]:
    """Turn the failures of an engine in a block into `CannotRun`, for the user who typed the arguments."""
    try:
        yield
    except ForeignServer as error:
        raise CannotRun(f"--engine: {error.sign} {ADVICE}") from error
    except UNSTARTABLE as error:
        raise CannotRun(explained(error, arguments)) from error


def check_model(settings: Settings) -> None:
    """Raise what `engine_failures` explains if the model that is to run in this process is not there."""
    if not settings.engine:
        model_here(settings)


@asynccontextmanager
async def reading_engine(settings: Settings) -> AsyncGenerator[ReadingEngine, None]:
    """Run the engine of the settings for the length of a block."""
    is_elsewhere = bool(settings.engine) and settings.engine_factory is None
    async with over_http(settings, ENGINE_WAIT) if is_elsewhere else start_shown(settings) as running:
        engine = running.engine
        if isinstance(engine, TextBackend) or not isinstance(engine, ScoresPrompts):
            raise CannotRun("--engine: this engine reports no log probabilities of prompts (scores_prompts)")
        source = settings.model or getattr(engine, "root", None)
        model = running.model
        vocabulary = Vocabulary.of(model.parse.vocabulary, engine.vocabulary_size, model.encoding, source)
        yield ReadingEngine(engine, vocabulary, model.parse)
