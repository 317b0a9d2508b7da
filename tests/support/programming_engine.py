"""An engine whose model writes programs: the last message of the user is its code, and the answer is what it printed.

`serve_programming` serves it in a process of its own, which can be killed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import uvloop
from pydantic_settings import CliApp

from penstock.api.cli.serve import serve
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.pipeline.logs import log_to_stderr
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.server_process import SCRIPTED, ForgottenPrompts
from tests.support.tool_servers import answer_markup, python_markup

_MESSAGE = re.compile(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", re.DOTALL)
_RESULT = re.compile(r"<\|start\|>(?:python|program) to=assistant.*?<\|message\|>(.*?)<\|end\|>", re.DOTALL)


def turn(prompt: str) -> str:
    """Return the turn of the model after a prompt: a program, or its result as the answer."""
    *_, message = _MESSAGE.finditer(prompt)
    results = _RESULT.findall(prompt, message.end())
    return answer_markup(results[-1]) if results else python_markup(message[1])


class ProgrammingEngine(ScriptedEngine):
    """Run the program that the user has written."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        encoding = load_encoding()
        self.script = Script(encoding.encode_markup(turn(encoding.decode(prompt.token_ids))))
        async with super().open(prompt) as frames:
            yield frames


def serve_programming(*arguments: str) -> None:
    """Serve the engine until the process ends."""
    uvloop.run(_serve(*arguments))


async def _serve(*arguments: str) -> None:
    settings = CliApp.run(Settings, cli_args=list(arguments))
    log_to_stderr(settings.log_level)
    engine = ProgrammingEngine(models=(SCRIPTED,), prompts=ForgottenPrompts())
    await serve(settings, lambda _: nullcontext(RunningEngine(engine, harmony_stages(load_encoding()))))
