"""A stage for those who want to read what their model says: behind ``emit``, it logs each item as it is finished."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from pipeline.protocol.events import OutputItemDone
from pipeline.protocol.items import CustomToolCall, FunctionCall, Message, OutputItem, Reasoning

logger = logging.getLogger(__name__)

Frame = TypeVar("Frame")


async def log_outputs(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    """Let everything pass."""
    async for frame in source:
        if isinstance(frame, OutputItemDone):
            logger.info("%s", in_words(frame.item))
        yield frame


def in_words(item: OutputItem) -> str:
    """An item on one line: line breaks in it are escaped."""
    match item:
        case Reasoning():
            return f"reasoning: {item.text!r}"
        case Message():
            return f"message: {item.text!r}"
        case FunctionCall() | CustomToolCall():
            return f"call of {item.namespace + '.' if item.namespace else ''}{item.name}: {item.text!r}"
