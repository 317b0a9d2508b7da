"""Shadow: a second engine reads a share of the turns again, after the client has got them.

It is the online form of ``penstock compare``: the engine says for each token how likely it finds it.  No client waits
for it: turns wait in a bounded queue after they have ended, one at a time is read, and what does not fit is dropped and
counted.  It is a plug-in of ``penstock.stages``, to which ``--shadow`` gives its settings.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

from prometheus_client import Counter, Histogram
from pydantic import AfterValidator, BaseModel, Field, SecretStr

from penstock.api.settings.engine_settings import http_urls
from penstock.extensions.workbench.forced.scores import ForcedTurn, alternatives, forced, judged
from penstock.extensions.workbench.forced.turn import Turn
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import StageError
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenChunk, TokenFrame
from penstock.pipeline.tasks import beside
from penstock.services.engines.engine import Engine
from penstock.services.engines.replicas import UnusableServer
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.stages.parse.chat.parse import ParseChat
from penstock.stages.parse.harmony.parse import ParseHarmony

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Turns that wait for the second engine."""

MOST_TOKENS = 2_000_000
"""Tokens of the turns that wait, prompts included."""

PAUSE = 30.0
"""Seconds until the second engine is tried again after it could not be used."""

TURNS = Counter(
    "penstock_shadow_turns",
    "Turns for the engine of --shadow; outcome is same, changed, uncounted (the choices of the first engine are not "
    "known), dropped (too many waited), too_long or failed",
    ["outcome"],
)
TOKENS = Counter(
    "penstock_shadow_tokens",
    "Tokens that the engine of --shadow has read; verdict is same, changed or uncounted",
    ["verdict"],
)
TOKEN_NATS = Histogram(
    "penstock_shadow_token_nats",
    "How unlikely the engine of --shadow finds the tokens of a turn: the mean of their negative log probabilities",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10),
)


class ShadowSettings(BaseModel):
    """The second engine, and the share of the turns that it reads."""

    urls: Annotated[list[str], AfterValidator(http_urls)] = Field(min_length=1)
    share: float = Field(default=0.05, gt=0, le=1)
    key: SecretStr | None = None


@asynccontextmanager
async def install(pipeline: Pipeline[Any, Any], settings: ShadowSettings) -> AsyncGenerator[Pipeline[Any, Any], None]:
    """Yield the pipeline, a share of whose turns a second engine reads again, for the length of a block.

    Without a stage ``generate`` it is the same pipeline.
    """
    if "generate" not in pipeline.names():
        yield pipeline
        return
    is_harmony = _speaks_harmony(pipeline)

    async def connect() -> Engine:
        key = settings.key.get_secret_value() if settings.key else None
        engine = await start_vllm_http(settings.urls, api_key=key, wait=math.inf)
        if None not in (is_harmony, engine.speaks_harmony) and engine.speaks_harmony != is_harmony:
            await engine.close()
            raise UnusableServer("The model of --shadow has other tokens: only one of both speaks Harmony.")
        logger.info("The shadow %s reads %g of the turns again", engine.root, settings.share)
        return engine

    shadow = Shadow(connect)
    stage = Shadowed(pipeline.stage("generate"), shadow.take, settings.share)
    async with shadow.running():
        yield pipeline.replace("generate", stage)


def _speaks_harmony(pipeline: Pipeline[Any, Any]) -> bool | None:
    """Return True if the model of a pipeline speaks Harmony; None if a stage of the operator hides it."""
    parse = pipeline.stage("parse") if "parse" in pipeline.names() else None
    return True if isinstance(parse, ParseHarmony) else False if isinstance(parse, ParseChat) else None


