"""Messages of Chat Completions, and the items of a conversation that they become."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.structs import ListOf
from penstock.pipeline.protocol.readings import audio_instead

_CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_ToolName: TypeAlias = Annotated[str, Meta(min_length=1)]


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    """An object in a body: types are strict, and keys that the API does not have are ignored."""

    unused: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "index", "prompt_cache_breakpoint", *("detail", "signature", "thinking")}
    )
    """Among them those of parts that are renamed before they are read."""


# Content parts


class ChatText(_Object, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ChatRefusal(_Object, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ChatImageUrl(_Object, frozen=True, kw_only=True):
    url: str
    detail: wire.ImageDetail | None = None


class ChatImage(_Object, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    image_url: ChatImageUrl


class ChatFileContent(_Object, frozen=True, kw_only=True):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class ChatFile(_Object, frozen=True, kw_only=True, tag_field="type", tag="file"):
    file: ChatFileContent


class ChatAudio(_Object, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    pass


ChatPart: TypeAlias = ChatText | ChatImage | ChatFile | ChatAudio

# Calls


class CalledFunction(_Object, frozen=True, kw_only=True):
    name: _ToolName
    arguments: str


class FunctionToolCall(_Object, frozen=True, kw_only=True, tag_field="type", tag="function"):
    id: _CallId
    function: CalledFunction


class CalledCustomTool(_Object, frozen=True, kw_only=True):
    name: _ToolName
    input: str


class CustomToolCall(_Object, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    id: _CallId
    custom: CalledCustomTool


ToolCall: TypeAlias = FunctionToolCall | CustomToolCall

# Messages


class _Message(_Object, frozen=True, kw_only=True, tag_field="role"):
    pass


class _Named(_Message, frozen=True, kw_only=True):
    """A message of a participant, whose name no prompt has."""

    name: str | None = None


class SystemMessage(_Named, frozen=True, kw_only=True, tag="system"):
    content: str | tuple[ChatText, ...]


class DeveloperMessage(_Named, frozen=True, kw_only=True, tag="developer"):
    content: str | tuple[ChatText, ...]


class UserMessage(_Named, frozen=True, kw_only=True, tag="user"):
    content: str | tuple[ChatPart, ...]


class AssistantMessage(_Named, frozen=True, kw_only=True, tag="assistant"):
    """An answer of the model; its thoughts have two names, and clients send back the one that they know."""

    content: str | tuple[ChatText | ChatRefusal, ...] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    function_call: CalledFunction | None = None
    audio: dict[str, Any] | None = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    tool_call_id: _CallId
    content: str | tuple[ChatPart, ...]


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """The output of a call before there were tools."""

    name: str
    content: str | None = None


ChatMessage: TypeAlias = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
)


def _explicit(value: Any) -> Any:
    """Return a message as OpenAI has it.

    Clients leave the type out of calls of functions, and some write parts of other APIs, which vLLM reads as well.
    """
    if not isinstance(value, dict):
        return value
    calls, parts = value.get("tool_calls"), value.get("content")
    if isinstance(calls, list) and not all(isinstance(call, dict) and "type" in call for call in calls):
        typed = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
        value = {**value, "tool_calls": typed}
    if isinstance(parts, list) and any(map(_is_foreign, parts)):
        value = _with_own_parts(value, parts)
    return value


_FOREIGN = frozenset({"input_text", "output_text", "input_image", "thinking"})
"""The types of parts of Responses and Messages."""


def _is_foreign(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _FOREIGN


def _with_own_parts(message: dict[str, Any], parts: Sequence[Any]) -> dict[str, Any]:
    """Return a message with the parts of chats in place of foreign ones; thoughts of the assistant are no parts."""
    content, thoughts = list[Any](), list[str]()
    for part in parts:
        match part:
            case {"type": "input_text" | "output_text", "text": str(text)}:
                content.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                content.append({"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}})
            case {"type": "thinking", "thinking": str(thought)} if message.get("role") == "assistant":
                thoughts.append(thought)
            case _:
                content.append(part)
    given = {"reasoning": "\n".join(thoughts)} if thoughts and not message.get("reasoning") else {}
    return {**message, **given, "content": content or None if thoughts else content}


ChatMessages: TypeAlias = Annotated[list[ChatMessage], ListOf(ChatMessage, _explicit)]


class Conversation:
    """The items of a list of messages, and where each came from; ``continues`` leaves the last one open.

    Raises `InvalidRequest` if the last message then is no text of the assistant's.
    """

    def __init__(self, messages: Sequence[ChatMessage], *, continues: bool = False) -> None:
        self.items: list[params.InputItem] = []
        self.places = array("I")
        """The position of the message of each item."""
        self._custom: set[str] = set()
        for position, message in enumerate(messages):
            for item in self._items(message, f"messages[{position}]"):
                self.items.append(item)
                self.places.append(position)
        if continues:
            self._leave_open()

    def _leave_open(self) -> None:
        last = self.items[-1]
        if not isinstance(last, wire.Message) or last.role != "assistant":
            raise InvalidRequest(
                "Only a text of the assistant can be continued, as the last message.", param="continue_final_message"
            )
        self.items[-1] = msgspec.structs.replace(last, status="incomplete")

    def _items(self, message: ChatMessage, path: str) -> Iterator[params.InputItem]:
        match message:
            case SystemMessage(content=content):
                yield params.message("system", _texts(content))
            case DeveloperMessage(content=content):
                yield params.message("developer", _texts(content))
            case UserMessage(content=()):
                raise InvalidRequest(
                    f"This needs a part (at {path}.content)", param=f"{path}.content", code="empty_array"
                )
            case UserMessage(content=content):
                yield params.message("user", _parts(content))
            case AssistantMessage():
                yield from self._answer(message, path)
            case ToolMessage(tool_call_id=call_id, content=content):
                output = _parts(content)
                kind = wire.CustomToolCallOutput if call_id in self._custom else wire.FunctionCallOutput
                yield kind("", call_id, output, "completed")
            case FunctionMessage():
                raise UnsupportedParameter(
                    "Send the output of a call as a message of role 'tool'.", param=f"{path}.role"
                )

    def _answer(self, message: AssistantMessage, path: str) -> Iterator[params.InputItem]:
        if message.function_call is not None:
            raise UnsupportedParameter("Send tools, and calls as tool_calls.", param=f"{path}.function_call")
        if message.audio is not None:
            raise UnsupportedParameter("This server does not speak.", param=f"{path}.audio")
        if thought := message.reasoning or message.reasoning_content:
            yield wire.Reasoning("", content=(wire.ReasoningText(thought),))
        if content := tuple(_written(message)):
            yield params.message("assistant", content)
        elif not message.tool_calls and not thought:
            if message.content is None:
                raise InvalidRequest(f"This message is empty (at {path})", param=f"{path}.content")
            yield params.message("assistant", "")
        yield from self._calls(message.tool_calls or (), f"{path}.tool_calls")

    def _calls(self, calls: Sequence[ToolCall], path: str) -> Iterator[params.InputItem]:
        ids = set[str]()
        for position, call in enumerate(calls):
            if call.id in ids:
                param = f"{path}[{position}].id"
                raise InvalidRequest(f"Another call has this id (at {param})", param=param, code="invalid_value")
            ids.add(call.id)
            match call:
                case FunctionToolCall(id=call_id, function=function):
                    self._custom.discard(call_id)
                    yield wire.FunctionCall(
                        "", call_id=call_id, name=function.name, arguments=function.arguments, status="completed"
                    )
                case CustomToolCall(id=call_id, custom=custom):
                    self._custom.add(call_id)
                    yield wire.CustomToolCall(
                        "", call_id=call_id, name=custom.name, input=custom.input, status="completed"
                    )


def _written(message: AssistantMessage) -> Iterator[wire.MessagePart]:
    content = message.content or ()
    for part in (ChatText(text=content),) if isinstance(content, str) else content:
        match part:
            case ChatText(text=text):
                if text:  # clients write an empty one beside calls
                    yield wire.OutputText(text)
            case ChatRefusal():
                yield wire.Refusal(part.refusal)
    if message.refusal:
        yield wire.Refusal(message.refusal)


def _texts(content: str | Iterable[ChatText]) -> str | tuple[wire.MessagePart, ...]:
    return content if isinstance(content, str) else tuple(wire.InputText(part.text) for part in content)


def _parts(content: str | Sequence[ChatPart]) -> str | tuple[wire.InputPart, ...]:
    return content if isinstance(content, str) else tuple(map(_part, content))


def _part(part: ChatPart) -> wire.InputPart:
    match part:
        case ChatText(text=text):
            return wire.InputText(text)
        case ChatImage(image_url=image):
            return wire.InputImage(image.url, image.detail or "auto")
        case ChatFile(file=file):
            given = msgspec.structs.asdict(file)
            return wire.InputFile(**{name: value for name, value in given.items() if value is not None})
        case ChatAudio():
            return params.Unheard(audio_instead())
