"""Messages in Harmony's own terms, as ``enable_response_messages`` gives them out, back to items.

The head of a prompt is written anew for every request.  So a system message, which only the server writes, is left
out, and of a developer message its instructions are taken, as far as the request does not repeat them itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from pipeline.errors import InvalidRequest
from pipeline.protocol.body import Pace
from pipeline.protocol.given_items import RawMessage
from pipeline.protocol.items import (
    Call,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    Phase,
    Reasoning,
    ReasoningText,
)
from pipeline.protocol.tools import CustomTool, Tool, ToolKey

_INSTRUCTIONS = "# Instructions\n\n"
_declarations = re.compile(r"(?:^|\n\n)# (?:Tools|Response Formats)\n\n## ")


@dataclass
class RawMessages:
    """Reads messages one after another into ``items``, whose ids end in ``suffix`` and their position.

    ``tools`` tell which calls are calls of custom tools.
    """

    suffix: str
    instructions: str | None
    tools: Mapping[ToolKey, Tool]
    items: list[Item] = field(default_factory=list)
    _open: list[Call] = field(default_factory=list)

    async def read(self, messages: Sequence[RawMessage], pace: Pace) -> tuple[Item, ...]:
        """The items of ``messages``; raises `InvalidRequest` for what no item can say."""
        for position, message in enumerate(messages):
            await pace()
            path = f"previous_input_messages[{position}]"
            text = await _text(message, pace)
            if (item := self._item(message, text, f"{self.suffix}p{position:04x}", path)) is not None:
                self.items.append(item)
        return tuple(self.items)

    def _item(self, message: RawMessage, text: str, suffix: str, path: str) -> Item | None:
        role, name = _author(message, path)
        match role:
            case "system":
                return None
            case "developer":
                said = self._instructions(text)
                return Message(f"msg_{suffix}", "completed", "developer", (InputText(said),)) if said else None
            case "user":
                return Message(f"msg_{suffix}", "completed", "user", (InputText(text),))
            case "tool":
                return self._output(name or "", text, suffix, path)
            case _:
                return self._spoken(message, text, suffix)

    def _instructions(self, text: str) -> str:
        said = _declarations.split(text, maxsplit=1)[0].removeprefix(_INSTRUCTIONS)
        if not self.items and self.instructions:
            said = said.removeprefix(self.instructions)
        return said.strip("\n")

    def _spoken(self, message: RawMessage, text: str, suffix: str) -> Item:
        if message.recipient and message.recipient not in ("all", "user"):
            return self._call(message, message.recipient, text, suffix)
        if message.channel == "analysis":
            return Reasoning(f"rs_{suffix}", content=(ReasoningText(text),), status="completed")
        phase: Phase = "commentary" if message.channel == "commentary" else "final_answer"
        return Message(f"msg_{suffix}", "completed", "assistant", (OutputText(text),), phase)

    def _call(self, message: RawMessage, recipient: str, text: str, suffix: str) -> Call:
        head, _, name = recipient.rpartition(".")
        name = name or recipient
        namespace = head if head not in ("", "functions") else None
        said = UNSET if namespace is None else namespace
        call: Call
        if message.content_type == "code" or isinstance(self.tools.get((namespace, name)), CustomTool):
            call = CustomToolCall(f"ctc_{suffix}", f"call_{suffix}", name, text, "completed", said)
        else:
            call = FunctionCall(f"fc_{suffix}", f"call_{suffix}", name, text, "completed", said)
        self._open.append(call)
        return call

    def _output(self, author: str, text: str, suffix: str, path: str) -> Item:
        """The output of the first open call of that name, or else of the latest one."""
        if not self._open:
            raise InvalidRequest("No call comes before this output of a tool.", param=path)
        name = author.rpartition(".")[2]
        call = next((call for call in self._open if call.name == name), self._open[-1])
        self._open.remove(call)
        if isinstance(call, CustomToolCall):
            return CustomToolCallOutput(f"ctco_{suffix}", call.call_id, text, "completed")
        return FunctionCallOutput(f"fco_{suffix}", call.call_id, text, "completed")


def _author(message: RawMessage, path: str) -> tuple[str, str | None]:
    if message.author is not None:
        return message.author.role, message.author.name
    if message.role is None:
        raise InvalidRequest(f"A message has a role (at {path}.role)", param=f"{path}.role")
    return message.role, message.name


async def _text(message: RawMessage, pace: Pace) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        await pace()
        texts.append(part.text or part.instructions or "")
    return "".join(texts)
