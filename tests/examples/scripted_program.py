"""A script in place of a model, for `docs/PROGRAMS.md`: it writes a program, and answers with what that has printed."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding

PROGRAM = """\
import asyncio
names = ["Ada", "Grace", "Linus"]
spent = await asyncio.gather(*(get_spent(name=name) for name in names))
over = [name for name, amounts in zip(names, spent) if sum(amounts) > 500]
print("Over 500 euros:", ", ".join(over))
"""
RESULT = re.compile(r"<\|start\|>python to=assistant.*?<\|message\|>(.*?)<\|end\|>", re.DOTALL)


class ScriptedProgram(ScriptedEngine):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        encoding = load_encoding()
        printed = RESULT.findall(encoding.decode(prompt.token_ids))
        answer = f"<|channel|>final<|message|>{printed[-1].strip()}<|return|>" if printed else ""
        program = f"<|channel|>analysis to=python code<|message|>{PROGRAM}<|call|>"
        self.script = Script(encoding.encode_markup(answer or program))
        async with super().open(prompt) as frames:
            yield frames


def engine(_: Any) -> ScriptedProgram:
    """Return the engine, for ``--engine``."""
    return ScriptedProgram(models=("tiny-gpt-oss",))
