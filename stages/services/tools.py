"""What the ``converse`` stage asks of those that run calls: hosts, their sessions, and MCP servers.

A `Host` lives as long as the server and holds no state of a response; a `Session` is what one response uses of it.
Sessions are lazy: nothing is started before the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from penstock.pipeline.frames import Conversation
from penstock.pipeline.protocol.items import ListedTool
from penstock.pipeline.protocol.tools import HOSTED, HostedKind, McpServer


@dataclass(frozen=True)
class Outcome:
    """How a call ended; the fields are those of `penstock.pipeline.frames.CallFinished`."""

    result: str = ""
    error: str | None = None
    data: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Source:
    """A page that may be cited."""

    title: str
    url: str


@dataclass(frozen=True)
class Listed(Source):
    """A page that lists others, and has no address itself: what is cited is the one that a line is about."""

    starts: tuple[int, ...] = ()
    """The lines at which the pages of ``sources`` begin."""
    sources: tuple[Source, ...] = ()

    def at(self, line: int) -> Source | None:
        """The page that the line is about."""
        before = [source for start, source in zip(self.starts, self.sources, strict=True) if start <= line]
        return before[-1] if before else None


class Session(Protocol):
    """One response's use of a host."""

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """How the item tells what is about to run; None where its text says all of it.

        ``name`` is that of the function, ``text`` what the model wrote: arguments or code, right or wrong.
        """
        ...

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        """Run one call within so many ``seconds``; calls of one session may come at the same time.

        Whatever goes wrong is told in the outcome.  Cancelling it ends what runs, at once.
        """
        ...

    async def close(self) -> None:
        """End what still runs, and let go of everything; may be called from any task, and more than once."""
        ...


@runtime_checkable
class Citable(Protocol):
    """A session whose pages the model may cite."""

    def source(self, cursor: int) -> Source | None:
        """The page behind a cursor."""
        ...


class Host(Protocol):
    """Runs the calls of one built-in tool."""

    def session(self, conversation: Conversation) -> Session:
        """A session for one response."""
        ...

    async def close(self) -> None:
        """The server ends."""
        ...


class ServerUnavailable(Exception):
    """Why an MCP server cannot be asked what it offers, for the client to read: it holds no secret."""


class McpHosts(Protocol):
    """MCP servers: those that the operator configured, and those that requests name."""

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the operator's servers."""
        ...

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        """All that a server offers, in its own order, whatever the request allows of it.

        Raises `ServerUnavailable`.
        """
        ...

    def session(self, server: McpServer) -> Session:
        """A session for one response; it ends with the response, the connection may outlive it."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class NoServers:
    """No MCP servers at all, neither the operator's nor those of requests."""

    labels: frozenset[str] = frozenset()

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        """Refuse."""
        raise ServerUnavailable(f"This server calls no MCP servers, and so not {server.label} ({seconds:g} s).")

    def session(self, server: McpServer) -> Session:
        """None is ever asked for, as nothing is listed."""
        raise LookupError(server.label)

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class Toolbox:
    """All that this server can run."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """The built-in tools that work here, by their namespaces."""
    mcp: McpHosts = field(default_factory=NoServers)

    @property
    def kinds(self) -> frozenset[HostedKind]:
        """The built-in tools that work here."""
        return frozenset(kind for kind in HOSTED if kind in self.hosts)

    async def close(self) -> None:
        """Let go of everything."""
        await self.mcp.close()
        for host in self.hosts.values():
            await host.close()


def bounded(text: str, longest: int) -> str:
    """The head and the tail of a text that is too long, as most of them say at either end what matters."""
    if (left_out := len(text) - longest) <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