@dataclass(frozen=True)
class Shadowed:
    """The stage ``generate``, which hands a ``share`` of its turns over to ``take`` when they have ended.

    The others pass as before.
    """

    generate: Callable[[AsyncIterator[Prompt]], AsyncGenerator[TokenFrame, None]]
    take: Callable[[Turn], None]
    share: float

    def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        """Return the tokens of each prompt."""
        is_chosen = random.random() < self.share  # noqa: S311 - it protects nothing
        return self._watched(source) if is_chosen else self.generate(source)

    async def _watched(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        prompts: list[Prompt] = []
        started: GenerationStarted | None = None
        chunks: list[TokenChunk] = []
        async with aclosing(_kept(source, prompts)) as kept, aclosing(self.generate(kept)) as frames:
            async for frame in frames:
                match frame:
                    case GenerationStarted():
                        started, chunks = frame, []
                    case TokenChunk():
                        chunks.append(frame)
                    case GenerationFinished():
                        assert started
                        self.take(_turn(prompts.pop(), started, chunks, frame))
                yield frame


async def _kept(source: AsyncIterator[Prompt], prompts: list[Prompt]) -> AsyncGenerator[Prompt, None]:
    async for prompt in source:
        prompts.append(prompt)
        yield prompt


def _turn(prompt: Prompt, started: GenerationStarted, chunks: list[TokenChunk], finished: GenerationFinished) -> Turn:
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
    return Turn(
        1,
        prompt=prompt,
        started=started,
        tokens=tokens,
        logprobs=logprobs if len(logprobs) == len(tokens) else (),
        finished=finished,
    )


@dataclass
class Shadow:
    """A second engine, which ``connect`` opens, and the turns that wait for it."""

    connect: Callable[[], Awaitable[Engine]]
    _waiting: deque[Turn] = field(default_factory=deque)
    _tokens: int = 0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: count[int] = field(default_factory=count)
    _failed: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Read turns for the length of a block; those that wait at its end are dropped."""
        async with beside(self._keep_reading()):
            yield

    def take(self, turn: Turn) -> None:
        """Have a turn read, unless too many wait."""
        size = _size(turn)
        if not turn.tokens:
            return
        if len(self._waiting) >= MOST_WAITING or self._tokens + size > MOST_TOKENS:
            TURNS.labels("dropped").inc()
            return
        self._waiting.append(turn)
        self._tokens += size
        self._arrived.set()

    async def _keep_reading(self) -> None:
        while True:
            try:
                engine = await self.connect()
            except (OSError, StageError) as error:
                self._note(error)
                await asyncio.sleep(PAUSE)
                continue
            try:
                await self._read_all(engine)
            finally:
                await engine.close()

    async def _read_all(self, engine: Engine) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            turn = self._waiting.popleft()
            self._tokens -= _size(turn)
            await self._read(engine, turn)

    async def _read(self, engine: Engine, turn: Turn) -> None:
        if _size(turn) >= engine.context_length:
            TURNS.labels("too_long").inc()
            return
        try:
            name, top = f"resp_shadow{next(self._numbers)}", alternatives(turn)
            reading = await forced(engine, turn.prompt, turn.tokens, name, top=top, run=engine.open)
        except StageError as error:
            TURNS.labels("failed").inc()
            self._note(error)
            return
        self._failed = False
        _report(judged(turn, reading.scores, allowed=None, tie=0.0))

    def _note(self, error: Exception) -> None:
        """Log the first failure of several."""
        if not self._failed:
            logger.warning("The shadow cannot read an answer: %s", named_error(error))
        self._failed = True


def _size(turn: Turn) -> int:
    return len(turn.prompt.token_ids) + len(turn.tokens)


def _report(turn: ForcedTurn) -> None:
    """Count what the second engine finds of a turn."""
    verdicts = [token.has_changed for token in turn.tokens]
    for verdict, value in (("same", False), ("changed", True), ("uncounted", None)):
        if number := verdicts.count(value):
            TOKENS.labels(verdict).inc(number)
    TOKEN_NATS.observe(-sum(token.logprob for token in turn.tokens) / len(turn.tokens))
    changes = [(at, token) for at, token in enumerate(turn.tokens) if token.has_changed]
    if changes:
        worst = max(token.surprise for _, token in changes)
        logger.info(
            "The shadow would have changed %s first at token %d of %d, %d in all; the worst surprise is %.3f nats",
            *(turn.turn.prompt.facts.response_id, changes[0][0], len(turn.tokens), len(changes), worst),
        )
    outcome = "changed" if changes else "same" if False in verdicts else "uncounted"
    TURNS.labels(outcome).inc()
