"""Recipients: find the tool of the request that a call addresses, in any of the spellings that models use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from penstock.pipeline.frames import CustomToolCallOpened, ReasoningOpened
from penstock.pipeline.hosted_kinds import kinds, takes_text
from penstock.pipeline.protocol import tools
from penstock.stages.models.harmony.vocabulary import FUNCTIONS, hosted_tools, recipient_of
from penstock.stages.models.opened_calls import CallOpened, call_of
from penstock.stages.models.refusals import refusal_of
from penstock.stages.parse.parser import Opening

CONTENT_TYPES = ("json", "code", "text", "python")
"""The content types of headers.  Models sometimes append one to the recipient without a space."""

_PUNCTUATION = ".,:;!?"
_FUNCTIONS = f"{FUNCTIONS}."


class Recipients:
    """The tools of one request by recipient; a name without its namespace is accepted if it is unique."""

    def __init__(self, toolset: tools.Toolset) -> None:
        self._toolset = toolset

    # Each is computed on first use: most answers call nothing, and there may be thousands of tools.

    @cached_property
    def _callable(self) -> frozenset[tools.ToolKey]:
        return frozenset(map(tools.tool_key, self._toolset.callable))

    @cached_property
    def _served(self) -> tuple[str, ...]:
        """The prefixes of recipients, in lower case, that belong to tools run by this server."""
        named = {tool.namespace for tool in self._toolset.tools if isinstance(tool, tools.McpTool)}.union(kinds())
        return tuple(f"{namespace.lower()}." for namespace in named)

    @cached_property
    def _tools(self) -> dict[str, tools.Tool]:
        toolset = self._toolset.tools
        by_name: dict[str, tools.Tool] = {recipient_of(tool): tool for tool in toolset}
        namesakes = Counter(tool.name for tool in toolset)
        for tool in toolset:
            if tool.namespace is None or namesakes[tool.name] == 1:
                by_name.setdefault(tool.name, tool)
        return by_name

    @cached_property
    def _lowered(self) -> dict[str, tools.Tool]:
        lowered = [name.lower() for name in self._tools]
        cases = Counter(lowered)
        return {name: tool for name, tool in zip(lowered, self._tools.values(), strict=True) if cases[name] == 1}

    def knows(self, word: str) -> bool:
        """Return True for the exact name of a tool; of a hosted one the full name, as ``open`` is also a word."""
        tool = self._tools.get(word)
        return tool is not None and (not isinstance(tool, tools.HostedTool) or word == recipient_of(tool))

    def takes_any_text(self, opening: Opening) -> bool:
        """Return True for a call of a custom tool whose input has no grammar."""
        if not isinstance(opening, CustomToolCallOpened):
            return False
        key = (opening.namespace, opening.name)
        customs = (tool for tool in self._toolset.tools if isinstance(tool, tools.CustomTool))
        return any(tools.tool_key(tool) == key and tool.grammar is None for tool in customs)

    def call(self, recipient: str) -> CallOpened | ReasoningOpened:
        """Return the frame that opens a message to ``recipient``: reasoning if it is not a tool that may be called."""
        tool = self._named(recipient)
        if tool is not None and tools.tool_key(tool) in self._callable:
            return call_of(tool)
        addressed = recipient_of(tool) if tool else _built_in(recipient) or recipient
        callables = map(recipient_of, self._toolset.callable)
        return ReasoningOpened(addressed, refusal_of(addressed, callables, exists=tool is not None))

    def _named(self, recipient: str) -> tools.Tool | None:
        spellings = list(_spellings(recipient))
        names_server = any(spelling.lower().startswith(self._served) for spelling in spellings)
        if not names_server:  # "browser.search" is not a function "search"
            spellings += [spelling.rpartition(".")[2] for spelling in spellings]
        for spelling in spellings:
            tool = self._tools.get(spelling)
            if tool is None:
                tool = self._lowered.get(spelling.lower())
            if tool is not None:
                return tool
        return None


def _built_in(recipient: str) -> str | None:
    return next((spelling for spelling in map(str.lower, _spellings(recipient)) if spelling in hosted_tools()), None)


def _spellings(recipient: str) -> Iterator[str]:
    """Yield the names that a recipient may mean, the most literal first, without a suffix or a wrong namespace."""
    for spelling in (recipient, *map(recipient.removesuffix, CONTENT_TYPES)):  # "functions.get_weatherjson"
        trimmed = spelling.rstrip(_PUNCTUATION)
        yield from (spelling, trimmed, trimmed.removeprefix(_FUNCTIONS))
    for tool in kinds().tools:  # models also address Python as ``python.exec``, though it has no functions
        if takes_text(tool) and recipient.lower().startswith(f"{tool.namespace}."):
            yield tool.namespace
