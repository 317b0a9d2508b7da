"""The items of a conversation that the messages of a client become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.extensions.dialects.messages.blocks import (
    AssistantBlock,
    AssistantTurn,
    Base64Source,
    Citations,
    CodeExecutionToolResultBlock,
    CompactionBlock,
    ContentSource,
    DocumentBlock,
    FileSource,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    SystemTurn,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
    UserBlock,
    UserTurn,
)
from penstock.extensions.dialects.messages.compaction import in_place
from penstock.extensions.dialects.messages.errors import not_permitted
from penstock.extensions.dialects.messages.places import Block, Places
from penstock.extensions.dialects.messages.tools import Offer
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.tools import SentTool, ToolParam
from penstock.pipeline.protocol.response import Effort
from penstock.services.file_marks import marks

BILLING = "x-anthropic-billing-header"
"""The beginning of a block of Claude Code's that changes from request to request, and would end the prefix cache."""


def instructions(system: str | Sequence[TextBlock]) -> str:
    """Return the text of system blocks, without what changes from request to request."""
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system if not block.text.startswith(BILLING))


# Ids and arguments of calls

_OWN_ID = re.compile(r"toolu_(?P<key>[0-9a-f]{36})(?P<compact>c?)")


def tool_use_id(item: wire.FunctionCall, *, compact: bool) -> str:
    """Return the id by which a client knows a call; it tells whether the arguments are ``compact``: without spaces."""
    return f"toolu_{item.call_id.removeprefix('call_')}{'c' * compact}"


def held_call_id(call_id: str) -> str:
    """Return the id of a call of this server's in the store, by that of `tool_use_id`."""
    own = _OWN_ID.fullmatch(call_id)
    return f"call_{own['key']}" if own else call_id


_OWN_RUN = re.compile(r"srvtoolu_(?P<key>[0-9a-f]{36})")
_OWN_PROGRAM = re.compile(r"srvtoolu_(?P<key>[0-9a-f]{36})p")
OWN_CONTAINER = re.compile(r"container_[0-9a-f]{36}")
"""The form of the ids of `container_id`."""


def server_tool_use_id(item: wire.WebSearchCall | wire.CodeInterpreterCall) -> str:
    """Return the id by which a client knows a call that this server ran."""
    return f"srvtoolu_{item.id.removeprefix(f'{item.id_prefix}_')}"


def program_use_id(call_id: str) -> str:
    """Return the id by which a client knows a program that calls tools; it tells that the program does."""
    return f"srvtoolu_{call_id.removeprefix('call_')}p"


def container_id(call_id: str) -> str:
    """Return the id of the container of a program, which is its own."""
    return f"container_{call_id.removeprefix('call_')}"


def _program_call_id(use_id: str | None) -> str:
    """Return the id of the call of a program by that of `program_use_id`; empty for another one."""
    own = _OWN_PROGRAM.fullmatch(use_id or "")
    return f"call_{own['key']}" if own else ""


def _program(block: ServerToolUseBlock) -> wire.Program | None:
    """Return the program of a block; None if it calls no tools, or another server ran it."""
    match block.name, block.input:
        case "code_execution", {"code": str(code)} if call_id := _program_call_id(block.id):
            item_id = wire.Program.new_id(call_id.removeprefix("call_"))
            return wire.Program(item_id, call_id=call_id, code=code, fingerprint=wire.fingerprint_of(code))
        case _:
            return None


def _program_output(call_id: str, result: Any) -> wire.ProgramOutput:
    """Return the output of a program by the content of its block."""
    match result:
        case {"type": "code_execution_result", "stdout": str(written), "return_code": 0}:
            return wire.ProgramOutput("", call_id, written, "completed")
        case {"stdout": str(written)}:
            return wire.ProgramOutput("", call_id, written, "incomplete")
        case {"error_code": str(code)}:
            return wire.ProgramOutput("", call_id, code, "incomplete")
        case _:
            return wire.ProgramOutput("", call_id, "", "incomplete")


