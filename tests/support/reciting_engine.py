"""An engine that answers with the messages of the user, all of them, and thinks before: for ``--engine``.

The code of several releases loads this file, so it uses only what all of them have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import stages
from penstock.api.settings import Settings
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.stages.models.harmony.vocabulary import END, load_encoding

if TYPE_CHECKING or not (Path(stages.__path__[0]) / "services" / "__init__.py").exists():
    from penstock.services.engines.scripted import Script, ScriptedEngine
else:  # their place in 0.2.0
    from penstock.stages.services.engines.scripted import Script, ScriptedEngine

LATENCY = 0.005
"""Seconds before each token."""

_encode = load_encoding().encode_markup
_MESSAGE = tuple(_encode("<|start|>user<|message|>"))
_THOUGHT = _encode("<|channel|>analysis<|message|>All of it.<|end|><|start|>assistant<|channel|>final<|message|>")
_RETURN = _encode("<|return|>")


def _messages(prompt: Sequence[int]) -> Iterator[int]:
    for start in range(len(_MESSAGE), len(prompt)):
        if tuple(prompt[start - len(_MESSAGE) : start]) == _MESSAGE:
            yield from prompt[start : prompt.index(END, start)]


class RecitingEngine(ScriptedEngine):
    """Recite the messages of each prompt."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        self.script = Script((*_THOUGHT, *_messages(prompt.token_ids), *_RETURN), latency=LATENCY)
        async with super().open(prompt) as frames:
            yield frames


def engine(_: Settings) -> RecitingEngine:
    return RecitingEngine()
