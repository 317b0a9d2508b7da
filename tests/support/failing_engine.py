"""An engine that fails as the prompt says, to see what clients make of errors: ``--engine``.

The text of the user names the failure, one of `FAILURES`; without one, the answer is a greeting.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

from penstock.api.settings import Settings
from penstock.pipeline.errors import EngineDead, EngineFailed, EngineOverloaded
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding

CONTEXT = 2048
"""The tokens of the context."""

_GREETING = load_encoding().encode_markup("<|channel|>final<|message|>Hello!<|return|>")

FAILURES: Mapping[str, Script] = {
    "The engine is full.": Script(
        refusal=EngineOverloaded("The engine is overloaded: its queue is full. Try again in a moment.")
    ),
    "The engine is dead.": Script(refusal=EngineDead("The engine has died.")),
    "The engine fails midway.": Script(_GREETING[:-1], error=EngineFailed("The engine gave up on this request.")),
    "The engine dies midway.": Script(_GREETING[:-1], error=EngineDead("The engine has died.")),
}
"""What the engine does, by the text of the user."""


class FailingEngine(ScriptedEngine):
    """Fail as each prompt says; the engine lives on."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        text = load_encoding().decode(prompt.token_ids)
        found = (script for words, script in FAILURES.items() if words in text)
        self.script = next(found, Script(_GREETING))
        async with super().open(prompt) as frames:
            yield frames


def engine(_: Settings) -> FailingEngine:
    """Return the engine."""
    return FailingEngine(context_length=CONTEXT)