def _ran(
    block: ServerToolUseBlock, results: Mapping[str, Any], caller: wire.Caller | UnsetType
) -> Iterator[params.InputItem]:
    """Yield the call of a block, with its result; none for a call of another server."""
    own, result = _OWN_RUN.fullmatch(block.id), results.get(block.id)
    match block.name, block.input:
        case "web_search", {"query": str(query)} if own:
            urls = [page.get("url") for page in result if isinstance(page, dict)] if isinstance(result, list) else []
            sources = [{"type": "url", "url": url} for url in urls if isinstance(url, str)]
            yield _searched(own["key"], {"type": "search", "query": query, "sources": sources}, result, caller)
        case "web_search", {"url": str(url), "pattern": str(pattern)} if own:
            yield _searched(own["key"], {"type": "find_in_page", "url": url, "pattern": pattern}, result, caller)
        case "web_search", {"url": str(url)} if own:
            yield _searched(own["key"], {"type": "open_page", "url": url}, result, caller)
        case "code_execution", {"code": str(code)} if own:
            written = result.get("stdout") if isinstance(result, dict) else None
            outputs = ({"type": "logs", "logs": written},) if isinstance(written, str) else ()
            has_failed = isinstance(result, dict) and bool(result.get("return_code"))
            yield wire.CodeInterpreterCall(
                wire.CodeInterpreterCall.new_id(own["key"]),
                code=code,
                container_id="",
                status="failed" if has_failed else "completed",
                outputs=outputs,
            )
        case _:
            pass


def _searched(key: str, action: dict[str, Any], result: Any, caller: wire.Caller | UnsetType) -> wire.WebSearchCall:
    """Return a search of the web, or what was done with a page that it found; the result of a failure is an object."""
    status: wire.CallStatus = "failed" if isinstance(result, dict) else "completed"
    return wire.WebSearchCall(wire.WebSearchCall.new_id(key), status=status, action=action, caller=caller)


def _called(block: ToolUseBlock, caller: wire.Caller | UnsetType) -> wire.FunctionCall:
    """Return the call of a block, in the spelling that the model gave it, as far as its id tells."""
    own = _OWN_ID.fullmatch(block.id)
    separators = (",", ":") if own and own["compact"] else (", ", ": ")
    arguments = json.dumps(block.input, ensure_ascii=False, separators=separators)
    item_id = wire.FunctionCall.new_id(own["key"]) if own else ""
    return wire.FunctionCall(
        item_id, call_id=block.id, name=block.name, arguments=arguments, status="completed", caller=caller
    )


# Conversations


