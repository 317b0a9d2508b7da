"""The stage ``hint``: what the server knows of conversations becomes hints for its engine.

It is a plug-in of ``penstock.stages``, to which ``--hints`` belongs.  It stands before the engine, and looks at no
token: it sees the prompts of turns, the ends of responses, and what is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from penstock.extensions.hints.talks import Asker, Talks
from penstock.pipeline import metrics
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import Prompt, RequestFacts
from penstock.pipeline.protocol.items import Call
from penstock.pipeline.protocol.pairs import may_lack_output
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.affinity import hinted_session, is_new
from penstock.services.engines.engine import Backend, CacheHint, TakesHints, engine_of
from penstock.services.runs.run import Run, RunRegistry

logger = logging.getLogger(__name__)


@dataclass
class Hints:
    """The conversations of a server, and the engine that hears of them."""

    engine: Backend
    runs: RunRegistry
    clock: Callable[[], float] = time.monotonic
    talks: Talks = field(default_factory=Talks)
    _has_failed: bool = False

    def asked(self, prompt: Prompt) -> None:
        """Take in that a turn begins; the line of a batch is no conversation."""
        facts = prompt.facts
        if facts.origin.line:
            return
        key, names, tokens = hinted_session(facts), tuple(_names(facts.response)), len(prompt.token_ids)
        if _may_be_another(facts):
            self.talks.share(key)
        self.talks.fork(key, facts.response.previous_response_id)
        asker = Asker(facts.origin.owner, facts.model)
        self._tell(facts.model, self.talks.asked(key, _session(facts), tokens, self.clock(), names, asker))

    def left(self, prompt: Prompt) -> None:
        """Take in that a turn has ended: one that was refused has no run that says so, and its client tries again."""
        name = prompt.facts.response_id
        talk = self.talks.named(name)
        if talk and talk.what is None and not self.runs.is_accepted(name):
            again = self.talks.answered(talk.key, name, (), talk.tokens, self.clock(), is_cancelled=True)
            self._tell(prompt.facts.model, again if talk.response_id else self.talks.over(talk.key))

    def ended(self, run: Run) -> None:
        """Take in that a response has ended."""
        response, talk = run.response, self.talks.named(run.response.id)
        if run.origin.line:
            tokens = response.usage.total_tokens if response.usage else 0
            self._tell(run.model, [CacheHint("let_go", response.id, response.id, tokens)])
        if talk is None:
            return
        tokens = talk.tokens + (response.usage.output_tokens if response.usage else 0)
        calls, is_cancelled = tuple(_calls(response)), response.status == "cancelled"
        hints = self.talks.answered(talk.key, response.id, calls, tokens, self.clock(), is_cancelled=is_cancelled)
        self._tell(talk.asker.model, hints)

    def deleted(self, name: str) -> None:
        """Take in that a conversation is deleted, or a response: if it is the latest one, none can continue it."""
        if talk := self.talks.named(name):
            self._tell(talk.asker.model, self.talks.over(talk.key))

    def _tell(self, model: str, hints: Iterable[CacheHint]) -> None:
        """Pass hints on, and count them."""
        for hint in hints:  # what is known changes, whether or not the engine hears it
            metrics.HINTS.labels(hint.action, "heard" if self._is_heard(model, hint) else "unheard").inc()

    def _is_heard(self, model: str, hint: CacheHint) -> bool:
        """Pass a hint on; an engine that fails at that goes on without it."""
        engine = engine_of(self.engine, model)
        try:
            return isinstance(engine, TakesHints) and engine.hint(hint)
        except Exception:
            if not self._has_failed:
                logger.exception("The engine cannot take hints")
            self._has_failed = True
            return False


@dataclass(frozen=True)
class Hint:
    """Pass prompts on, and let ``hints`` see them."""

    hints: Hints

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        """Yield the prompts unchanged."""
        async for prompt in source:
            self.hints.asked(prompt)
            try:
                yield prompt
            finally:
                self.hints.left(prompt)


@asynccontextmanager
async def install(pipeline: Pipeline[Any, Any]) -> AsyncGenerator[Pipeline[Any, Any], None]:
    """Yield the pipeline with the stage ``hint`` for the length of a block.

    Without a stage ``generate`` it is the same pipeline.
    """
    if "generate" not in pipeline.names():
        yield pipeline
        return
    engine: Backend | None = getattr(pipeline.stage("generate"), "engine", None)
    if engine is None:
        raise CannotStart("--hints needs the stage generate as it is, to know the engine; a plug-in has replaced it")
    runs: RunRegistry = pipeline.stage("persist").runs
    hints, deletions = Hints(engine, runs), runs.store.context.at_deletion
    runs.at_end.append(hints.ended)
    deletions.append(hints.deleted)
    try:
        yield pipeline.insert_before("generate", "hint", Hint(hints))
    finally:
        runs.at_end.remove(hints.ended)
        deletions.remove(hints.deleted)


def _session(facts: RequestFacts) -> str:
    """Return the session of a coding agent, which its children share; empty if it names none."""
    origin = facts.origin
    return f"{origin.owner}\n{origin.session}" if origin.session else ""


def _may_be_another(facts: RequestFacts) -> bool:
    """Return True if a prompt begins a conversation whose name others may have: their first items, or one key."""
    return is_new(facts) and not facts.scheduling.session and facts.response.conversation is UNSET


def _names(response: Response) -> Iterator[str]:
    """Yield the ids by whose deletion a client ends a conversation."""
    yield response.id
    if response.conversation is not UNSET:
        yield response.conversation.id


def _calls(response: Response) -> Iterator[str]:
    """Yield the names of the tools whose outputs the client is to send."""
    for item in response.output:
        if isinstance(item, Call) and not may_lack_output(item):
            yield "/".join(filter(None, item.tool))
