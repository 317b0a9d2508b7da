"""Conversations as gpt-oss reads them: a list of Harmony messages.

Laying out is a pure function of the conversation.  System and developer messages read exactly as openai_harmony lays
them out; calls and their outputs keep the older header form, with the recipient ahead of the channel, because in the
newer one the model begins to write the recipient twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, Literal, TypeAlias

from msgspec import UNSET

from pipeline.frames import Conversation
from pipeline.protocol.items import (
    AdditionalTools,
    Call,
    CallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from pipeline.protocol.response import Effort
from pipeline.protocol.tools import Tool, Toolset
from stages.harmony import CALL, CHANNEL, END, FUNCTIONS, MESSAGE, START, recipient_of
from stages.raw import raw_message
from stages.render.formats import formats_section
from stages.render.typescript import by_namespace, tools_section

Segment: TypeAlias = int | str
"""A special token, or a text that is encoded in one go."""

Author: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
Channel: TypeAlias = Literal["analysis", "commentary", "final"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS_CHANNEL = "Calls to these tools must go to the commentary channel:"
_UNKNOWN = f"{FUNCTIONS}.unknown"
"""The tool of an output whose call is gone, with a response that the store no longer has: the model may still read
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


_KEPT_SECTIONS = 32
_KEPT_LENGTH = 200_000
"""Characters of the largest tools whose section is kept: 30 MB in all, at the worst."""


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of the prompt.

    ``texts`` are its text, cut only where the vocabulary always cuts: ids of a text are not those of its pieces.
    ``name`` is that of a tool.  ``lasting`` says that the next turn will most likely begin with the same texts.
    """

    author: Author
    texts: tuple[str, ...]
    channel: Channel | None = None
    name: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    lasting: bool = False

    @property
    def end(self) -> int:
        """The token that it ends with."""
        return CALL if self.content_type else END

    def segments(self) -> Iterator[Segment]:
        """The message as it is encoded: special tokens as ids, so that nothing a client writes can become one."""
        author = self.name or self.author
        yield START
        yield f"{author} to={self.recipient}" if self.recipient else author
        if self.channel:
            yield CHANNEL
            yield f"{self.channel} {self.content_type}" if self.content_type else self.channel
        yield MESSAGE
        yield from self.texts
        yield self.end

    def raw(self) -> dict[str, Any]:
        """The message as the JSON of openai_harmony's ``Message``."""
        return raw_message(
            self.author,
            "".join(self.texts),
            name=self.name,
            channel=self.channel,
            recipient=self.recipient,
            content_type=self.content_type,
        )


@dataclass(frozen=True)
class Layout:
    """A whole prompt: its head, then the items, each with the message that it becomes, if it becomes one."""

    head: tuple[HarmonyMessage, ...]
    items: tuple[Item, ...]
    messages: tuple[HarmonyMessage | None, ...]


def lay_out(conversation: Conversation) -> Layout:
    """The messages of the prompt, up to the point where the model begins to write."""
    items = (*conversation.history, *conversation.input)
    leading = tuple(takewhile(_is_leading, items))
    rest = items[len(leading) :]
    return Layout(tuple(_head(conversation, leading)), rest, tuple(_messages(rest)))


def _is_leading(item: Item) -> bool:
    """Whether an item that comes before anything else is more instructions, or declares more tools."""
    return isinstance(item, AdditionalTools) or (isinstance(item, Message) and item.role in {"system", "developer"})


# The head: who the model is, what it is told, which tools it may call


def _head(conversation: Conversation, leading: Sequence[Item]) -> Iterator[HarmonyMessage]:
    tools = _shown(conversation.tools)
    yield HarmonyMessage("system", (_system_text(conversation, tools),))
    added = [item.text for item in leading if isinstance(item, Message)]
    instructions = "\n\n".join(filter(None, [conversation.response.instructions, *added]))
    text_format: dict[str, Any] = conversation.response.text.get("format") or {}
    sections = [
        f"# Instructions\n\n{instructions}" if instructions else "",
        _tools_section(tools, conversation.tools.descriptions) if tools else "",
        formats_section(text_format),
    ]
    if told := [section for section in sections if section]:
        texts = (*(f"{section}\n\n" for section in told[:-1]), told[-1])  # a "#" at the start of a line is always a cut
        yield HarmonyMessage("developer", texts, lasting=True)