class Conversation:
    """The items of a list of messages, and where each came from.

    A result that refers to deferred tools of the ``offer`` loads them: they are an item after it.  If the last message
    is the assistant's, the model continues its text.  The model reads only the thoughts of the last ``thinking_turns``
    of its messages that have some; None stands for all.  If it ``is_continued``, the server holds the messages before
    these, and results may be those of its last calls.
    """

    def __init__(
        self,
        messages: Sequence[Turn],
        thinking_turns: int | None = None,
        offer: Offer | None = None,
        *,
        is_continued: bool = False,
    ) -> None:
        self.items: list[params.InputItem] = []
        self.places = Places()
        """The places of the items in the body."""
        self._blocks: Sequence[Block] = ()
        """The blocks of the parts of the item that is being read."""
        self.effort: Effort | None = None
        """The effort that the latest message with one asks for."""
        self.offer = offer or Offer(())
        self._loaded: list[ToolParam] = []
        """The tools that the results of the latest message have loaded."""
        self._is_continued = is_continued
        self._held: set[str] = set()
        """The ids of the calls that only the server has; `normalize` refuses those that it does not know."""
        self._open_calls: dict[str, str] = {}
        """The places of the messages with calls that have no result yet, by the ids of the calls."""
        self._programs: set[str] = set()
        """The ids of the calls of the programs that call tools."""
        self._callers: dict[str, wire.Caller | UnsetType] = {}
        """The callers of the calls, by the ids of the calls."""
        start, messages = _since_summary(messages)
        cleared = frozenset(_thinking(messages)[:-thinking_turns] if thinking_turns else ())
        last_of_user = max((at for at, message in enumerate(messages) if isinstance(message, UserTurn)), default=0)
        for position, message in islice(enumerate(messages), start, None):
            _check_options(message, f"messages[{position}]")
            self._pair(message, f"messages[{position}]")
            if isinstance(message, UserTurn):
                self._check_answers(message, f"messages[{position}]")
            if isinstance(message, SystemTurn):
                is_read = message.clear_at != "next_user_message" or position > last_of_user
                items = self._of_system(message, f"messages[{position}]", is_read=is_read)
            else:
                items = self._items(message, f"messages[{position}]", is_last=position == len(messages) - 1)
            for item in items:
                if not (position in cleared and isinstance(item, wire.Reasoning)):
                    self.items.append(item)
                    self.places.add(position, self._blocks)
        if messages and not self.items:
            raise InvalidRequest("messages: at least one message needs content", param="messages", code="invalid_value")
        for call_id, place in self._open_calls.items():
            found = f"`tool_use` ids were found without `tool_result` blocks immediately after: {shortened(call_id)}"
            raise _refusal(found, place)

    @property
    def has_open_program(self) -> bool:
        """True if a program has not ended: it goes on before the model does."""
        ended = {item.call_id for item in self.items if isinstance(item, wire.ProgramOutput)}
        return not self._programs <= ended

    def _pair(self, message: Turn, place: str) -> None:
        """Raise `InvalidRequest` for a result without a call before it, and for two open calls with the same id.

        The errors begin as Anthropic's do: clients recognize them.
        """
        for position, block in enumerate(() if isinstance(message.content, str) else message.content):
            at = f"{place}.content[{position}]"
            match block:
                case ServerToolUseBlock() if program := _program(block):
                    self._programs.add(program.call_id)
                case ToolUseBlock(id=call_id):
                    if call_id in self._open_calls:
                        raise _refusal("`tool_use` ids must be unique", f"{at}.id")
                    self._open_calls[call_id] = place
                    self._callers[call_id] = self._caller(block)
                case ToolResultBlock(tool_use_id=call_id) if call_id in self._open_calls:
                    del self._open_calls[call_id]
                case ToolResultBlock(tool_use_id=call_id) if self._is_continued:
                    self._held.add(call_id)
                case ToolResultBlock(tool_use_id=call_id):
                    found = f"unexpected `tool_use_id` found in `tool_result` blocks: {shortened(call_id)}"
                    raise _refusal(found, f"{at}.tool_use_id")
                case _:
                    pass

    def _check_answers(self, message: UserTurn, place: str) -> None:
        """Raise `InvalidRequest` for a message that answers calls of programs, and has anything else."""
        blocks = () if isinstance(message.content, str) else message.content
        answered = [block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock)]
        if not any(isinstance(self._callers.get(call_id), wire.Caller) for call_id in answered):
            return
        for position, block in enumerate(blocks):
            if not isinstance(block, ToolResultBlock):
                problem = "a message that answers calls of code execution must contain only `tool_result` blocks"
                raise _refusal(problem, f"{place}.content[{position}]")

    def _caller(self, block: ToolUseBlock | ServerToolUseBlock) -> wire.Caller | UnsetType:
        """Return the program that made a call; UNSET if the model did, or the program is not in the conversation."""
        call_id = _program_call_id(block.caller.tool_id) if block.caller else ""
        return wire.caller_named(call_id) if call_id in self._programs else UNSET

    def _of_system(self, message: SystemTurn, place: str, *, is_read: bool) -> Iterator[params.InputItem]:
        """Yield the text of a message if it ``is_read`` still, and its changes of tools, which last."""
        if message.output_config is not None and message.output_config.effort is not None:
            self.effort = message.output_config.effort
        content = (TextBlock(text=message.content),) if isinstance(message.content, str) else message.content
        if is_read and (text := instructions([block for block in content if isinstance(block, TextBlock)])):
            yield params.message("system", text)
        for position, block in enumerate(content):
            if not isinstance(block, TextBlock):
                self._blocks = [(position, None)]
                yield from self._changed(block, f"{place}.content[{position}]")
        self._blocks = ()

    def _changed(self, block: ToolAdditionBlock | ToolRemovalBlock, place: str) -> Iterator[params.InputItem]:
        match block:
            case ToolAdditionBlock(tool=tool):
                yield from self._added(tool, f"{place}.tool")
            case ToolRemovalBlock(tool=ToolReference(name=name)):
                self.offer.withdraw(name, f"{place}.tool.name")
                yield params.message("system", f"The tool {name} is not available from now on.")

    def _added(self, tool: ToolReference | ToolDefinition, path: str) -> Iterator[params.InputItem]:
        if isinstance(tool, ToolDefinition):
            yield _tools(self.offer.define(tool.definition, f"{path}.definition"))
            return
        name = self.offer.known(tool.name, f"{path}.name")
        if loaded := self.offer.load(name):
            yield _tools(loaded)
        elif name in self.offer.withdrawn:
            yield params.message("system", f"The tool {name} is available again.")
        self.offer.withdrawn.discard(name)

    def _items(self, message: UserTurn | AssistantTurn, place: str, *, is_last: bool) -> Iterator[params.InputItem]:
        for position, block in enumerate(() if isinstance(message.content, str) else message.content):
            _check_citations(block, f"{place}.content[{position}]")
            if isinstance(block, CompactionBlock) and block.content is not None:
                self._blocks = [(position, None)]
                yield params.message("user", in_place(block.content))
                for number, change in enumerate(block.tool_changes or ()):
                    yield from self._changed(change, f"{place}.content[{position}].tool_changes[{number}]")
        self._blocks = ()
        match message:
            case UserTurn(content=str(text)):
                yield params.message("user", text)
            case UserTurn(content=blocks):
                yield from self._of_user([blocks] if isinstance(blocks, str) else blocks)
            case AssistantTurn(content=str(text)):
                yield from self._written([TextBlock(text=text)], is_open=is_last)
            case AssistantTurn(content=blocks):
                yield from self._written([] if isinstance(blocks, str) else blocks, is_open=is_last)

    def _of_user(self, blocks: Sequence[Any]) -> Iterator[params.InputItem]:
        """Yield the results of a message before all else, because models expect them right after their calls."""
        for position, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                yield wire.FunctionCallOutput(
                    "",
                    call_id=held_call_id(block.tool_use_id) if block.tool_use_id in self._held else block.tool_use_id,
                    output=self._result(block, position),
                    status="incomplete" if block.is_error else "completed",
                    caller=self._callers.get(block.tool_use_id, UNSET),
                )
        self._blocks = ()
        if self._loaded:
            yield _tools(*self._loaded)
            self._loaded = []
        others = [(part, (at, None)) for at, block in enumerate(blocks) for part in _parts(block)]
        if others:
            self._blocks = [place for _, place in others]
            yield params.message("user", [part for part, _ in others])
            self._blocks = ()

    def _result(self, block: ToolResultBlock, position: int) -> str | tuple[wire.InputPart, ...]:
        content = block.content or ""
        parts = (wire.InputText(content),) if isinstance(content, str) else content
        placed = [(part, (position, at)) for at, each in enumerate(parts) for part in self._result_parts(each)]
        read = tuple(part for part, _ in placed)
        self._blocks = [place for _, place in placed]
        if block.is_error and not _names_a_failure(read):
            error = wire.InputText("Error: ")
            if read and isinstance(read[0], wire.InputText):
                read = (*wire.joined((error, read[0])), *read[1:])
            else:
                read, self._blocks = (error, *read), [(position, None), *self._blocks]
        if all(isinstance(part, wire.InputText) for part in read):
            return "\n".join(part.text for part in read if isinstance(part, wire.InputText))
        return read

    def _result_parts(self, block: Any) -> Iterator[wire.InputPart]:
        match block:
            case wire.InputText():
                yield block
            case ToolReferenceBlock(tool_name=name):
                if tool := self.offer.load(name):
                    self._loaded.append(tool)
                yield wire.InputText(f"The tool {name} is available from now on.")
            case _:
                yield from _parts(block)

    def _written(self, blocks: Sequence[AssistantBlock], *, is_open: bool) -> Iterator[params.InputItem]:
        """Yield the items that the model wrote; if ``is_open``, it continues the last of them, if that is text."""
        results = {block.tool_use_id: block.content for block in blocks if isinstance(block, ServerToolResultBlock)}
        kept = [block for block in blocks if not isinstance(block, TextBlock) or block.text]
        for kind, run in groupby(kept, type):
            if kind is TextBlock:
                texts = [wire.OutputText(block.text) for block in run if isinstance(block, TextBlock)]
                is_last = is_open and isinstance(kept[-1], TextBlock) and texts[-1].text is kept[-1].text
                yield params.message("assistant", texts, "incomplete" if is_last else "completed")
                continue
            for block in run:
                yield from self._of_assistant(block, results)

    def _of_assistant(self, block: Any, results: Mapping[str, Any]) -> Iterator[params.InputItem]:
        """Yield the items of a block that is no text: a result of its message is part of the call."""
        match block:
            case ThinkingBlock(thinking=text, signature=signature):
                yield _thought(text, signature)
            case RedactedThinkingBlock(data=data):
                yield _thought("", data)
            case ToolUseBlock():
                yield _called(block, self._caller(block))
            case ServerToolUseBlock() if program := _program(block):
                yield program
            case ServerToolUseBlock():
                yield from _ran(block, results, self._caller(block))
            case CodeExecutionToolResultBlock(tool_use_id=use_id, content=result):
                if (call_id := _program_call_id(use_id)) in self._programs:
                    yield _program_output(call_id, result)
            case _:
                pass


