"""An engine that does what the last message of the user says, for coding agents: ``--engine``.

A line ``call NAME JSON`` of the message is a call of the function NAME, or of the server's tool ``browser.search``,
``run CODE`` a program, which is a JSON string, and ``say TEXT`` the answer, in which ``{model}`` is the model and
``{result}`` the last result.  The lines are carried out one by one, each in a turn of its own once the call before it
has its result; without a line that is left, the answer is `DONE`.  The engine thinks before each.  ``refuse TEXT``
refuses the prompt as a full engine does, the first time.  A message that asks for a ``<summary>`` gets the lines that
are left.  Cached tokens are those of an engine that keeps everything.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from penstock.api.settings import Settings
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding

DONE = "All of it is done."

BLOCK = 16
"""Tokens of a block of the prefix cache."""

_MESSAGE = re.compile(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", re.DOTALL)
_ORDER = re.compile(r"^(call|run|say|refuse) (.+?)\s*$", re.MULTILINE)
_RESULT = re.compile(r"<\|start\|>\S+ to=assistant.*?<\|message\|>(.*?)<\|end\|>", re.DOTALL)


def turn(prompt: str, model: str) -> str | EngineOverloaded:
    """Return the turn of a model after a prompt, or why there is none."""
    orders, results, asks_for_summary = list[tuple[str, str]](), list[str](), False
    for message in _MESSAGE.finditer(prompt):
        if found := _ORDER.findall(message[1]):
            orders, results = found, _RESULT.findall(prompt, message.end())
        asks_for_summary = not found and "<summary>" in message[1]
    left = orders[len(results) :]
    thought = f"<|channel|>analysis<|message|>{len(left)} to do.<|end|><|start|>assistant"
    if asks_for_summary:
        lines = "\n".join(map(" ".join, left))
        return f"{thought}<|channel|>final<|message|><summary>\n{lines}\n</summary><|return|>"
    kind, words = left[0] if left else ("say", DONE)
    if kind == "refuse":
        return EngineOverloaded(words)
    if kind == "say":
        words = words.replace("{model}", model).replace("{result}", results[-1] if results else "")
        return f"{thought}<|channel|>final<|message|>{words}<|return|>"
    if kind == "run":
        return f"{thought} to=python<|channel|>analysis code<|message|>{json.loads(words)}<|call|>"
    name, _, arguments = words.partition(" ")
    if name.startswith("browser."):
        return f"{thought} to={name}<|channel|>analysis code<|message|>{arguments}<|call|>"
    return f"{thought} to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yield a number for each whole block with all that stand before it."""
    before = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        yield before


class AgentEngine(ScriptedEngine):
    """Carry out the lines of each prompt."""

    def __init__(self, model: str) -> None:
        super().__init__(context_length=int(os.environ.get("AGENT_CONTEXT", "131072")), models=(model,))
        self._kept = set[int]()
        self._refused = set[str]()

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        encoding = load_encoding()
        text = turn(encoding.decode(prompt.token_ids), self.models[0])
        self.script = Script(encoding.encode_markup(text)) if isinstance(text, str) else self._refusing(text)
        async with super().open(prompt) as frames:
            yield self._counted(prompt, frames)

    def _refusing(self, refusal: EngineOverloaded) -> Script:
        if str(refusal) in self._refused:
            return Script(load_encoding().encode_markup(f"<|channel|>final<|message|>{DONE}<|return|>"))
        self._refused.add(str(refusal))
        return Script(refusal=refusal)

    async def _counted(self, prompt: Prompt, frames: AsyncIterator[EngineFrame]) -> AsyncGenerator[EngineFrame, None]:
        blocks, tokens = list(_blocks(prompt.token_ids)), [*prompt.token_ids]
        cached = BLOCK * next((at for at, block in enumerate(blocks) if block not in self._kept), len(blocks))
        async for frame in frames:
            if isinstance(frame, TokenChunk):
                tokens += frame.token_ids
            yield replace(frame, cached_tokens=cached) if isinstance(frame, GenerationFinished) else frame
        self._kept.update(_blocks(tokens))


def engine(_: Settings) -> AgentEngine:
    """Return an engine whose context has as many tokens as the variable ``AGENT_CONTEXT`` says."""
    return AgentEngine("agent")


def large(_: Settings) -> AgentEngine:
    """Return the engine of the model ``large`` of a server of several."""
    return AgentEngine("large")


def small(_: Settings) -> AgentEngine:
    """Return the engine of its model ``small``."""
    return AgentEngine("small")
