"""A stage that logs each output item as it is finished, for operators who want to read their model's output.

It goes after ``emit``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.events import OutputItemDone

logger = logging.getLogger(__name__)

Frame = TypeVar("Frame")


async def log_outputs(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    """Pass every frame on, and log each finished item."""
    async for frame in source:
        if isinstance(frame, OutputItemDone):
            logger.info("%s", in_words(frame.item))
        yield frame


def in_words(item: items.OutputItem) -> str:
    """Return an item as one line of text; line breaks in it are escaped."""
    match item:
        case items.Reasoning():
            return f"reasoning: {item.text!r}"
        case items.Message():
            return f"message: {item.text!r}"
        case items.FunctionCall() | items.CustomToolCall():
            return f"call of {item.namespace + '.' if item.namespace else ''}{item.name}: {item.text!r}"
        case items.McpListTools():
            return f"tools of {item.server_label}: {item.error or len(item.tools)}"
        case items.McpCall():
            return f"call of {item.server_label}.{item.name}, {item.status}: {item.text!r}"
        case items.McpApprovalRequest():
            return f"request to approve of {item.server_label}.{item.name}: {item.text!r}"
        case items.CodeInterpreterCall():
            return f"code, {item.status}: {item.text!r}"
        case items.WebSearchCall():
            action = {name: value for name, value in item.action.items() if name != "sources"}
            return f"web search, {item.status}: {action!r}"
        case items.ShellCallOutput():
            return f"output of a shell, {item.status}: {len(item.output)} commands"
        case _:
            return f"{item.__struct_config__.tag}: {item.text!r}"