@dataclass(frozen=True)
class _Declaration:
    """What to declare; the same if its picture is, which is all that can be compared fast: schemas have no hash."""

    picture: str
    tools: Sequence[Tool] = field(compare=False)
    descriptions: Mapping[str, str] = field(compare=False)


def _tools_section(tools: Sequence[Tool], descriptions: Mapping[str, str]) -> str:
    """The section that declares ``tools``: an agent declares the same ones in every turn."""
    declaration = _Declaration(f"{tools}{descriptions}", tools, descriptions)
    return _kept_section(declaration) if len(declaration.picture) <= _KEPT_LENGTH else _section(declaration)


def _section(declaration: _Declaration) -> str:
    return tools_section(declaration.tools, declaration.descriptions)


_kept_section = lru_cache(_KEPT_SECTIONS)(_section)


def _shown(tools: Toolset) -> tuple[Tool, ...]:
    """All tools, callable or not, so that the prompt stays the same for the cache; none where no call may be made."""
    return () if tools.choice == "none" else tools.tools


def _system_text(conversation: Conversation, tools: Sequence[Tool]) -> str:
    effort = _EFFORTS[conversation.response.reasoning.effort]
    named = ", ".join(f"'{namespace}'" for namespace in by_namespace(tools))
    channels = f"{_CHANNELS}\n{_CALLS_CHANNEL} {named}." if tools else _CHANNELS
    return f"{_IDENTITY}\nCurrent date: {conversation.date}\n\nReasoning: {effort}\n\n{channels}"


# The items


def _messages(items: tuple[Item, ...]) -> Iterator[HarmonyMessage | None]:
    callers = callers_of(items)
    run = frozenset(callers.values())
    answers = _answers(items)
    answered = max(answers, default=0)
    for at, item in enumerate(items):
        match item:
            case Message():
                yield _spoken(item, "final" if at in answers else "commentary")
            case Reasoning():  # forgotten with the answer that it led to, as in training
                is_read = at >= answered and item.text
                yield HarmonyMessage("assistant", (item.text,), "analysis") if is_read else None
            case FunctionCall() | CustomToolCall():
                was_cut = item.status == "incomplete" and at not in run
                yield None if was_cut else _call(item)
            case FunctionCallOutput() | CustomToolCallOutput():
                yield _output(item, items[callers[at]] if at in callers else None)
            case AdditionalTools():
                yield None  # the head declares them with all others: the model was taught to look for tools there


def callers_of(items: Sequence[Item]) -> dict[int, int]:
    """For the position of each output that of the call that it answers.

    It is the latest one before it with the same ``call_id``, as some clients count their calls anew in each turn.
    """
    latest: dict[str, int] = {}
    callers: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, Call):
            latest[item.call_id] = at
        elif isinstance(item, CallOutput) and item.call_id in latest:
            callers[at] = latest[item.call_id]
    return callers


def _call(call: Call) -> HarmonyMessage:
    content_type = "json" if isinstance(call, FunctionCall) else "code"
    recipient = recipient_of(call)
    return HarmonyMessage("assistant", (call.text,), "commentary", recipient=recipient, content_type=content_type)


def _output(output: CallOutput, caller: Item | None) -> HarmonyMessage:
    name = recipient_of(caller) if isinstance(caller, Call) else _UNKNOWN
    return HarmonyMessage("tool", (output.text,), "commentary", name=name, recipient="assistant")


def _spoken(message: Message, channel: Channel) -> HarmonyMessage:
    match message.role:
        case "user":
            return HarmonyMessage("user", (message.text,))
        case "assistant":
            return HarmonyMessage("assistant", (message.text,), channel)
        case "system" | "developer":
            return HarmonyMessage("developer", (f"# Instructions\n\n{message.text}",))


def _answers(items: Sequence[Item]) -> frozenset[int]:
    """The positions of the messages that answered the user.

    Some clients leave the phase out: then a call right behind a message tells that it was no answer, as that would have
    ended the turn.
    """
    return frozenset(
        at
        for at, (item, after) in enumerate(pairwise((*items, None)))
        if isinstance(item, Message) and item.role == "assistant" and _is_answer(item, after)
    )


def _is_answer(message: Message, after: Item | None) -> bool:
    return message.phase == "final_answer" or (message.phase is UNSET and not isinstance(after, Call))
