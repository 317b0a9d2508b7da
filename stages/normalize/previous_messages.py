"""``previous_input_messages``: convert Harmony messages, as ``enable_response_messages`` returns them, back into items.

Messages of the Chat Completions API are read as well: those of an assistant with calls, and those of a tool.
The head of a prompt is written anew for every request.  A system message, which only the server writes, is therefore
left out.  A developer message is reduced to its instructions.  At the head, these are replaced by the instructions of
the request; if they begin with them, what follows came with the earlier input, and stays.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.hosted_kinds import kinds, takes_text
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params.items import RawMessage
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, Tool
from penstock.stages.models.harmony.vocabulary import CALL, FUNCTIONS, hosted_tools, load_encoding

_INSTRUCTIONS = "# Instructions\n\n"
_declarations = re.compile(r"(?:^|\n\n)# (?:Tools|Response Formats)\n\n## ")

_ClientCall = wire.FunctionCall | wire.CustomToolCall
_BuiltInCall = wire.CodeInterpreterCall | wire.WebSearchCall | wire.FileSearchCall | wire.ShellCall
_OpenCall = _ClientCall | _BuiltInCall | wire.McpCall | wire.Program


@dataclass
class MessageReader:
    """Read messages one after another into ``items``, whose ids end in ``suffix`` and their position.

    ``tools``, by the names that the model uses, distinguish the tools of the client.  ``tokens`` and ``results`` are
    those of the calls of built-in tools, as the model reads them: an item may hold only an equivalent.
    """

    suffix: str
    instructions: str | None
    tools: Mapping[str, Tool]
    items: list[wire.Item] = field(default_factory=list)
    tokens: dict[str, TokenIds] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    _open: dict[int, _OpenCall] = field(default_factory=dict)
    """The calls without an output, by their position in `items`."""
    _named: defaultdict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """The positions of calls by the name of the tool; some of the calls may have an output by now."""
    _by_id: dict[str, int] = field(default_factory=dict)
    """The positions of calls that have an id, as only those of the Chat Completions API do."""

    def read(self, messages: Sequence[RawMessage], then: Sequence[wire.Item]) -> tuple[wire.Item, ...]:
        """Return the items of ``messages``; the items ``then`` follow them in the input.

        Raises `InvalidRequest` for a message that no item can represent.
        """
        for position, message in enumerate(messages):
            path, suffix = f"previous_input_messages[{position}]", f"{self.suffix}p{position:04x}"
            if message.tool_calls or message.reasoning:
                self._read_chat(message, suffix, path)
            elif (item := self._item(message, suffix, path)) is not None:
                self.items.append(item)
        self._rename(then)
        return tuple(self.items)

    def _read_chat(self, message: RawMessage, suffix: str, path: str) -> None:
        """Read a message of the Chat Completions API with reasoning or calls, which are items of their own."""
        if _author(message, path)[0] != "assistant":
            raise InvalidRequest("Only a message of the assistant can have reasoning or tool_calls.", param=path)
        calls = message.tool_calls or ()
        if message.reasoning:
            self.items.append(_reasoning(message.reasoning, suffix))
        if text := _text(message, path) if message.content is not None else "":
            self.items.append(_answer(text, "commentary" if calls else "final_answer", suffix))
        for number, call in enumerate(calls):
            self._by_id[call.id] = len(self.items)
            recipient, end = f"{FUNCTIONS}.{call.function.name}", f"{suffix}{number:04x}" if number else suffix
            self.items.append(self._call(message, recipient, call.function.arguments, end, call.id))

    def _rename(self, then: Sequence[wire.Item]) -> None:
        """Give the one open call the call id of the one output in ``then`` that has no call.

        A raw call has no id, so the client's output has the id that the response gave the call.  With several open
        calls the match would be ambiguous.
        """
        with_ids = set(self._by_id.values())
        opened = {at: call for at, call in self._open.items() if at not in with_ids and isinstance(call, _ClientCall)}
        calls = {item.call_id for item in then if isinstance(item, wire.Call)}
        lone_outputs = {item.call_id for item in then if isinstance(item, wire.CallOutput)} - calls
        if len(opened) == len(lone_outputs) == 1:
            ((at, call),) = opened.items()
            self.items[at] = replace(call, call_id=lone_outputs.pop())

    def _item(self, message: RawMessage, suffix: str, path: str) -> wire.Item | None:
        text, (role, name) = _text(message, path), _author(message, path)
        match role:
            case "system":
                return None
            case "developer":
                text = self._instructions(text)
                return _client_message("developer", text, suffix) if text else None
            case "user":
                return _client_message("user", text, suffix)
            case "tool":
                return self._output(self._answered(message, name or "", path), text, suffix)
            case _:
                return self._assistant_item(message, text, suffix)

    def _instructions(self, text: str) -> str:
        instructions = _declarations.split(text, maxsplit=1)[0].removeprefix(_INSTRUCTIONS)
        if not self.items and self.instructions:
            are_repeated = f"{instructions}\n\n".startswith(f"{self.instructions}\n\n")
            instructions = instructions.removeprefix(self.instructions) if are_repeated else ""
        return instructions.strip("\n")

    def _assistant_item(self, message: RawMessage, text: str, suffix: str) -> wire.Item:
        if message.recipient and message.recipient not in ("all", "user"):
            return self._call(message, message.recipient, text, suffix)
        if message.channel == "analysis":
            return _reasoning(text, suffix)
        return _answer(text, "commentary" if message.channel == "commentary" else "final_answer", suffix)

    def _call(
        self, message: RawMessage, recipient: str, text: str, suffix: str, call_id: str | None = None
    ) -> wire.Item:
        head, _, name = recipient.rpartition(".")
        tool = self.tools.get(recipient) or self.tools.get(f"{FUNCTIONS}.{recipient}")
        is_clients = isinstance(tool, FunctionTool | CustomTool)
        call: _OpenCall
        # on commentary are calls of browser and container that the server answered with an error, as it has none
        hosted = None if is_clients else hosted_tools().get(recipient)
        if hosted and (message.channel == "analysis" or takes_text(hosted)):
            call = kinds()[hosted.namespace].called(hosted.name, text, suffix)
            header = f" to={recipient}<|channel|>analysis code<|message|>"
            self.tokens[call.id] = (*load_encoding().encode_markup(header), *load_encoding().encode(text), CALL)
        elif message.channel == "analysis" and not is_clients and self._is_built_in(head):
            call = wire.McpCall(
                wire.McpCall.new_id(suffix), server_label=head, name=name, arguments=text, status="incomplete"
            )
        else:
            namespace = tool.namespace if tool else None if head in ("", FUNCTIONS) else head
            is_custom = message.content_type == "code" or isinstance(tool, CustomTool)
            kind = wire.CustomToolCall if is_custom else wire.FunctionCall
            space = UNSET if namespace is None else namespace
            call = kind(kind.new_id(suffix), call_id or f"call_{suffix}", name, text, "completed", space)
        self._open[len(self.items)] = call
        self._named[name].append(len(self.items))
        return call

    def _is_built_in(self, namespace: str) -> bool:
        """True for a built-in tool of the request: the operator's server for it may offer functions of its own."""
        return any(isinstance(tool, HostedTool) and tool.namespace == namespace for tool in self.tools.values())

    def _output(self, at: int, text: str, suffix: str) -> wire.Item | None:
        match self._open.pop(at):
            case wire.FunctionCall(call_id=call_id):
                item_id = wire.FunctionCallOutput.new_id(suffix)
                return wire.FunctionCallOutput(item_id, call_id, text, "completed")
            case wire.CustomToolCall(call_id=call_id):
                item_id = wire.CustomToolCallOutput.new_id(suffix)
                return wire.CustomToolCallOutput(item_id, call_id, text, "completed")
            case wire.Program(call_id=call_id):
                return wire.ProgramOutput(wire.ProgramOutput.new_id(suffix), call_id, text, "completed")
            case wire.McpCall() as call:
                self.items[at] = replace(call, status="completed", output=text)
                return None
            case call:
                self.items[at] = replace(call, status="completed")
        if not isinstance(call, wire.ShellCall):
            self.results[call.id] = text
            return None
        shown = {"stdout": text, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
        output = wire.ShellCallOutput(wire.ShellCallOutput.new_id(suffix), call.call_id, (shown,), "completed")
        self.results[output.id] = text
        return output

    def _answered(self, message: RawMessage, author: str, path: str) -> int:
        """Return the position of the call that a message of the tool ``author`` answers.

        It is the call with that id, or else the first open one of that name, or else the latest open one.
        """
        if message.tool_call_id is not None:
            at = self._by_id.get(message.tool_call_id)
            if at not in self._open:
                raise InvalidRequest(
                    "The tool_call_id of this output matches no earlier call.", param=f"{path}.tool_call_id"
                )
            return at
        named = self._named[author.rpartition(".")[2]]
        while named:
            if (at := named.popleft()) in self._open:
                return at
        if not self._open:
            raise InvalidRequest("This output of a tool answers no earlier call.", param=path)
        return next(reversed(self._open))


def _client_message(role: wire.Role, text: str, suffix: str) -> wire.Message:
    return wire.Message(wire.Message.new_id(suffix), "completed", role, (wire.InputText(text),))


def _reasoning(text: str, suffix: str) -> wire.Reasoning:
    return wire.Reasoning(wire.Reasoning.new_id(suffix), content=(wire.ReasoningText(text),), status="completed")


def _answer(text: str, phase: wire.Phase, suffix: str) -> wire.Message:
    return wire.Message(
        wire.Message.new_id(suffix), status="completed", role="assistant", content=(wire.OutputText(text),), phase=phase
    )


def _author(message: RawMessage, path: str) -> tuple[str, str | None]:
    if message.author is not None:
        return message.author.role, message.author.name
    if message.role is None:
        raise InvalidRequest(
            f"Field required (at {path}.role)", param=f"{path}.role", code="missing_required_parameter"
        )
    return message.role, message.name


def _text(message: RawMessage, path: str) -> str:
    if message.content is None:
        raise InvalidRequest(
            f"Field required (at {path}.content)", param=f"{path}.content", code="missing_required_parameter"
        )
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or part.instructions or "" for part in message.content)
