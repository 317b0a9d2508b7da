"""``previous_input_messages``: convert Harmony messages, as ``enable_response_messages`` returns them, back into items.

The head of a prompt is written anew for every request.  A system message, which only the server writes, is therefore
left out.  A developer message is reduced to its instructions; instructions that the request repeats are left out too.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params.items import RawMessage
from penstock.pipeline.protocol.tools import CustomTool, Tool
from penstock.stages.models.harmony.vocabulary import FUNCTIONS

_INSTRUCTIONS = "# Instructions\n\n"
_declarations = re.compile(r"(?:^|\n\n)# (?:Tools|Response Formats)\n\n## ")


@dataclass
class MessageReader:
    """Read messages one after another into ``items``, whose ids end in ``suffix`` and their position.

    ``tools``, by the names that the model uses, distinguish calls to custom tools from calls to functions.
    """

    suffix: str
    instructions: str | None
    tools: Mapping[str, Tool]
    items: list[wire.Item] = field(default_factory=list)
    _open: dict[str, wire.Call] = field(default_factory=dict)
    """The calls without an output, by call id."""
    _named: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(deque))
    """The ids of calls by the name of the tool; some of the calls may have an output by now."""

    def read(self, messages: Sequence[RawMessage], then: Sequence[wire.Item]) -> tuple[wire.Item, ...]:
        """Return the items of ``messages``; the items ``then`` follow them in the input.

        Raises `InvalidRequest` for a message that no item can represent.
        """
        for position, message in enumerate(messages):
            path = f"previous_input_messages[{position}]"
            if (item := self._item(message, f"{self.suffix}p{position:04x}", path)) is not None:
                self.items.append(item)
        if len(self._open) == 1:
            self._rename(self._open.popitem()[1], then)
        return tuple(self.items)

    def _rename(self, call: wire.Call, then: Sequence[wire.Item]) -> None:
        """Give the one open call the call id of the one output in ``then`` that has no call.

        A raw call has no id, so the client's output has the id that the response gave the call.  With several open
        calls the match would be ambiguous.
        """
        calls = {item.call_id for item in then if isinstance(item, wire.Call)}
        lone_outputs = {item.call_id for item in then if isinstance(item, wire.CallOutput)} - calls
        if len(lone_outputs) == 1:
            self.items[self.items.index(call)] = replace(call, call_id=lone_outputs.pop())

    def _item(self, message: RawMessage, suffix: str, path: str) -> wire.Item | None:
        text, (role, name) = _text(message), _author(message, path)
        match role:
            case "system":
                return None
            case "developer":
                text = self._instructions(text)
                return _client_message("developer", text, suffix) if text else None
            case "user":
                return _client_message("user", text, suffix)
            case "tool":
                return self._output(name or "", text, suffix, path)
            case _:
                return self._assistant_item(message, text, suffix)

    def _instructions(self, text: str) -> str:
        instructions = _declarations.split(text, maxsplit=1)[0].removeprefix(_INSTRUCTIONS)
        if not self.items and self.instructions and f"{instructions}\n\n".startswith(f"{self.instructions}\n\n"):
            instructions = instructions.removeprefix(self.instructions)
        return instructions.strip("\n")

    def _assistant_item(self, message: RawMessage, text: str, suffix: str) -> wire.Item:
        if message.recipient and message.recipient not in ("all", "user"):
            return self._call(message, message.recipient, text, suffix)
        if message.channel == "analysis":
            return wire.Reasoning(
                wire.Reasoning.new_id(suffix), content=(wire.ReasoningText(text),), status="completed"
            )
        phase: wire.Phase = "commentary" if message.channel == "commentary" else "final_answer"
        return wire.Message(wire.Message.new_id(suffix), "completed", "assistant", (wire.OutputText(text),), phase)

    def _call(self, message: RawMessage, recipient: str, text: str, suffix: str) -> wire.Call:
        head, _, name = recipient.rpartition(".")
        name, head = (name, head or FUNCTIONS) if name else (recipient, FUNCTIONS)
        tool = self.tools.get(f"{head}.{name}")
        namespace = tool.namespace if tool else None if head == FUNCTIONS else head
        namespace_field = UNSET if namespace is None else namespace
        call: wire.Call
        if message.content_type == "code" or isinstance(tool, CustomTool):
            call = wire.CustomToolCall(
                wire.CustomToolCall.new_id(suffix), f"call_{suffix}", name, text, "completed", namespace_field
            )
        else:
            call = wire.FunctionCall(
                wire.FunctionCall.new_id(suffix), f"call_{suffix}", name, text, "completed", namespace_field
            )
        self._open[call.call_id] = call
        self._named[name].append(call.call_id)
        return call

    def _output(self, author: str, text: str, suffix: str, path: str) -> wire.Item:
        call = self._answered(author.rpartition(".")[2])
        if call is None:
            raise InvalidRequest("No call comes before this output of a tool.", param=path)
        if isinstance(call, wire.CustomToolCall):
            return wire.CustomToolCallOutput(wire.CustomToolCallOutput.new_id(suffix), call.call_id, text, "completed")
        return wire.FunctionCallOutput(wire.FunctionCallOutput.new_id(suffix), call.call_id, text, "completed")

    def _answered(self, name: str) -> wire.Call | None:
        """Remove and return the first open call of that name, or else the latest open call, or None."""
        named = self._named[name]
        while named:
            if (call := self._open.pop(named.popleft(), None)) is not None:
                return call
        return self._open.popitem()[1] if self._open else None


def _client_message(role: wire.Role, text: str, suffix: str) -> wire.Message:
    return wire.Message(wire.Message.new_id(suffix), "completed", role, (wire.InputText(text),))


def _author(message: RawMessage, path: str) -> tuple[str, str | None]:
    if message.author is not None:
        return message.author.role, message.author.name
    if message.role is None:
        raise InvalidRequest(f"A message needs a role (at {path}.role)", param=f"{path}.role")
    return message.role, message.name


def _text(message: RawMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or part.instructions or "" for part in message.content)