def _since_summary(messages: Sequence[Turn]) -> tuple[int, Sequence[Turn]]:
    """Return the position of the message with the latest summary, and the messages, without what is before it there."""
    for position in reversed(range(len(messages))):
        content: Any = messages[position].content
        for at in reversed(range(len(content) if isinstance(content, tuple) else 0)):
            if isinstance(content[at], CompactionBlock) and content[at].content is not None:
                kept: Any = (*[CompactionBlock()] * at, *content[at:])
                begun = replace(messages[position], content=kept)
                return position, [*messages[:position], begun, *messages[position + 1 :]]
    return 0, messages


def _tools(*tools: ToolParam) -> wire.AdditionalTools:
    """Return the item that brings tools."""
    return wire.AdditionalTools("", "developer", tuple(map(SentTool, tools)))


def _thinking(messages: Sequence[Turn]) -> list[int]:
    """Return the positions of the messages that have thoughts."""
    kinds = (ThinkingBlock, RedactedThinkingBlock)
    return [
        position
        for position, message in enumerate(messages)
        if not isinstance(message.content, str) and any(isinstance(block, kinds) for block in message.content)
    ]


def _names_a_failure(parts: Sequence[wire.InputPart]) -> bool:
    first = parts[0] if parts else None
    return isinstance(first, wire.InputText) and first.text.lstrip().lower().startswith(("error", "<tool_use_error>"))


