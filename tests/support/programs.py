"""Programs of a model, whose calls a test answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.extensions.programs.host import ProgramHost, ProgramSession
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline import frames
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Tool, Toolset
from penstock.services.slots import Slots
from penstock.services.tools import NestedCall, PastCall, ToolResult
from tests.support.scripted_tools import another_conversation

ADD = FunctionTool(
    "add",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
SAY = FunctionTool("say", parameters={"type": "object", "properties": {"text": {}}}, namespace="notes")
WRITE = CustomTool("write")
TOOLS: Sequence[Tool] = (ADD, SAY, WRITE)

Answers = Callable[[int, NestedCall], PastCall]
"""Returns the outcome of a call by its number."""
Round = tuple[NestedCall, ...]


def request(owner: str = "", tools: Sequence[Tool] = TOOLS) -> frames.ResolvedRequest:
    """A request whose programs may call these tools."""
    return frames.with_facts(
        another_conversation("resp_1"), tools=Toolset(in_programs=tuple(tools)), origin=frames.Origin(owner)
    )


def numbered(number: int, call: NestedCall) -> PastCall:
    """Return the number of the call as its result."""
    return PastCall(call, str(number))


@asynccontextmanager
async def host_of(sandbox: Sandbox, slots: int = 8, **settings: Any) -> AsyncIterator[ProgramHost]:
    """Open a host of programs for the length of the block."""
    host = ProgramHost(sandbox, Slots(slots), **settings)
    try:
        yield host
    finally:
        await host.close()


async def step(
    session: ProgramSession, code: str, past: Sequence[PastCall] = (), *, call_id: str = "call_p", seconds: float = 300
) -> Round | ToolResult:
    """Let a program go on once."""
    return await session.advance(call_id, code, past, seconds, lambda _: None)


async def rounds(session: ProgramSession, code: str, past: Sequence[PastCall] = ()) -> Round:
    """Return the calls that a program waits for."""
    outcome = await step(session, code, past)
    assert isinstance(outcome, tuple), outcome
    return outcome


async def ended(session: ProgramSession, code: str, past: Sequence[PastCall] = (), seconds: float = 300) -> ToolResult:
    """Return the result of a program that has ended."""
    outcome = await step(session, code, past, seconds=seconds)
    assert isinstance(outcome, ToolResult), outcome
    return outcome


async def played(
    host: ProgramHost, code: str, answers: Answers = numbered, *, is_kept: bool = True, seconds: float = 300
) -> tuple[list[Round], ToolResult]:
    """Run a program to its end; return its rounds and its result.  Each ends its process, unless that ``is_kept``."""
    past: list[PastCall] = []
    asked: list[Round] = []
    session = host.session(request())
    try:
        while isinstance(outcome := await step(session, code, past, seconds=seconds), tuple):
            asked.append(outcome)
            past += [answers(len(past) + at, call) for at, call in enumerate(outcome)]
            if not is_kept:
                host.sleeping.drop(("", "call_p"))
    finally:
        await session.close()
    return asked, outcome
