"""The search for deferred tools: this server makes it, over their names, descriptions and parameters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.pipeline.frames import LoadedTools
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, McpServer, Tool, Toolset
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.tools import ToolResult, bounded

SEARCH_NAMESPACE = "functions"
"""The namespace of the search; clients' functions are in it as well, but this server runs no call of those."""

MOST_FOUND = 8
"""The most tools that one search loads."""

MOST_CHARACTERS = 8_000
"""The most characters of the description of the search."""

SEARCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tools should do, in a few words."}},
    "required": ["query"],
    "additionalProperties": False,
}
"""The schema of the arguments."""

_ABOUT = "Searches for tools that are not loaded yet, and loads those that match. They can be called from then on."
_LISTED = "It can load tools of these kinds and names:"

_NAME_WEIGHT = 3.0
"""The weight of a word in a name, beside one in a description or a parameter."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")


class _Arguments(msgspec.Struct):
    query: str


@dataclass(frozen=True)
class ToolSearch:
    """The session of the search; ``tools`` returns the tools of the next turn."""

    tools: Callable[[], Toolset]

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Return the deferred tools that match best, in their wire form."""
        try:
            query = msgspec.json.decode(text, type=_Arguments).query
        except (msgspec.DecodeError, RecursionError) as error:
            message = f"The arguments do not have the form that the tool takes: {error}"
            return ToolResult(message, message, LoadedTools(()))
        tools = self.tools()
        found = await apart(len(tools.deferred or ()) > MANY_VALUES, matches, query, tools)
        if not found:
            return ToolResult("No tool that is not loaded yet matches. Try other words.", data=LoadedTools(()))
        return ToolResult(data=LoadedTools(wire_form(found, tools.descriptions)))

    async def close(self) -> None:
        """Do nothing."""


def matches(query: str, tools: Toolset) -> tuple[Tool, ...]:
    """Return the deferred tools that may be called and match a query, the best first.

    A rare word counts more than a frequent one, and a word of a name more than one of a description.
    """
    allowed = msgspec.structs.replace(tools, tools=tools.deferred or (), choice="auto").callable
    weights = [_weights(tool) for tool in allowed]
    frequencies = Counter(word for words in weights for word in words)
    wanted = {word: math.log(1 + len(allowed) / frequencies[word]) for word in _words(query) if word in frequencies}
    scores = [sum(words.get(word, 0.0) * rarity for word, rarity in wanted.items()) for words in weights]
    best = sorted(range(len(allowed)), key=lambda at: -scores[at])[:MOST_FOUND]
    return tuple(allowed[at] for at in best if scores[at] * 4 > scores[best[0]])


def _weights(tool: Tool) -> Mapping[str, float]:
    parameters = {} if isinstance(tool, CustomTool) else tool.parameters or {}
    properties = parameters.get("properties")
    described = [tool.description or "", *(properties if isinstance(properties, dict) else ())]
    weights = dict.fromkeys((word for text in described for word in _words(text)), 1.0)
    return weights | dict.fromkeys(_words(f"{tool.namespace or ''} {tool.name}"), _NAME_WEIGHT)


def _words(text: str) -> Iterator[str]:
    """Yield the words of a text or a name in lower case, and in the singular."""
    for word in _WORD.findall(text):
        lowered = word.lower()
        yield lowered[:-1] if len(lowered) > 3 and lowered.endswith("s") else lowered


def wire_form(tools: Iterable[Tool], descriptions: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """Return tools as the item of a search shows them, with those of a namespace in one tool."""
    shown = dict[str | None, list[dict[str, Any]]]()
    for tool in tools:
        shown.setdefault(tool.namespace, []).append(_shown(tool))
    return tuple(
        {"type": "namespace", "name": namespace, "description": descriptions.get(namespace, ""), "tools": members}
        for namespace, members in shown.items()
        if namespace is not None
    ) + tuple(shown.get(None, ()))


def _shown(tool: Tool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        grammar = tool.grammar
        form = {"type": "grammar", "syntax": grammar.syntax, "definition": grammar.definition} if grammar else None
        declared = {"type": "custom", "name": tool.name, "description": tool.description or "", "defer_loading": True}
        return declared | ({"format": form} if form else {})
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict if isinstance(tool, FunctionTool) else None,
        "defer_loading": True,
    }


def search_tool(
    deferred: Iterable[Tool], descriptions: Mapping[str, str], servers: Iterable[McpServer]
) -> FunctionTool:
    """Return the search as the model sees it.  Its description names all that there is to find, loaded or not.

    So it stays the same from turn to turn, and with it the beginning of the prompt.
    """
    about = {server.label: server.description or "" for server in servers}
    names = list[str]()
    for tool in deferred:
        if tool.namespace is None:
            names.append(tool.name)
        else:
            about.setdefault(tool.namespace, descriptions.get(tool.namespace, ""))
    lines = [
        f"- {namespace}: {description}" if description else f"- {namespace}" for namespace, description in about.items()
    ]
    listed = "\n".join((*lines, *(f"- {name}" for name in names)))
    return FunctionTool(
        "tool_search",
        bounded(f"{_ABOUT}\n\n{_LISTED}\n{listed}" if listed else _ABOUT, MOST_CHARACTERS),
        SEARCH_PARAMETERS,
        strict=True,
        form="tool_search",
    )
