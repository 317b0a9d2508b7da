"""The interface between the ``converse`` stage and the services that run tool calls: hosts, sessions and MCP servers.

A `Host` lives as long as the server and holds no state of a response.  A `Session` is one response's use of a host.
Sessions are lazy: nothing is started before the first call that needs it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import UNSET, UnsetType

from penstock.pipeline.frames import CallData, ResolvedRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import ListedTool
from penstock.pipeline.protocol.tools import HostedTool, McpServer, StrictLevel, ToolKey
from penstock.services.containers import TTL, Containers, MemoryLimit, OwnerLimits, no_owner_limits
from penstock.services.slots import Limit, Slots, unlimited
from penstock.services.usage import Tallies
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

if TYPE_CHECKING:
    from penstock.services.store.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolResult:
    """The result of a call; the fields have the meaning of those in `penstock.pipeline.frames.CallFinished`."""

    result: str = ""
    error: str | None = None
    data: CallData | None = None
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A page that the model may cite."""

    title: str
    url: str


@dataclass(frozen=True)
class FileSource:
    """A file that the model may cite."""

    file_id: str
    filename: str


@dataclass(frozen=True)
class Listed(Source):
    """A page that lists other pages, such as search results.  A citation of a line names the page listed there."""

    starts: tuple[int, ...] = ()
    """The first line of each entry of ``sources``."""
    sources: tuple[Source, ...] = ()

    def at(self, line: int) -> Source | None:
        """Return the page listed at ``line``; None before the first."""
        before = [source for start, source in zip(self.starts, self.sources, strict=True) if start <= line]
        return before[-1] if before else None


class Session(Protocol):
    """One response's use of a host."""

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Run one call, for at most ``seconds``.  Calls of one session may run concurrently.

        ``name`` is the function's name.  ``text`` is the model's arguments or code, valid or not.

        An error is one of the result, and is not raised.  Cancelling the task stops the call at once.
        """
        ...

    async def close(self) -> None:
        """Stop running calls and release all resources; may be called from any task, and more than once."""
        ...


@runtime_checkable
class Acting(Protocol):
    """A session whose calls have an action, which their items show."""

    def action(self, name: str, text: str) -> dict[str, Any] | None:
        """Return the item's action for a call that is about to run; None if the item shows the text alone.

        ``name`` is the function's name.  ``text`` is the model's arguments or code, valid or not.
        """
        ...


@dataclass(frozen=True)
class NestedCall:
    """A call that a program makes of a tool, given by its key.

    ``arguments`` is JSON, or the text of a tool that takes text.  In a past call it is empty if its item does not show
    it.
    """

    tool: ToolKey
    arguments: str


@dataclass(frozen=True)
class PastCall:
    """A call of a program that is done: its result, or the ``error`` that the program gets as an exception.

    The result is None if it is no longer known: only a process that has consumed it can go on.
    """

    call: NestedCall
    result: str | None = ""
    error: str | None = None

    @property
    def is_known(self) -> bool:
        """True if it can be given to a process again."""
        return self.result is not None or self.error is not None


Guard: TypeAlias = Callable[[ResolvedRequest, NestedCall], str | None]
"""Returns why a program may not make a call, in words for the program; None if it may.

A program that runs again from its start asks it again: the answer has to follow from the request and the call alone.
"""


Refusal: TypeAlias = Callable[[NestedCall], str | None]
"""Returns why a program of one response may not make a call; None if it may."""


@runtime_checkable
class Advancing(Protocol):
    """A session that runs programs, which call tools."""

    async def advance(
        self, call_id: str, code: str, past: Sequence[PastCall], seconds: float, refusal: Refusal
    ) -> tuple[NestedCall, ...] | ToolResult:
        """Let a program go on until all of its tasks wait for calls; return these, or the result if it has ended.

        ``past`` are all of its calls so far, in their order.  A program that no longer runs here begins anew, and gets
        them again.  A call with a ``refusal`` is none of these: it raises in the program.  An error is one of the
        result, and is not raised.  Cancelling the task ends the program.
        """
        ...

    def keep(self, call_id: str, past: Sequence[PastCall]) -> None:
        """Keep a program that waits for the client beyond the end of the session.

        ``past`` are all of its calls that have an outcome: the client may not send back those of this server's tools.
        """
        ...


@runtime_checkable
class Citable(Protocol):
    """A session whose pages or files the model may cite."""

    def source(self, cursor: int) -> Source | FileSource | None:
        """Return the source to cite for a cursor; None if there is none."""
        ...


@dataclass(frozen=True)
class ContainerFiles:
    """The files of a container, which the model may cite by their paths: those of code, or below ``/mnt/data``."""

    container_id: str
    home: str
    """The path of the folder for code in the container."""
    paths: tuple[str, ...]
    """Their paths in the folder."""


@runtime_checkable
class HasFiles(Protocol):
    """A session whose calls leave files."""

    @property
    def files(self) -> ContainerFiles | None:
        """The files after the latest call; None if there are none."""
        ...


class Host(Protocol):
    """Runs the calls of one tool."""

    def session(self, request: ResolvedRequest) -> Session:
        """Return a new session for one response."""
        ...

    async def close(self) -> None:
        """Release all resources; called when the server shuts down."""
        ...


@runtime_checkable
class Checking(Protocol):
    """A host that cannot serve each request that names its tool.  It checks the other requests, as well."""

    async def check(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` for a request that the host cannot serve, before its response begins."""
        ...