def _parts(block: Any) -> Iterator[wire.InputPart]:
    """Yield the parts of a block that the user wrote; none for a result."""
    match block:
        case TextBlock(text=text):
            yield wire.InputText(text)
        case ImageBlock(source=Base64Source(media_type=kind, data=data)):
            yield wire.InputImage(f"data:{kind};base64,{data}")
        case ImageBlock(source=UrlSource(url=url)):
            yield wire.InputImage(url)
        case ImageBlock(source=FileSource(file_id=file_id)):
            yield wire.InputImage(file_id=file_id)
        case SearchResultBlock(source=source, title=title, content=content):
            yield wire.InputText(f"{title}\n{source}\n" + "\n".join(part.text for part in content))
        case DocumentBlock(source=source, title=title, context=context):
            about = [wire.InputText(f"{context}\n")] if context else []
            yield from wire.joined([*about, *_document(source, title)])
        case _:
            pass


def _document(source: Any, title: str | None) -> Iterator[wire.InputPart]:
    filename = UNSET if title is None else title
    match source:
        case TextSource(data=text) | ContentSource(content=str(text)):
            yield wire.InputText(text.join(marks(title or "", [text])))
        case ContentSource(content=blocks):
            first, last = marks(title or "", [block.text for block in blocks if isinstance(block, TextBlock)])
            yield wire.InputText(first)
            yield from wire.joined((part for block in blocks for part in _parts(block)), "\n")
            yield wire.InputText(last)
        case Base64Source(media_type=kind, data=data):
            yield wire.InputFile(filename, file_data=f"data:{kind};base64,{data}")
        case UrlSource(url=url):
            yield wire.InputFile(filename, file_url=url)
        case FileSource(file_id=file_id):
            yield wire.InputFile(filename, file_id=file_id)
        case _:
            pass


def _thought(text: str, signature: str | None) -> wire.Reasoning:
    content = (wire.ReasoningText(text),) if text else UNSET
    return wire.Reasoning("", content=content, encrypted_content=signature or UNSET)


def check_not_empty(messages: Sequence[Turn]) -> None:
    """Raise `InvalidRequest` for a conversation without messages, and for a message in which the user says nothing."""
    if not messages:
        raise InvalidRequest("messages: at least one message is required", param="messages", code="empty_array")
    for position, message in enumerate(messages):
        if isinstance(message, UserTurn) and all(
            isinstance(part, TextBlock) and not part.text for part in _blocks(message)
        ):
            raise _refusal("user messages must have non-empty content", f"messages[{position}].content")


def _blocks(message: UserTurn) -> Sequence[UserBlock]:
    return (TextBlock(text=message.content),) if isinstance(message.content, str) else message.content


def _check_citations(block: Any, place: str) -> None:
    """Raise `UnsupportedParameter` for a block that the model is to cite, also in a result."""
    match block:
        case DocumentBlock(citations=Citations(enabled=True)) | SearchResultBlock(citations=Citations(enabled=True)):
            at = f"{place}.citations"
            raise UnsupportedParameter(f"No model cites blocks here: leave out citations (at {at})", param=at)
        case ToolResultBlock(content=tuple(content)):
            for position, inner in enumerate(content):
                _check_citations(inner, f"{place}.content[{position}]")
        case _:
            pass


def _check_options(message: Turn, place: str) -> None:
    """Raise `UnsupportedParameter` for options that only system messages have."""
    for name in ("clear_at", "output_config"):
        if getattr(message, name) is not None and not isinstance(message, SystemTurn):
            raise not_permitted(f"{place}.{name}")


def _refusal(problem: str, place: str) -> InvalidRequest:
    return InvalidRequest(f"{problem} (at {place})", param=place, code="invalid_value")
