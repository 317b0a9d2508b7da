"""Kinds of tools that a server can run: each is one value, which the folder of the tool holds.

A kind comes through the door: it is an entry point of the group ``penstock.kinds``.  The stages know kinds by what
their values say, and import none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from penstock.pipeline.errors import UnsupportedParameter
from penstock.pipeline.frames import CallData, HostedCallOpened, McpCallOpened, RequestFacts
from penstock.pipeline.plugins import KINDS, TOOL, WrongPlugin, installed, value_named
from penstock.pipeline.protocol.items import Program, ServedCall, ShellCall
from penstock.pipeline.protocol.params.tools import ToolParam
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool, Toolset
from penstock.pipeline.secret import plain_json


def _whole(data: CallData, include: Collection[str]) -> CallData | None:
    return data


class ReadsCall(Protocol):
    """Makes the item of a call that a client has given as a message of the model."""

    def __call__(self, name: str, text: str, suffix: str) -> ServedCall | ShellCall | Program:
        """Return the item, without an output yet; its id ends in ``suffix``."""
        ...


class ToolOptions(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The options of a tool in a request: each kind that has some has a class of its own."""

    path: str = ""
    """The place in the request that errors about them name."""

    @property
    def in_json(self) -> dict[str, Any]:
        """The options as `RequestFacts` have them; empty if they say nothing."""
        if _placeless(self) == type(self)():
            return {}
        options: dict[str, Any] = plain_json(self)
        return options

    def conflicts(self, other: ToolOptions) -> bool:
        """Return True if the other options are not the same, wherever they stand."""
        return _placeless(self) != _placeless(other)


def _placeless(options: ToolOptions) -> ToolOptions:
    return msgspec.structs.replace(options, path="")


Options = TypeVar("Options", bound=ToolOptions)


class ReadsOptions(Protocol):
    """Reads the options of a tool of a request."""

    def __call__(self, tool: ToolParam, path: str, *, by_mcp: bool) -> ToolOptions | None:
        """Return the options of the tool at ``path``, or None if it has none.

        Raises `InvalidRequest` for what nothing here would obey; ``by_mcp`` is True if a server of the operator's,
        which speaks MCP, runs the tool.
        """
        ...


def _no_options(tool: ToolParam, path: str, *, by_mcp: bool) -> ToolOptions | None:
    return None


def refuse_bound(namespace: str, path: str, key: str) -> NoReturn:
    """Raise `UnsupportedParameter` for what bounds a tool that an MCP server runs, which knows no bounds."""
    raise UnsupportedParameter(f"The server that runs {namespace} here takes no {key}.", param=f"{path}.{key}")


@dataclass(frozen=True, kw_only=True)
class ByMcp:
    """The form of a kind's calls where a server of the operator's, which speaks MCP, runs them."""

    data: Callable[[str, str | None], CallData | None] = lambda result, error: None
    """Returns the data of a call from its result and its error."""
    action: Callable[[str, Mapping[str, Any]], dict[str, Any] | None] = lambda name, arguments: None
    """Returns the action of a call to a function, from its arguments; None if the item shows none."""


