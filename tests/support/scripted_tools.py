"""A model and tools that follow scripts, and tools that return recorded results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import InputText, Item, ListedTool, Message
from penstock.pipeline.protocol.tools import McpServer, Toolset
from penstock.services.tools import (
    Host,
    NestedCall,
    PastCall,
    Refusal,
    ServerUnavailable,
    Session,
    Source,
    Toolbox,
    ToolResult,
)
from penstock.stages.converse.converse import Converse, Steering
from penstock.stages.converse.tool_loop import Limits
from tests.support.stored_responses import facts, pop_fields, response

Turn = Sequence[frames.ParsedFrame]


def item(opening: frames.ItemOpened, text: str = "", *, complete: bool = True) -> list[frames.ParsedFrame]:
    half = len(text) // 2
    return [
        opening,
        *(frames.ItemDelta(piece) for piece in (text[:half], text[half:]) if piece),
        frames.ItemClosed(complete),
    ]


def code(text: str = "1 + 1", *, complete: bool = True) -> list[frames.ParsedFrame]:
    return item(frames.CodeCallOpened(), text, complete=complete)


def shell(text: str = '{"cmd": ["ls"]}') -> list[frames.ParsedFrame]:
    return item(frames.ShellCallOpened(), text)


def mcp(name: str = "add", text: str = "{}") -> list[frames.ParsedFrame]:
    return item(frames.McpCallOpened("docs", name), text)


def function(name: str = "ask", text: str = "{}") -> list[frames.ParsedFrame]:
    return item(frames.FunctionCallOpened(name), text)


def approval(name: str = "add", text: str = '{"a": 1}') -> list[frames.ParsedFrame]:
    return item(frames.McpApprovalOpened("docs", name), text)


def thought(text: str = "Hm.", recipient: str | None = None) -> list[frames.ParsedFrame]:
    return item(frames.ReasoningOpened(recipient), text)


def answer(text: str = "Done.") -> list[frames.ParsedFrame]:
    return item(frames.MessageOpened("final_answer"), text)


def turn(*items: list[frames.ParsedFrame], reason: frames.FinishReason = "stop") -> list[frames.ParsedFrame]:
    """All frames of a turn after the first, which the model yields itself."""
    ending = frames.TurnFinished(reason, cached_tokens=0, output_tokens=5, reasoning_tokens=0, duration=1.0)
    return [frame for sequence in items for frame in sequence] + [ending]


def conversation(*items: Item, tools: Toolset | None = None, **fields: Any) -> frames.ResolvedRequest:
    """A request with all built-in tools and a server of tools called ``docs``."""
    hosted = kinds().tools
    hello = Message("msg_0", "completed", "user", (InputText("Hello."),))
    begun = response("resp_1", status="in_progress", output=(), completed_at=None)
    begun = replace(begun, max_tool_calls=fields.pop("max_tool_calls", None))
    of_request = pop_fields(frames.RequestFacts, fields)
    offered = Toolset(tools=hosted) if tools is None else tools
    return frames.ResolvedRequest(facts(begun, input=items or (hello,), tools=offered, **of_request), **fields)


@dataclass
class ScriptedModel:
    """A model that yields ``turns``, repeating the last one, and keeps the conversations that it reads."""

    turns: Sequence[Turn]
    error: Exception | None = None
    """Raised after the last turn."""
    read: list[frames.ResolvedRequest] = field(default_factory=list)

    async def __call__(self, source: AsyncIterator[frames.ResolvedRequest]) -> AsyncGenerator[frames.ParsedFrame, None]:
        async for given in source:
            at = len(self.read)
            self.read.append(given)
            if self.error and at >= len(self.turns):
                raise self.error
            yield frames.GenerationStarted(given.facts, 10 * (at + 1))
            for frame in self.turns[min(at, len(self.turns) - 1)]:
                yield frame


@dataclass
class ScriptedTool:
    """The host of a namespace.  Each call takes ``turns`` of the event loop (None hangs), then returns an outcome."""

    outcomes: Sequence[ToolResult | Exception] = (ToolResult("2"),)
    turns: int | None = 1
    calls: list[tuple[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    """The highest number of concurrent calls."""
    opened: int = 0
    closed: int = 0
    cancelled: int = 0
    _numbers: count[int] = field(default_factory=count)

    def session(self, request: Any) -> ScriptedTool:
        self.opened += 1
        return self

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        return {"type": "search", "query": text} if name == "search" else None

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        self.calls.append((name, text))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.turns is None:
                await asyncio.Event().wait()
            for _ in range(self.turns or 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        outcome = self.outcomes[min(next(self._numbers), len(self.outcomes) - 1)]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedProgram:
    """A host of programs that make the calls of ``rounds``, and then print what they got."""

    rounds: Sequence[tuple[NestedCall, ...]]
    past: list[tuple[PastCall, ...]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    closed: int = 0

    def session(self, request: Any) -> ScriptedProgram:
        return self

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        raise AssertionError("a program is not run as a whole")

    async def advance(
        self, call_id: str, code: str, past: Sequence[PastCall], seconds: float, refusal: Refusal
    ) -> tuple[NestedCall, ...] | ToolResult:
        assert code == "run()"
        self.past.append(tuple(past))
        printed = ToolResult(", ".join(each.error or each.result or "" for each in past))
        return _awaited(self.rounds, len(past)) or printed

    def keep(self, call_id: str, past: Sequence[PastCall]) -> None:
        self.kept.append(call_id)

    async def close(self) -> None:
        self.closed += 1


def _awaited(rounds: Sequence[tuple[NestedCall, ...]], done: int) -> tuple[NestedCall, ...]:
    """Return the calls that a program with these rounds waits for when some are done; none at its end."""
    for calls in rounds:
        if done < len(calls):
            return calls[done:]
        done -= len(calls)
    return ()


@dataclass
class ScriptedServers:
    """An MCP server that lists ``listed``; its calls go to ``tool``."""

    listed: Sequence[ListedTool] | Exception = (ListedTool("add", {"type": "object"}),)
    tool: ScriptedTool = field(default_factory=ScriptedTool)
    labels: frozenset[str] = frozenset({"docs"})
    listings: int = 0

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        self.listings += 1
        if isinstance(self.listed, Exception):
            raise self.listed
        return tuple(self.listed)

    def session(self, server: McpServer) -> ScriptedTool:
        return self.tool.session(server)

    async def close(self) -> None:
        pass


SERVER_DOWN = ServerUnavailable("The server docs cannot be reached.")


@dataclass
class ScriptedConverse:
    turns: Sequence[Turn]
    tool: ScriptedTool = field(default_factory=ScriptedTool)
    servers: ScriptedServers = field(default_factory=ScriptedServers)
    limits: Limits = field(default_factory=Limits)
    error: Exception | None = None
    steering: Steering = field(default_factory=Steering)

    def __post_init__(self) -> None:
        self.model = ScriptedModel(self.turns, self.error)
        hosts = {"python": self.tool, "browser": self.tool, "container": self.tool}
        toolbox = Toolbox(hosts, self.servers)
        ticking = count()
        inner = Pipeline.start("model", self.model)
        self.converse = Converse(inner, toolbox, self.limits, self.steering, lambda: float(next(ticking)))

    async def talk(self, given: frames.ResolvedRequest | None = None) -> list[frames.ConversedFrame]:
        async with aclosing(self.converse(source_of([given or conversation()]))) as sequence:
            return [frame async for frame in sequence]


DOCS = Toolset(servers=(McpServer("docs", approves_rest=False),))


def frame_kinds(sequence: list[frames.ConversedFrame]) -> list[str]:
    """The types of frames, without deltas."""
    return [type(frame).__name__ for frame in sequence if not isinstance(frame, frames.ItemDelta)]


def finish_reasons(sequence: list[frames.ConversedFrame]) -> list[frames.FinishReason]:
    return [frame.reason for frame in sequence if isinstance(frame, frames.TurnFinished)]


RunCell = Callable[..., Awaitable[str]]

NO_CONVERSATION = conversation()
"""A request for hosts that do not read its input."""


def another_conversation(response_id: str = "resp_2") -> frames.ResolvedRequest:
    """A request of another response, whose calls run in a container of their own."""
    begun = replace(NO_CONVERSATION.facts.response, id=response_id)
    return frames.with_facts(NO_CONVERSATION, response=begun)


class RecordedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call: its ``tool``, the ``action`` of its item if it is a browser call, and its outcome."""

    tool: str
    result: str = ""
    error: str | None = None
    data: frames.CallData | None = None
    action: dict[str, Any] | None = None