class OwnHost(Host, Protocol):
    """A host of the operator's own, which brings its functions."""

    @property
    def functions(self) -> tuple[ListedTool, ...]:
        """The functions that the model may call, each with a JSON schema of its arguments."""
        ...


LONGEST_RESULT: Final = 1_000_000
"""Characters of the result of a call that a program makes; a longer one is an error."""

PROGRAM_TTL: Final = 300.0
"""Seconds that the process of a program waits for a client, which runs its calls."""


@dataclass(frozen=True)
class FileLimits:
    """The limits of reading one file; ``characters`` also limits the texts of all files of a conversation."""

    bytes: int = 32 << 20
    seconds: float = 20.0
    memory: int = 1 << 30
    pages: int = 2_000
    inflated: int = 256 << 20
    """Bytes to which an archive may inflate."""
    characters: int = 4_000_000
    shown: int = 100
    """Pages that are shown as images; also of all files of a conversation."""
    shown_bytes: int = 32 << 20
    """Bytes of these images, of one file."""


USUAL_LIMITS = FileLimits()


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The settings of the operator that hosts may need.

    A function of the entry points ``penstock.hosts`` takes them, and returns the host, or None if it is not to be had
    with these settings, or on this machine.  It may be async.
    """

    allowed: AllowedNetworks = NOTHING_ALLOWED
    """The networks that URLs of requests and of the model may reach besides public addresses."""
    mcp_config: Path | None = None
    """The file of the operator's MCP servers."""
    web_search: str | None = None
    """The search engine: its name, or its name and URL with ``=`` between them."""
    search_key: str = field(default="", repr=False)
    slots: Slots | None = None
    """The slots of all sandboxes together; None if there are to be no sandboxes."""
    limit: Limit = unlimited
    """Limits the sandboxes of an owner."""
    store: Store | None = None
    """The store of the server; None if it keeps nothing."""
    container_ttl: float = TTL
    """Seconds without use after which a container ends."""
    program_ttl: float = PROGRAM_TTL
    """Seconds that the process of a program waits for a client."""
    container_memory: MemoryLimit = "4g"
    """The largest limit of memory that a client may give a container."""
    container_limits: Callable[[str], OwnerLimits] = no_owner_limits
    """Gives the limits of the containers of an owner."""
    call_seconds: float = 120.0
    """Seconds that one call of a tool may take."""
    containers: Containers | None = None
    """The containers of this server; None if there are to be no sandboxes."""
    embeddings: str = ""
    """The URL of the server that embeds, if there is one."""
    embeddings_key: str = field(default="", repr=False)
    file_limits: FileLimits = USUAL_LIMITS
    """The limits of the files that the model reads."""


@dataclass(frozen=True)
class Declaration:
    """A built-in tool in the words of the host that runs it: its functions, and its description or ""."""

    tools: tuple[HostedTool, ...]
    description: str = ""


@runtime_checkable
class Declaring(Protocol):
    """A host whose tool describes itself."""

    async def declaration(self, request: ResolvedRequest, seconds: float) -> Declaration:
        """Return the declaration for a request, within ``seconds``; raises `ServerUnavailable`."""
        ...


class ServerUnavailable(Exception):
    """An MCP server's tools cannot be listed.  The message is shown to the client, so it holds no secrets."""


class McpHosts(Protocol):
    """MCP servers, configured by the operator or named in requests."""

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the operator's servers."""
        ...

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        """List all tools of a server in its own order, also tools that the request does not allow.

        Raises `ServerUnavailable`.
        """
        ...

    def session(self, server: McpServer) -> Session:
        """Return a session for one response; the connection to the server may outlive it."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class ReplacingServers(McpHosts, Protocol):
    """MCP servers, some of which run a built-in tool."""

    def host(self, kind: str) -> Host | None:
        """Return the host of a built-in tool that one of the operator's servers runs; None if none does."""
        ...


class NoServers:
    """Support for no MCP servers at all, neither the operator's nor those of requests."""

    labels: frozenset[str] = frozenset()

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        raise ServerUnavailable(f"This server calls no MCP servers, and so not {server.label} ({seconds:g} s).")

    def session(self, server: McpServer) -> Session:
        """Raise `LookupError`.  Not reached, as no server's tools are ever listed."""
        raise LookupError(server.label)

    def host(self, kind: str) -> Host | None:
        """Return None."""
        return None

    async def close(self) -> None:
        """Do nothing."""


