"""An engine for the requests of ``penstock conformance``: it calls what it can, and writes the JSON that is wanted."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from msgspec import UNSET

from penstock.pipeline.frames import EngineFrame, Prompt, TokenLogprob
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support import deciding_engine
from tests.support.server import CALL, HELLO

CONTEXT_LENGTH = 8192

_LAST = re.compile(r"<\|start\|>user<\|message\|>((?:(?!<\|start\|>user).)*)$", re.DOTALL)
CALLING = load_encoding().encode_markup(CALL)
_JSON = "<|channel|>final <|constrain|>json<|message|>%s<|return|>"


def script_after(prompt: str) -> Script:
    """Return the turn of the model after a prompt."""
    last = _LAST.search(prompt)
    message = last[1] if last else ""
    encode = load_encoding().encode_markup
    if "never stop talking" in message:
        counted = " ".join(map(str, range(500)))
        return Script(encode(f"<|channel|>final<|message|>{counted}"), endless=True, latency=0.001)
    if "as JSON" in message:
        return Script(encode(_JSON % '{"city":"Paris","warm":true}'))
    if "JSON object" in message:
        return Script(encode(_JSON % '{"city":"Paris"}'))
    if "type get_weather" in prompt and "weather" in message and "to=assistant" not in message:
        return Script(CALLING)
    return Script(encode(HELLO), logprobs=(TokenLogprob(-0.25, ()),))


def script_of_turn(prompt: Prompt) -> Script:
    """Return the turn after a prompt, whose grammar may have one tool, and whose tokens may be chosen."""
    chosen = prompt.facts.sampling.logprob_token_ids
    if chosen is not UNSET:
        return deciding_engine.script_of(chosen, {})
    script = script_after(load_encoding().decode(prompt.token_ids))
    called = [name for _, name in prompt.facts.tools.allowed or ()]
    if script.token_ids == CALLING and called and "get_weather" not in called:
        return Script(load_encoding().encode_markup(CALL.replace("get_weather", called[0])))
    return script


class ConformingEngine(ScriptedEngine):
    """Answer each prompt by `script_after`."""

    def __init__(self) -> None:
        super().__init__(context_length=CONTEXT_LENGTH)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        self.script = script_of_turn(prompt)
        async with super().open(prompt) as frames:
            yield frames
