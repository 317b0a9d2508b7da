"""Messages and their blocks of content, as a client sends them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from penstock.extensions.dialects.messages.tools import MessageTool
from penstock.pipeline.protocol.params.structs import ListOf

_Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    """An object in a body: types are strict, and keys that the API does not have are ignored."""

    unused: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations", "safeguards", "toolset_name"})


class _Typed(_Object, frozen=True, kw_only=True, tag_field="type"):
    pass


# Sources of images and documents


class Base64Source(_Typed, frozen=True, kw_only=True, tag="base64"):
    media_type: str
    data: str


class UrlSource(_Typed, frozen=True, kw_only=True, tag="url"):
    url: str


class FileSource(_Typed, frozen=True, kw_only=True, tag="file"):
    file_id: str


class TextSource(_Typed, frozen=True, kw_only=True, tag="text"):
    media_type: Literal["text/plain"] | None = None
    data: str


# Blocks


class TextBlock(_Typed, frozen=True, kw_only=True, tag="text"):
    text: str


class Transformations(_Object, frozen=True, kw_only=True):
    """The wish about an image that is too large for the model: the engine makes it smaller."""

    oversized_image: Literal["downsize"] | None = None


class ImageBlock(_Typed, frozen=True, kw_only=True, tag="image"):
    source: Base64Source | UrlSource | FileSource
    transformations: Transformations | None = None


class ContentSource(_Typed, frozen=True, kw_only=True, tag="content"):
    content: str | tuple[TextBlock | ImageBlock, ...]


class Citations(_Object, frozen=True, kw_only=True):
    """The client's wish for citations of a block."""

    enabled: bool | None = None


class DocumentBlock(_Typed, frozen=True, kw_only=True, tag="document"):
    source: Base64Source | UrlSource | FileSource | TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(_Typed, frozen=True, kw_only=True, tag="search_result"):
    source: str
    title: str
    content: tuple[TextBlock, ...]
    citations: Citations | None = None


class ToolReferenceBlock(_Typed, frozen=True, kw_only=True, tag="tool_reference"):
    tool_name: _Text


ResultBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(_Typed, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: _Text
    content: str | tuple[ResultBlock, ...] | None = None
    is_error: bool | None = None


class BlockCaller(_Object, frozen=True, kw_only=True):
    """The caller of a tool: the model, whose type is ``direct``, or a program by the id of its block."""

    type: _Text
    tool_id: str | None = None


class ToolUseBlock(_Typed, frozen=True, kw_only=True, tag="tool_use"):
    id: _Text
    name: _Text
    input: dict[str, Any]
    caller: BlockCaller | None = None


class ThinkingBlock(_Typed, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Typed, frozen=True, kw_only=True, tag="redacted_thinking"):
    data: str


class ServerToolUseBlock(_Typed, frozen=True, kw_only=True, tag="server_tool_use"):
    """A call that a server ran."""

    id: _Text
    name: _Text
    input: dict[str, Any]
    caller: BlockCaller | None = None


class WebSearchToolResultBlock(_Typed, frozen=True, kw_only=True, tag="web_search_tool_result"):
    unused: ClassVar[frozenset[str]] = _Object.unused | {"caller"}  # its call has it

    tool_use_id: _Text
    content: Any


class CodeExecutionToolResultBlock(_Typed, frozen=True, kw_only=True, tag="code_execution_tool_result"):
    tool_use_id: _Text
    content: Any


class ToolReference(_Typed, frozen=True, kw_only=True, tag="tool_reference"):
    """A tool by its name, which a request or an earlier message defines."""

    name: _Text


class ToolDefinition(_Typed, frozen=True, kw_only=True, tag="tool_definition"):
    definition: MessageTool


class ToolAdditionBlock(_Typed, frozen=True, kw_only=True, tag="tool_addition"):
    """A tool that the model may call from here on."""

    tool: ToolReference | ToolDefinition


class ToolRemovalBlock(_Typed, frozen=True, kw_only=True, tag="tool_removal"):
    """A tool that the model may not call from here on."""

    tool: ToolReference


class CompactionBlock(_Typed, frozen=True, kw_only=True, tag="compaction"):
    """A summary in place of all that comes before it; without ``content``, the model wrote none."""

    unused: ClassVar[frozenset[str]] = _Object.unused | {"encrypted_content", "signature"}

    content: _Text | None = None
    tool_changes: tuple[ToolAdditionBlock | ToolRemovalBlock, ...] | None = None


SystemBlock: TypeAlias = TextBlock | ToolAdditionBlock | ToolRemovalBlock
UserBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | CompactionBlock
ServerToolResultBlock: TypeAlias = WebSearchToolResultBlock | CodeExecutionToolResultBlock
AssistantBlock: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | CompactionBlock
)

# Messages


class TurnConfig(_Object, frozen=True, kw_only=True):
    """The settings that a message changes for the answers after it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class _Message(_Object, frozen=True, kw_only=True, tag_field="role"):
    clear_at: Literal["next_user_message", "never"] | None = None
    """The message until which the model reads the text of this one; only of system messages."""
    output_config: TurnConfig | None = None
    """Only of system messages."""


class UserTurn(_Message, frozen=True, kw_only=True, tag="user"):
    content: str | tuple[UserBlock, ...]


class AssistantTurn(_Message, frozen=True, kw_only=True, tag="assistant"):
    content: str | tuple[AssistantBlock, ...]


class SystemTurn(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions in the middle of a conversation."""

    content: str | tuple[SystemBlock, ...] = ()


Turn: TypeAlias = UserTurn | AssistantTurn | SystemTurn
Turns: TypeAlias = Annotated[list[Turn], ListOf(Turn)]
TextBlocks: TypeAlias = Annotated[list[TextBlock], ListOf(TextBlock)]
