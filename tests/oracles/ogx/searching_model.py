"""An engine whose model searches in files for the words of the user, and quotes what it finds: ``--engine``."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from penstock.api.settings import Settings
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding

_QUESTION = re.compile(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", re.DOTALL)
_FOUND = re.compile(r"<\|start\|>file_search\S* to=assistant.*?<\|message\|>(.*?)<\|end\|>", re.DOTALL)
_LINE = re.compile(r"^L\d+: (.*)$", re.MULTILINE)


def turn(prompt: str) -> str:
    """Return the turn of the model after a prompt."""
    *_, question = _QUESTION.finditer(prompt)
    found = _FOUND.search(prompt, question.end())
    if "namespace file_search" in prompt and not found:
        queries = json.dumps({"queries": [question[1]]})
        return f"<|channel|>analysis to=file_search.search code<|message|>{queries}<|call|>"
    quoted = " ".join(_LINE.findall(found[1])) if found else ""
    return f"<|channel|>final<|message|>{quoted or 'There is nothing about it.'}<|return|>"


class SearchingEngine(ScriptedEngine):
    """Play the turn that a prompt asks for."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        encoding = load_encoding()
        self.script = Script(encoding.encode_markup(turn(encoding.decode(prompt.token_ids))))
        async with super().open(prompt) as frames:
            yield frames


def engine(_: Settings) -> SearchingEngine:
    """Return the engine of the server under test."""
    return SearchingEngine(models=("searching",))
