"""Conversations as gpt-oss reads them: Harmony.

The layout is a pure function from a conversation to segments: special tokens as ids, text as text.  Text is encoded
apart from the specials, so that nothing a client writes can become one, and each text in one go, because the ids of a
text are not those of its pieces.  System and developer messages read exactly as openai_harmony lays them out; calls
and their outputs keep the older header form, with the recipient ahead of the channel, because in the newer one the
model begins to write the recipient twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.frames import Conversation, Prompt
from pipeline.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning
from pipeline.protocol.response import Effort
from stages.harmony import CALL, CHANNEL, END, MESSAGE, START, STOP_TOKENS, HarmonyEncoding
from stages.render.typescript import functions_section

Segment: TypeAlias = int | str
"""A special token, or a text that is encoded in one go."""

Channel: TypeAlias = Literal["analysis", "commentary", "final"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."
_UNKNOWN = "unknown"
"""The function of an output whose call is gone, with a response that the store no longer has: the model may still read
what it returned."""
_EFFORTS: Mapping[Effort | None, str] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    None: "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""gpt-oss knows three efforts, and cannot leave thinking out."""


@dataclass(frozen=True)
class RenderHarmony:
    """Turns a conversation into the prompt of the next turn, off the event loop."""

    encoding: HarmonyEncoding

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[Prompt, None]:
        """One prompt for each conversation."""
        async for conversation in source:
            yield await asyncio.to_thread(self._prompt, conversation)

    def _prompt(self, conversation: Conversation) -> Prompt:
        return Prompt(
            response=conversation.response,
            input=conversation.input,
            token_ids=tuple(self._token_ids(layout(conversation))),
            stop_token_ids=STOP_TOKENS,
            sampling=conversation.sampling,
            tools=conversation.tools,
            scheduling=conversation.scheduling,
        )

    def _token_ids(self, segments: Iterable[Segment]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            token_ids += [segment] if isinstance(segment, int) else self.encoding.encode(segment)
        return token_ids


def layout(conversation: Conversation) -> Iterator[Segment]:
    """The whole prompt, up to the point where the model begins to write."""
    items = (*conversation.history, *conversation.input)
    leading = _leading(items)
    functions = tuple(msgspec.to_builtins(tool) for tool in conversation.tools.callable)
    yield from _message("system", _system_text(conversation, has_functions=bool(functions)))
    instructions = "\n\n".join(filter(None, [conversation.response.instructions, *(item.text for item in leading)]))
    if developer := _developer_text(instructions, functions):
        yield from _message("developer", developer)
    yield from _items(items[len(leading) :])
    yield from (START, "assistant")


# The head: who the model is, what it is told, which functions it may call


def _system_text(conversation: Conversation, *, has_functions: bool) -> str:
    effort = _EFFORTS[conversation.response.reasoning.effort]
    channels = f"{_CHANNELS}\n{_CALLS_CHANNEL}" if has_functions else _CHANNELS
    return f"{_IDENTITY}\nCurrent date: {conversation.date}\n\nReasoning: {effort}\n\n{channels}"


def _developer_text(instructions: str, functions: tuple[dict[str, Any], ...]) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if functions:
        sections.append(functions_section(functions))
    return "\n\n".join(sections)


def _leading(items: tuple[Item, ...]) -> list[Message]:
    """The system and developer messages that come before anything else: more instructions."""
    messages = takewhile(lambda item: isinstance(item, Message) and item.role in {"system", "developer"}, items)
    return [message for message in messages if isinstance(message, Message)]


# The items


def _items(items: tuple[Item, ...]) -> Iterator[Segment]:
    callers = _callers(items)
    answered = max((at for at, item in enumerate(items) if _is_final(item)), default=0)
    for at, item in enumerate(items):
        match item:
            case Message():
                yield from _spoken(item)
            case Reasoning() if item.text and at >= answered:
                yield from _message("assistant", item.text, "analysis")
            case Reasoning():
                pass  # forgotten with the answer that it led to, as in training
            case FunctionCall(status="incomplete") if item not in callers.values():
                pass  # its arguments were cut off, and nobody has run it
            case FunctionCall():
                yield from (START, f"assistant to=functions.{item.name}", CHANNEL, "commentary json")
                yield from (MESSAGE, item.arguments, CALL)
            case FunctionCallOutput():
                name = callers[at].name if at in callers else _UNKNOWN
                yield from _message(f"functions.{name} to=assistant", item.text, "commentary")


def _callers(items: tuple[Item, ...]) -> dict[int, FunctionCall]:
    """For the position of each output the call that it answers: the latest one before it with the same ``call_id``.

    Some clients count their calls anew in each turn.
    """
    latest: dict[str, FunctionCall] = {}
    callers: dict[int, FunctionCall] = {}
    for at, item in enumerate(items):
        if isinstance(item, FunctionCall):
            latest[item.call_id] = item
        elif isinstance(item, FunctionCallOutput) and item.call_id in latest:
            callers[at] = latest[item.call_id]
    return callers


def _spoken(message: Message) -> Iterator[Segment]:
    match message.role:
        case "user":
            return _message("user", message.text)
        case "assistant":
            return _message("assistant", message.text, "final" if _is_final(message) else "commentary")
        case "system" | "developer":
            return _message("developer", f"# Instructions\n\n{message.text}")


def _is_final(item: Item) -> bool:
    return isinstance(item, Message) and item.role == "assistant" and item.phase != "commentary"


def _message(author: str, text: str, channel: Channel | None = None) -> Iterator[Segment]:
    yield from (START, author)
    if channel:
        yield from (CHANNEL, channel)
    yield from (MESSAGE, text, END)
