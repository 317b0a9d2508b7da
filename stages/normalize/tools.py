"""Tools: from what clients write to what the model may call."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from pipeline.errors import InvalidRequest, UnsupportedParameter
from pipeline.protocol import given_tools as given
from pipeline.protocol.body import Pace, shortened
from pipeline.protocol.items import AdditionalTools, Item
from pipeline.protocol.request import CreateResponse
from pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, Tool, ToolKey, Toolset, tool_key
from stages.harmony import FUNCTIONS, recipient_of

logger = logging.getLogger(__name__)

HOSTED_TOOLS = frozenset(
    {"file_search", "code_interpreter", "image_generation", "tool_search", "programmatic_tool_calling"}
)
"""Tools that OpenAI runs; beside them web_search and computer in all their versions."""

_Groups: TypeAlias = Mapping[tuple[str, str | None], Sequence[ToolKey]]
"""Tools by their type and name, and by "namespace" and that of their namespace."""

Mode: TypeAlias = Literal["auto", "required", "none"]

_as_given: TypeAdapter[given.Tool] = TypeAdapter(given.Tool)


def is_hosted(kind: str) -> bool:
    """Whether tools of this type are left out rather than refused, because clients send them unasked."""
    return kind in HOSTED_TOOLS or kind.startswith(("web_search", "computer"))


def _offered(tool: given.Tool, path: str) -> tuple[Tool, ...]:
    """What the model may call of one tool of a body, which stands at ``path``; nothing, if it is hosted.

    Raises `UnsupportedParameter` for a tool that its client relies on, and that nobody runs here.
    """
    match tool:
        case given.FunctionTool() | given.CustomTool():
            return (_tool(tool, None),)
        case given.NamespaceTool():
            return tuple(_tool(inner, tool.name) for inner in tool.tools)
        case given.OtherTool(type=kind) if is_hosted(kind):
            return ()
        case given.OtherTool(type=kind):
            raise UnsupportedParameter(
                f"This server does not support tools of type {shortened(kind)!r}.", param=f"{path}.type"
            )


@dataclass
class Offer:
    """The tools of one request, while they are being read: its own first, then those that the conversation adds."""

    tools: dict[str, Tool] = field(default_factory=dict)
    """By what the model calls them: a tool that stands alone and one of a namespace ``functions`` are namesakes."""
    descriptions: dict[str, str] = field(default_factory=dict)
    echo: list[dict[str, Any]] = field(default_factory=list)
    """What the response repeats of them."""
    hosted: dict[str, None] = field(default_factory=dict)

    def add(self, tool: given.Tool, path: str) -> None:
        """Offer one of the request's own; raises `InvalidRequest` for one that a call could not tell from another."""
        in_namespace = isinstance(tool, given.NamespaceTool)
        for position, one in enumerate(_offered(tool, path)):
            if recipient_of(one) in self.tools:
                place = f"{path}.tools[{position}]" if in_namespace else path
                raise InvalidRequest(f"There are two tools named {one.name!r}.", param=f"{place}.name")
            self.tools[recipient_of(one)] = one
        self._note(tool)
        if not isinstance(tool, given.OtherTool):
            self.echo.append(_echo(tool))

    def add_later(self, tool: given.Tool, path: str) -> None:
        """Offer one that an item at ``path`` brings: it replaces its namesakes."""
        self.tools |= {recipient_of(one): one for one in _offered(tool, path)}
        self._note(tool)

    async def add_stored(self, item: AdditionalTools, path: str, pace: Pace) -> None:
        """Offer those of an item that was read before, and is stored as it came."""
        for position, tool in enumerate(item.tools):
            await pace()
            self.add_later(_as_given.validate_python(tool), f"{path}.tools[{position}]")

    async def inherit(self, history: Iterable[Item], pace: Pace) -> None:
        """Offer what items of the history bring; the request's own tools replace their namesakes among these.

        They keep their place ahead of them, though: the prompt of the turn that brought them began in this order, and
        one that begins like it is read from the cache.
        """
        tools, descriptions = self.tools.copy(), self.descriptions.copy()
        for item in history:
            await pace()
            if isinstance(item, AdditionalTools):
                await self.add_stored(item, "previous_response_id", pace)  # nothing in it is wrong: it was taken once
        self.tools |= tools
        self.descriptions |= descriptions

    def _note(self, tool: given.Tool) -> None:
        if isinstance(tool, given.NamespaceTool) and tool.description:
            self.descriptions[tool.name] = tool.description
        if isinstance(tool, given.OtherTool):
            self.hosted[tool.type] = None

    async def toolset(self, request: CreateResponse, pace: Pace) -> Toolset:
        """All of them, and what ``tool_choice`` makes of them; raises `InvalidRequest` where it cannot be met."""
        if self.hosted:
            kinds = shortened(", ".join(self.hosted))
            logger.info("Ignored the hosted tools %s: this server has no means to run them", kinds)
        mode, allowed = await self._choice(request.tool_choice or "auto", pace)
        if mode == "required" and not (self.tools if allowed is None else allowed):
            raise _bad_choice("There is no tool that this choice lets the model call.")
        if allowed == ():  # all that it names is hosted
            mode, allowed = "none", None
        parallel = request.parallel_tool_calls is not False
        return Toolset(tuple(self.tools.values()), mode, allowed, parallel, self.descriptions)

    async def _choice(self, choice: given.ToolChoice, pace: Pace) -> tuple[Mode, tuple[ToolKey, ...] | None]:
        match choice:
            case "auto" | "none" | "required":
                return choice, None
            case given.AllowedTools():
                return choice.mode, await self._allowed(choice.tools, pace)
            case given.OnlyTool():
                return "required", await self._allowed([choice], pace)
            case given.OtherChoice(type=kind):
                raise _bad_choice(f"This server has no tool of type {shortened(kind)!r} that could be chosen.")

    async def _allowed(self, choices: Sequence[given.AllowedTool], pace: Pace) -> tuple[ToolKey, ...]:
        """The keys of the tools that are named, each once."""
        groups = defaultdict[tuple[str, str | None], list[ToolKey]](list)
        for tool in self.tools.values():
            await pace()
            groups[_kind(tool), tool.name].append(tool_key(tool))
            groups["namespace", tool.namespace].append(tool_key(tool))
        allowed = dict[ToolKey, None]()
        for choice in dict.fromkeys(choices):
            await pace()
            allowed |= dict.fromkeys(self._chosen(choice, groups))
        return tuple(allowed)

    def _chosen(self, choice: given.AllowedTool, groups: _Groups) -> Sequence[ToolKey]:
        match choice:
            case given.OtherChoice(type=kind) if is_hosted(kind):
                return ()
            case given.OtherChoice(type=kind):
                raise _bad_choice(f"This server has no tools of type {shortened(kind)!r}.")
            case given.ChosenTool():
                found = self._named(choice, groups)
            case given.ChosenNamespace():
                found = groups.get((choice.type, choice.name), ())
        if not found:
            raise _bad_choice(f"There is no {choice.type} tool named {shortened(choice.name)!r}.")
        return found

    def _named(self, choice: given.ChosenTool, groups: _Groups) -> Sequence[ToolKey]:
        tool = self.tools.get(f"{choice.namespace or FUNCTIONS}.{choice.name}")
        if tool is not None and _kind(tool) == choice.type:
            return (tool_key(tool),)
        return groups.get((choice.type, choice.name), ()) if choice.namespace is None else ()


async def read_tools(tools: Sequence[given.Tool], pace: Pace) -> Offer:
    """The tools that a request brings itself."""
    offer = Offer()
    for position, tool in enumerate(tools):
        await pace()
        offer.add(tool, f"tools[{position}]")
    return offer


def _echo(tool: given.FunctionTool | given.CustomTool | given.NamespaceTool) -> dict[str, Any]:
    """What a response repeats; of a function exactly the keys that strict readers of responses know, and need."""
    if isinstance(tool, given.NamespaceTool):
        return tool.given | {"description": tool.description or ""}
    return dict(tool) if isinstance(tool, given.FunctionTool) else tool.given


def _tool(tool: given.FunctionTool | given.CustomTool, namespace: str | None) -> Tool:
    match tool:
        case given.FunctionTool():
            return FunctionTool(tool.name, tool.description, tool.parameters, tool.strict, namespace)
        case given.CustomTool(format=given.GrammarFormat() as said):
            return CustomTool(tool.name, tool.description, Grammar(said.syntax, said.definition), namespace)
        case given.CustomTool():
            return CustomTool(tool.name, tool.description, None, namespace)


def _kind(tool: Tool) -> str:
    return "function" if isinstance(tool, FunctionTool) else "custom"


def _bad_choice(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")
