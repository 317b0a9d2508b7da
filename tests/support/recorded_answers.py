"""Tools that return what a file says they returned, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipeline.frames import Conversation
from pipeline.protocol.items import ListedTool
from pipeline.protocol.tools import HOSTED, McpServer
from stages.converse.tools import Host, Outcome, ServerUnavailable, Session, Source, Toolbox


class PlayedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call: to which ``tool``, what the item tells of it (the browser's ``action``), and how it ended."""

    tool: str
    result: str = ""
    error: str | None = None
    data: tuple[dict[str, Any], ...] = ()
    action: dict[str, Any] | None = None


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be cited."""

    title: str
    url: str


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: the ``calls``, what MCP ``servers`` list or why they cannot, and the ``pages`` behind cursors."""

    calls: tuple[PlayedCall, ...] = ()
    servers: dict[str, tuple[ListedTool, ...] | str] = {}
    pages: dict[int, Page] = {}


@dataclass
class Play:
    """A script that is being played: the calls of all namespaces come here, one after another."""

    script: Script
    ran: list[str] = field(default_factory=list)
    """What was called, to be held against the script."""

    def __post_init__(self) -> None:
        self._told: Iterator[PlayedCall] = iter(self.script.calls)
        self._played: Iterator[PlayedCall] = iter(self.script.calls)

    def action(self) -> dict[str, Any] | None:
        """That of the next call to be told."""
        return next(self._told).action

    def next(self, tool: str) -> Outcome:
        """The end of the next call to be run."""
        self.ran.append(tool)
        call = next(self._played)
        return Outcome(call.result, call.error, call.data)


@dataclass(frozen=True)
class PlayedHost:
    """The host of one namespace, and its session as well."""

    namespace: str
    play: Play

    def session(self, conversation: Conversation) -> Session:
        return self

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        return self.play.action()

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        return self.play.next(f"{self.namespace}.{name}")

    def source(self, cursor: int) -> Source | None:
        page = self.play.script.pages.get(cursor)
        return Source(page.title, page.url) if page else None

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class PlayedServers:
    """The MCP servers of a script."""

    play: Play
    labels: frozenset[str] = frozenset()

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        listed = self.play.script.servers[server.label]
        if isinstance(listed, str):
            raise ServerUnavailable(listed)
        return listed

    def session(self, server: McpServer) -> Session:
        return PlayedHost(server.label, self.play)

    async def close(self) -> None:
        pass


class PlayedTools:
    """A toolbox with all built-in tools, which plays the script in a file."""

    def __init__(self, path: Path) -> None:
        self._play = Play(msgspec.json.decode(path.read_bytes(), type=Script))
        hosts: dict[str, Host] = {kind: PlayedHost(kind, self._play) for kind in HOSTED}
        self.toolbox = Toolbox(hosts, PlayedServers(self._play))

    def check(self) -> None:
        """Raise unless exactly the calls of the script were made."""
        assert self._play.ran == [call.tool for call in self._play.script.calls]