class Approvals(Protocol):
    """The approvals of MCP calls that were used."""

    async def use(self, owner: str, approval_id: str, response_id: str) -> str:
        """Use an approval for a response, unless another response has used it; return the one that has it now."""
        ...


@dataclass(frozen=True)
class ToolAccess:
    """The tools that clients may use, built-in and of the operator's own; None stands for all of them.

    They are ``of_all``, except for owners to whom ``of_key`` gives others.
    """

    of_all: frozenset[str] | None = None
    of_key: Callable[[str], frozenset[str] | None] = lambda _: None

    def of(self, owner: str) -> frozenset[str] | None:
        return self.of_all if (own := self.of_key(owner)) is None else own

    def of_denied(self, owner: str, *, by_model: bool = False) -> str:
        """Return the beginning of the error about a tool that an owner may not use, by who has decided that."""
        if by_model:
            return "This model may not use"
        return "Clients of this server may not use" if self.of_key(owner) is None else "This API key may not use"


FULL_ACCESS = ToolAccess()

ADVICE = "give its server_url"
"""The advice in the error about a label that the server does not know."""


@dataclass(frozen=True)
class Toolbox:
    """All tools that this server can run."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """The hosts of the built-in tools, by namespace."""
    mcp: McpHosts = field(default_factory=NoServers)
    own: Mapping[str, OwnHost] = field(default_factory=dict)
    """The hosts of the operator's own, by the label under which requests ask for them as for MCP servers."""
    access: ToolAccess = FULL_ACCESS
    approvals: Approvals | None = None
    """The approvals of MCP calls that were used; None if all may be used again."""
    left_out: frozenset[str] = frozenset()
    """The types of tools that are left out of requests."""
    of_unknown: str = ADVICE
    """The end of the error about a label that is not among the ``labels``."""
    containers: Containers | None = None
    """The containers in which code and commands run."""
    strict_level: Callable[[str], StrictLevel | UnsetType] = lambda _: UNSET
    """Gives the level to which all calls are held now."""
    tallies: Tallies = field(default_factory=Tallies)
    """The tallies of the responses that run the tools."""
    guards: tuple[Guard, ...] = ()
    """The guards of the operator: a call of a program that one of them refuses does not leave it."""

    @property
    def namespaces(self) -> frozenset[str]:
        """The namespaces of the built-in tools."""
        return frozenset(self.hosts)

    @property
    def labels(self) -> frozenset[str]:
        """The labels of the operator's MCP servers, and of the hosts of the operator's own."""
        return self.mcp.labels | self.own.keys()

    def usable(self, owner: str, of_model: frozenset[str] | None = None) -> frozenset[str]:
        """Return the namespaces of the built-in tools that an owner may use with a model, whose tools are these."""
        return self.namespaces - self.denied(owner, of_model)

    def denied(self, owner: str, of_model: frozenset[str] | None = None) -> frozenset[str]:
        """Return the built-in tools, by namespace, and those of the operator's own that an owner may not use.

        The model may use those of ``of_model``, or all if that is None.
        """
        known = frozenset(kinds()).union(self.own)
        may_use = (tools for tools in (self.access.of(owner), of_model) if tools is not None)
        return known - known.intersection(*may_use)

    def own_host(self, server: McpServer) -> OwnHost | None:
        """Return the host of the operator's own that a request names as a server; None if it names another server."""
        return self.own.get(server.configured_as) if server.url is None else None

    async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
        """List the tools of a server, within ``seconds``; raises `ServerUnavailable`."""
        host = self.own_host(server)
        return await self.mcp.tools(server, seconds) if host is None else host.functions

    async def check(self, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest` for a request that a host of its built-in tools cannot serve."""
        for host in self._checking:
            await host.check(request)

    @cached_property
    def _checking(self) -> Sequence[Checking]:
        return [host for host in self.hosts.values() if isinstance(host, Checking)]

    async def close(self) -> None:
        """Close all hosts and connections; log errors instead of raising them."""
        opened: tuple[McpHosts | Host, ...] = (self.mcp, *self.hosts.values(), *self.own.values())
        for host in opened:
            try:
                await host.close()
            except Exception:
                logger.exception("A host of tools could not be closed")


_Named = TypeVar("_Named", ListedTool, HostedTool)


def callable_tools(listed: Iterable[_Named]) -> Iterator[_Named]:
    """Yield the tools of a server that the model can call: those with a name that it can write, each name once."""
    names: set[str] = set()
    for tool in listed:
        if _CALLABLE.fullmatch(tool.name) and tool.name not in names:
            names.add(tool.name)
            yield tool


_CALLABLE = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""The tool names that MCP recommends; the model cannot write other names in a call."""


def bounded(text: str, longest: int) -> str:
    """Shorten a text to its head and tail: in most outputs, what matters is at either end."""
    if (left_out := len(text) - longest) <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
