"""Recipients: which tool of the request a call is addressed to, however the model spells its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from pipeline.frames import CustomToolCallOpened, FunctionCallOpened
from pipeline.protocol.tools import CustomTool, Tool, Toolset, tool_key
from stages.harmony import FUNCTIONS, recipient_of

CallOpened: TypeAlias = FunctionCallOpened | CustomToolCallOpened

CONTENT_TYPES = ("json", "code", "text", "python")
"""What a header calls the form of its content; models glue it to the recipient now and then."""

_PUNCTUATION = ".,:;!?"
_FUNCTIONS = f"{FUNCTIONS}."


class Recipients:
    """The tools of one request by what a header may call them; a name without its namespace counts if it is unique."""

    def __init__(self, tools: Toolset) -> None:
        self._callable = frozenset(map(tool_key, tools.callable))
        self._is_open = tools.choice != "none" and tools.allowed is None
        self._namespaces = frozenset(tool.namespace for tool in tools.tools)
        self._tools: dict[str, Tool] = {recipient_of(tool): tool for tool in tools.tools}
        namesakes = Counter(tool.name for tool in tools.tools)
        for tool in tools.tools:
            if tool.namespace is None or namesakes[tool.name] == 1:
                self._tools.setdefault(tool.name, tool)

    def knows(self, word: str) -> bool:
        """Whether ``word`` names a tool to the letter."""
        return word in self._tools

    def call(self, recipient: str) -> CallOpened | None:
        """The call that a message to ``recipient`` is; None where it is to no tool, or to one that is forbidden.

        Where nothing limits the choice, a function that nobody declared is called as well: the client gets to see the
        name that the model made up, and can tell it so.
        """
        tool = next((self._tools[name] for name in _spellings(recipient) if name in self._tools), None)
        if tool is None:
            return self._undeclared(recipient) if self._is_open else None
        if tool_key(tool) not in self._callable:
            return None
        opened = CustomToolCallOpened if isinstance(tool, CustomTool) else FunctionCallOpened
        return opened(tool.name, tool.namespace)

    def _undeclared(self, recipient: str) -> FunctionCallOpened | None:
        if recipient.startswith(_FUNCTIONS):
            name = recipient.removeprefix(_FUNCTIONS)
            return FunctionCallOpened(name) if name else None
        namespace, _, name = recipient.rpartition(".")
        return FunctionCallOpened(name, namespace) if name and namespace in self._namespaces else None


def _spellings(recipient: str) -> Iterator[str]:
    """What a recipient may have meant, the most literal first: it has a tail, or another namespace."""
    for spelled in (recipient, *map(recipient.removesuffix, CONTENT_TYPES)):  # "functions.get_weatherjson"
        trimmed = spelled.rstrip(_PUNCTUATION)
        yield from (spelled, trimmed, trimmed.removeprefix(_FUNCTIONS), trimmed.rpartition(".")[2])
