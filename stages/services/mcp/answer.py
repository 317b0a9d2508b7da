"""Convert the result of an MCP tool to text, as the model cannot read anything else."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from mcp_types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from penstock.stages.services.mcp.failure import tool_failure
from penstock.stages.services.mcp.hidden import Hidden
from penstock.stages.services.tools import Outcome


def outcome(result: CallToolResult, secrets: Hidden) -> Outcome:
    """Convert the result of a call to an `Outcome`, with ``secrets`` hidden."""
    text = secrets.hide("\n".join(_texts(result)))
    return tool_failure(text or "The tool failed.").outcome if result.is_error else Outcome(text)


def _texts(result: CallToolResult) -> Iterable[str]:
    yield from map(_text, result.content)
    says_it = any(isinstance(block, TextContent | EmbeddedResource) for block in result.content)
    if result.structured_content is not None and not says_it:
        yield msgspec.json.encode(result.structured_content).decode()


def _text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent():
            return f"[image: {block.mime_type}]"
        case AudioContent():
            return f"[audio: {block.mime_type}]"
        case ResourceLink():
            return f"[resource: {block.name}, {block.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return f"[resource: {resource.uri}]\n{resource.text}"
        case EmbeddedResource():
            return f"[resource: {block.resource.uri}, {block.resource.mime_type or 'binary'}]"
