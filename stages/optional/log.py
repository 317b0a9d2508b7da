"""Stages for operators who want to read in the log what their model reads and writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.events import OutputItemDone

logger = logging.getLogger(__name__)

Frame = TypeVar("Frame")


@dataclass(frozen=True)
class LogPrompts:
    """A stage after ``render`` that logs the prompt of each turn, at most ``longest`` characters of it."""

    decode_of: Callable[[str], Callable[[Sequence[int]], str]]
    """Gives the function that decodes the tokens of a model."""
    longest: int | None = None

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        """Pass every prompt on, and log it."""
        async for prompt in source:
            # In a thread, as a long prompt takes milliseconds.
            text = await asyncio.to_thread(self.decode_of(prompt.facts.model), prompt.token_ids[: self.longest])
            sampling = prompt.facts.sampling
            logger.info("prompt of %d tokens: %s %r", len(prompt.token_ids), sampling, text[: self.longest])
            yield prompt


@dataclass(frozen=True)
class LogOutputs:
    """A stage after ``emit`` that logs each item when it is done, at most ``longest`` characters of it."""

    longest: int | None = None

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        """Pass every frame on, and log each finished item."""
        async for frame in source:
            if isinstance(frame, OutputItemDone):
                logger.info("%s", in_words(frame.item)[: self.longest])
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
            action = {name: value for name, value in (item.action or {}).items() if name != "sources"}
            return f"web search, {item.status}: {action!r}"
        case items.ShellCallOutput():
            return f"output of a shell, {item.status}: {len(item.output)} commands"
        case _:
            return f"{item.type}: {item.text!r}"
