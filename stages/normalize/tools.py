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

logger = logging.getLogger(__name__)

HOSTED_TOOLS = frozenset(
    {"file_search", "code_interpreter", "image_generation", "tool_search", "programmatic_tool_calling"}
)
"""Tools that OpenAI runs; beside them web_search and computer in all their versions."""

Mode: TypeAlias = Literal["auto", "required", "none"]

_as_given: TypeAdapter[given.Tool] = TypeAdapter(given.Tool)


def is_hosted(kind: str) -> bool:
    """Whether tools of this type are left out rather than refused, because clients send them unasked."""
    return kind in HOSTED_TOOLS or kind.startswith(("web_search", "computer"))


def offered(tool: given.Tool, path: str) -> tuple[Tool, ...]:
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
    """The tools of one request, while they are being read."""

    tools: dict[ToolKey, Tool] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    echo: list[dict[str, Any]] = field(default_factory=list)
    """What the response repeats of them."""
    hosted: dict[str, None] = field(default_factory=dict)

    def add(self, tool: given.Tool, path: str, *, replacing: bool = False) -> None:
        """Offer one more; raises `InvalidRequest` for one that a call could not tell from another."""
        in_namespace = isinstance(tool, given.NamespaceTool)
        for position, one in enumerate(offered(tool, path)):
            if not replacing and tool_key(one) in self.tools:
                place = f"{path}.tools[{position}]" if in_namespace else path
                raise InvalidRequest(f"There are two tools named {one.name!r}.", param=f"{place}.name")
            self.tools[tool_key(one)] = one
        if isinstance(tool, given.NamespaceTool) and tool.description:
            self.descriptions[tool.name] = tool.description
        if isinstance(tool, given.OtherTool):
            self.hosted[tool.type] = None

    async def add_later(self, items: Iterable[Item], pace: Pace) -> None:
        """Offer the tools that were added within the conversation; a later one replaces its namesake."""
        for item in items:
            await pace()
            for tool in item.tools if isinstance(item, AdditionalTools) else ():
                await pace()
                self.add(_as_given.validate_python(tool), "input", replacing=True)
        if self.hosted:
            kinds = shortened(", ".join(self.hosted))
            logger.info("Ignored the hosted tools %s: this server has no means to run them", kinds)

    def toolset(self, request: CreateResponse) -> Toolset:
        """All of them, and what ``tool_choice`` makes of them; raises `InvalidRequest` where it cannot be met."""
        mode, allowed = self._choice(request.tool_choice or "auto")
        if not (self.tools if allowed is None else allowed) and (mode == "required" or allowed is not None):
            raise _bad_choice("There is no tool that this choice lets the model call.")
        parallel = request.parallel_tool_calls is not False
        return Toolset(tuple(self.tools.values()), mode, allowed, parallel, self.descriptions)

    def _choice(self, choice: given.ToolChoice) -> tuple[Mode, tuple[ToolKey, ...] | None]:
        match choice:
            case "auto" | "none" | "required":
                return choice, None
            case given.AllowedTools():
                return choice.mode, self._allowed(choice.tools)
            case given.OnlyTool():
                return "required", self._allowed([choice])
            case given.OtherChoice(type=kind):
                raise _bad_choice(f"This server has no tool of type {shortened(kind)!r} that could be chosen.")

    def _allowed(self, choices: Sequence[given.AllowedTool]) -> tuple[ToolKey, ...]:
        """The keys of the tools that are named, each once."""
        index: dict[tuple[str, str | None], list[ToolKey]] = defaultdict(list)
        for key, tool in self.tools.items():
            index["function" if isinstance(tool, FunctionTool) else "custom", tool.name].append(key)
            index["namespace", tool.namespace].append(key)
        allowed = dict[ToolKey, None]()
        for choice in dict.fromkeys(choices):
            allowed |= dict.fromkeys(_chosen(choice, index))
        return tuple(allowed)


def _chosen(choice: given.AllowedTool, index: Mapping[tuple[str, str | None], list[ToolKey]]) -> Iterable[ToolKey]:
    if isinstance(choice, given.OtherChoice):
        if is_hosted(choice.type):
            return ()
        raise _bad_choice(f"This server has no tools of type {shortened(choice.type)!r}.")
    found = index.get((choice.type, choice.name), [])
    if isinstance(choice, given.ChosenTool):
        exact = [key for key in found if key == (choice.namespace, choice.name)]
        found = exact or (found if choice.namespace is None else [])
    if not found:
        raise _bad_choice(f"There is no {choice.type} tool named {shortened(choice.name)!r}.")
    return found


async def read_tools(tools: Sequence[given.Tool], pace: Pace) -> Offer:
    """The tools that a request brings itself."""
    offer = Offer()
    for position, tool in enumerate(tools):
        await pace()
        offer.add(tool, f"tools[{position}]")
        if not isinstance(tool, given.OtherTool):
            offer.echo.append(_echo(tool))
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


def _bad_choice(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")