@dataclass(frozen=True, kw_only=True)
class HostedKind:
    """A kind of tool: all that the stages know of it."""

    namespace: str
    """Its name in prompts and recordings: the one that gpt-oss was trained with, if it was."""
    api_type: str
    """Its type in a request, without a version; metrics have this name, too."""
    description: str
    """Its words for the model, unless its host declares it."""
    functions: tuple[FunctionTool, ...]
    """Its functions in words for the model.  One without parameters takes plain text, which its description names."""
    opened: Callable[[str], HostedCallOpened | McpCallOpened]
    """Makes the frame that opens a call, from the name of the function: that of an MCP call, if it has no item."""
    called: ReadsCall
    """Makes the item of such a call."""
    labels: tuple[str, ...] = ()
    """The labels that enable it, for an ``mcp`` tool without a connector."""
    label_of_vllm: str = ""
    """The label that enables it in vLLM, where a ``server_url`` beside it has no effect."""
    read: ReadsOptions = _no_options
    """Reads its options."""
    instructions: Callable[[Mapping[str, Any]], str] = lambda options: ""
    """Returns what its options add to the instructions of the request."""
    option: str = ""
    """The option by which an operator gives it to the server."""
    is_unasked: bool = False
    """True if coding agents declare it beside their own tools in each request, whether a server runs it or not."""
    shown: Callable[[CallData, Collection[str]], CallData | None] = _whole
    """Returns the data that the item of a call shows by the ``include`` of the request."""
    cites: bool = False
    """True if the model may cite what its calls have found."""
    describe: Callable[[Toolset], str] | None = None
    """Returns its words for the model from the tools of the request, if it calls these."""
    by_mcp: ByMcp | None = None
    """Set if an MCP server of the operator, labelled with the namespace, can run it."""

    @cached_property
    def tools(self) -> tuple[HostedTool, ...]:
        """Its functions as tools of a request."""
        return tuple(HostedTool(self.namespace, function.name) for function in self.functions)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which an operator allows it."""
        return tuple(dict.fromkeys((*(self.labels or (self.namespace,)), self.api_type)))

    def function(self, name: str) -> FunctionTool | None:
        """Return one of its own functions; None for another name: a server of the operator may offer more."""
        return next((function for function in self.functions if function.name == name), None)


class Kinds(Mapping[str, HostedKind]):
    """The kinds that are installed, by namespace.

    Those ``added`` by other packages than penstock run only if the operator names them.
    """

    def __init__(self, kinds: Collection[HostedKind], added: Collection[str] = ()) -> None:
        self._kinds = {kind.namespace: kind for kind in kinds}
        self.added = frozenset(added)

    def __getitem__(self, namespace: str) -> HostedKind:
        return self._kinds[namespace]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def offered(self, named: Collection[str]) -> tuple[str, ...]:
        """Return the kinds that a server runs if it can, where the operator has ``named`` some."""
        return tuple(name for name in self if name not in self.added or name in named)

    @cached_property
    def by_type(self) -> Mapping[str, HostedKind]:
        """The kinds by their types in a request."""
        return {kind.api_type: kind for kind in self.values()}

    @cached_property
    def by_label(self) -> Mapping[str, HostedKind]:
        """The kinds by the labels that enable them."""
        return {label: kind for kind in self.values() for label in kind.labels}

    @cached_property
    def by_name(self) -> Mapping[str, HostedKind]:
        """The kinds by the names with which an operator allows them."""
        return {name: kind for kind in self.values() for name in kind.names}

    @cached_property
    def tools(self) -> tuple[HostedTool, ...]:
        """The functions of all kinds."""
        return tuple(tool for kind in self.values() for tool in kind.tools)


@cache
def kinds() -> Kinds:
    """Return the kinds that are installed; raises `WrongPlugin` for an entry point that is none."""
    points, found = installed(KINDS), list[HostedKind]()
    for name in sorted(points):
        found.append(value_named(name, TOOL, KINDS, HostedKind))
        if found[-1].namespace != name:
            raise WrongPlugin(name, f"its kind is named {found[-1].namespace}", TOOL)
    return Kinds(found, [name for name, value in points.items() if not value.startswith("penstock.")])


def options_of(facts: RequestFacts, namespace: str, form: type[Options]) -> Options:
    """Return the options of a built-in tool in a request: the defaults of ``form`` if it gives none."""
    return msgspec.convert(facts.options.get(namespace, {}), form)


def own_function(tool: HostedTool) -> FunctionTool | None:
    """Return the function of a tool's kind, in its words for the model; None if it is one of a server's own."""
    kind = kinds().get(tool.namespace)
    return kind.function(tool.name) if kind else None


def takes_text(tool: HostedTool) -> bool:
    """Return True if the model calls a tool with plain text, such as code, and not with JSON."""
    function = own_function(tool)
    return function is not None and function.parameters is None