class RecordedPage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    url: str


class ToolScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A script file: the ``calls``, the tools of MCP ``servers`` (or an error text), and the ``pages`` by cursor.

    ``rounds`` are the calls of a program, whose own end is a call of ``program``.
    """

    calls: tuple[RecordedCall, ...] = ()
    rounds: tuple[tuple[NestedCall, ...], ...] = ()
    servers: dict[str, tuple[ListedTool, ...] | str] = {}
    pages: dict[int, RecordedPage] = {}


def read_script(path: Path) -> ToolScript:
    return msgspec.json.decode(path.read_bytes(), type=ToolScript)


@dataclass
class ScriptPlayer:
    script: ToolScript
    ran: list[str] = field(default_factory=list)
    """The calls made so far."""

    def __post_init__(self) -> None:
        self._announced: Iterator[RecordedCall] = iter(self.script.calls)
        self._played: Iterator[RecordedCall] = iter(self.script.calls)

    def action(self) -> dict[str, Any] | None:
        call = next(self._announced, None)  # a call that is refused is not in the script
        return call.action if call else None

    def next(self, tool: str) -> ToolResult:
        self.ran.append(tool)
        call = next(self._played)
        return ToolResult(call.result, call.error, call.data)


@dataclass(frozen=True)
class RecordedHost:
    namespace: str
    play: ScriptPlayer

    def session(self, request: frames.ResolvedRequest) -> Session:
        return self

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        return self.play.action()

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        return self.play.next(f"{self.namespace}.{name}")

    def source(self, cursor: int) -> Source | None:
        page = self.play.script.pages.get(cursor)
        return Source(page.title, page.url) if page else None

    async def close(self) -> None:
        pass


class RecordedProgram(RecordedHost):
    async def advance(
        self, call_id: str, code: str, past: Sequence[PastCall], seconds: float, refusal: Refusal
    ) -> tuple[NestedCall, ...] | ToolResult:
        return _awaited(self.play.script.rounds, len(past)) or self.play.next(self.namespace)

    def keep(self, call_id: str, past: Sequence[PastCall]) -> None:
        """Keep nothing."""


@dataclass(frozen=True)
class RecordedServers:
    play: ScriptPlayer
    labels: frozenset[str] = frozenset()

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        listed = self.play.script.servers[server.label]
        if isinstance(listed, str):
            raise ServerUnavailable(listed)
        return listed

    def session(self, server: McpServer) -> Session:
        return RecordedHost(server.label, self.play)

    async def close(self) -> None:
        pass


class RecordedTools:
    """A toolbox with all built-in tools that follows the script in a file."""

    def __init__(self, path: Path) -> None:
        self._play = ScriptPlayer(read_script(path))
        hosts: dict[str, Host] = {kind: RecordedHost(kind, self._play) for kind in kinds()}
        hosts["program"] = RecordedProgram("program", self._play)
        self.toolbox = Toolbox(hosts, RecordedServers(self._play))

    def check(self) -> None:
        """Raise unless exactly the calls of the script were made."""
        assert self._play.ran == [call.tool for call in self._play.script.calls]
