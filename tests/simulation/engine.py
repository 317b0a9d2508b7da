"""An engine that counts, as far and as fast as its request says."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding

_IN_FILE = re.compile(r"<file [^>]*>\nCount to (\d+)\.")

_OF_PROGRAM = " to=assistant"

HESITATION = 6
"""Thoughts that the engine may have: as a model does, it writes something else each time that a response runs."""

REFUSALS = 3
"""Times that the engine is too full for a response, whose metadata say so."""


def count_to(last: int) -> str:
    """Return the text of an answer."""
    return " ".join(map(str, range(1, last + 1)))


def count_file(last: int) -> bytes:
    """Return a file that says how far to count."""
    return f"Count to {last}.".encode()


@cache
def _tokens(last: int, hesitation: int, program: str) -> tuple[int, ...]:
    thought = "Well. " * hesitation + "Count."
    answer = f"<|channel|>final<|message|>{count_to(last)}<|return|>"
    if program:
        answer = f" to=python<|channel|>analysis code<|message|>{program}<|call|>"
    turn = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{answer}"
    return tuple(load_encoding().encode_markup(turn))


@dataclass
class CountingEngine(ScriptedEngine):
    """Count to the number that is wanted in the metadata of a request, or else in its text.

    A ``program`` that is wanted is written first, and the model counts when it has the output.

    What is wanted has ``last``, the seconds of a token, and perhaps ``fault``: "refuse" for the first attempts, or
    "break" after the last token.  With ``file``, the number is the one that the file in the prompt says.
    """

    by_owner: Counter[str] = field(default_factory=Counter)
    """The generations that run in the foreground, by owner: those in the background and lines are not limited."""
    refused: Counter[str] = field(default_factory=Counter)
    """The times that it was too full for a response."""
    when_begun: Callable[[str], None] = lambda _: None
    """Called with the owner of each generation that begins."""
    when_wrong: Callable[[str], None] = lambda _: None
    """Called with what it does that it should not."""
    when_line: Callable[[str], None] = lambda _: None
    when_line_ended: Callable[[str], None] = lambda _: None
    """Called with the id of a line of a batch whose generation begins, or has ended."""
    name: str = ""
    """The model that it is, if its server has several."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if _wanted(prompt).get("fault") == "refuse":
            self.refused[prompt.facts.response_id] += 1
            if self.refused[prompt.facts.response_id] <= REFUSALS:
                raise EngineOverloaded("The engine is full.")
        if self.name and (wanted := _wanted(prompt).get("model", self.name)) != self.name:
            self.when_wrong(f"{prompt.facts.response_id} is for the model {wanted}, and {self.name} runs it")
        owner, line = prompt.facts.origin.owner, prompt.facts.origin.line
        counts = not (prompt.facts.response.background or line)
        self.by_owner[owner] += counts
        self.when_begun(owner)
        if line:
            self.when_line(line)
        try:
            async with super().open(prompt) as frames:
                yield frames
        finally:
            self.by_owner[owner] -= counts
            if line:
                self.when_line_ended(line)

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        wanted = _wanted(prompt)
        error = EngineFailed("The engine broke.") if wanted.get("fault") == "break" else None
        last = _last_in_file(prompt) if "file" in wanted else int(wanted["last"])
        tokens = _tokens(last, random.randrange(HESITATION), _program(prompt, wanted))
        counting = Script(tokens, latency=float(wanted["seconds"]), error=error)
        self.prompts.clear()
        await asyncio.sleep(float(wanted.get("wait", "0")))
        async with aclosing(super()._frames(counting, prompt, run)) as frames:
            async for frame in frames:
                yield frame


def _wanted(prompt: Prompt) -> Mapping[str, str]:
    if metadata := prompt.facts.response.metadata:
        return metadata
    wanted: Mapping[str, str] = json.loads(_text_of(prompt.facts.input[-1]))
    return wanted


def _program(prompt: Prompt, wanted: Mapping[str, str]) -> str:
    """Return the program that the model is to write; empty if it has its output."""
    has_output = _OF_PROGRAM in load_encoding().decode(prompt.token_ids)
    return "" if has_output else wanted.get("program", "")


def _text_of(item: Any) -> str:
    return "".join(part.text for part in item.content)


def _last_in_file(prompt: Prompt) -> int:
    """Return the number that the newest file of a prompt says, as `count_file` writes it; 0 if the prompt has none."""
    found = _IN_FILE.findall(load_encoding().decode(prompt.token_ids))
    return int(found[-1]) if found else 0
