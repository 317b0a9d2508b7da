"""Harmony message headers: what stands between ``<|start|>`` and ``<|message|>``, read with forgiveness.

A header is a few words and markers: a role, ``<|channel|>`` and its name, ``to=`` and a recipient, ``<|constrain|>``
and a content type.  Models write all of them in the wrong place now and then, so the reader takes each word for what
it is, wherever it stands.  Whatever is no such word is left over, and no text may be lost:

* In a header that ended in ``<|message|>``, one left-over word is noise, and two or more are text.  Text ahead of the
  first marker is a message of its own; text behind it is how the opened message begins, except in a call, where it
  would break the arguments and is noise.
* In a header that never came to ``<|message|>``, all that is left over is the message's text.
* Where no ``<|start|>`` announced a header, a channel or role in front of text is the text's first word.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.pipeline.frames import (
    CodeCallOpened,
    MessageOpened,
    ReasoningOpened,
    Repair,
    ShellCallOpened,
    WebCallOpened,
)
from penstock.stages.models.harmony.raw_message import raw_message
from penstock.stages.parse.harmony.recipients import Recipients
from penstock.stages.parse.openings import Opening

_WORD = re.compile(
    r"\s*(?:"
    r"to=\s*(?P<recipient>[^\s<]+)"
    r"|(?P<channel>analysis|commentary|comment|final)(?![a-z])"
    r"|(?P<content_type>json|code|text|python)(?![a-z])"
    r")"
)
_ROLE = re.compile(
    r"\s*(?:"
    r"assistant"
    r"|(?P<foreign>(?:user|system|developer|tool)(?::\S+)?)(?![a-z=])"
    r"|(?P<tool>[^\s<=]+)(?= to=assistant\b)"  # the answer of a tool, made up by the model
    r")"
)
_MARKUP_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "text", "python", "to=")
_ANY_TYPE = re.compile(r"\s*[\w./+-]+(?=\s*(?:$|[{\[]))")
"""What may name a content type behind ``<|constrain|>``: any one word, alone or ahead of JSON."""
_LEFT_OVER = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w\S*")
"""A word, for counting; a sign of Chinese or Japanese, which know no spaces, counts as one."""
_NOBODY = ("assistant", "all", "user")
"""Recipients that are no tool: the model talks to itself or to the user."""

Repairs: TypeAlias = dict[Repair, None]
"""What was wrong, each kind once, in the order of its first occurrence: a dict as an ordered set."""


@dataclass
class Header:
    """A header as it is being read: text, cut into segments by the markers in it."""

    announced: bool = False
    """Whether it began with ``<|start|>``."""
    segments: list[tuple[str, bytearray]] = field(default_factory=lambda: [("start", bytearray())])
    length: int = 0
    """Tokens read so far."""
    repairs: Repairs = field(default_factory=dict)
    """What was wrong before its words are read."""

    @property
    def is_whole(self) -> bool:
        """Whether the text so far ends with a whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self.segments[-1][1]))
        return not decoder.getstate()[0]

    @property
    def holds_text(self) -> bool:
        """Whether more than noise is left over behind its markers, or of a header without any.

        Behind text that is followed by a marker, the rest of a header may still come.
        """
        reading = _read(self)
        return _is_text(reading.behind if len(self.segments) > 1 else reading.ahead)

    def mark(self, marker: str) -> None:
        """Begin a segment behind ``<|channel|>`` or ``<|constrain|>``."""
        self.length += 1
        self.segments.append((marker, bytearray()))

    def add(self, token: bytes) -> None:
        """Take the bytes of one more text token."""
        self.length += 1
        self.segments[-1][1].extend(token)


@dataclass(slots=True)
class Reading:
    """What the words of a header say."""

    role: str | None = None
    """The foreign role, where the model speaks for somebody else."""
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    """The form of the content, with its marker if it has one."""
    ahead: str = ""
    """What is left over ahead of the first marker."""
    behind: str = ""
    """What is left over behind it."""
    repairs: Repairs = field(default_factory=dict)

    def opening(self, recipients: Recipients) -> Opening:
        """Which item the message is: the recipient decides before the channel (facts of many real models)."""
        if self.role is not None:
            self.repairs.setdefault("foreign role")
            return ReasoningOpened()
        if self.recipient is not None:
            return self._call(self.recipient, recipients)
        match self.channel:
            case "analysis":
                return ReasoningOpened()
            case "commentary":
                return MessageOpened("commentary")
            case _:
                return MessageOpened("final_answer")

    def _call(self, recipient: str, recipients: Recipients) -> Opening:
        call = recipients.call(recipient)
        if isinstance(call, ReasoningOpened):
            self.repairs.setdefault("undeclared tool")
        return call


def read_header(header: Header, recipients: Recipients) -> Reading:
    """Read a header that ended in ``<|message|>``, of which only text is left over."""
    reading = _read(header)
    reading.ahead = _without_tool(reading.ahead, reading, recipients)
    reading.behind = _without_tool(reading.behind, reading, recipients)
    reading.ahead = _only_text(reading.ahead, reading)
    behind = _only_text(reading.behind, reading, noise=reading.recipient is not None)
    reading.behind = behind if not behind or behind[-1].isspace() else f"{behind} "
    if not any(marker == "channel" for marker, _ in header.segments):
        reading.repairs.setdefault("missing channel")
    elif reading.channel is None:
        reading.repairs.setdefault("unknown channel")
    return reading


def read_bare(header: Header, *, cut: bool) -> Reading:
    """Read a header that never came to ``<|message|>``: what is left over, all of it ``behind``, is the message's text.

    ``cut`` says that generation ended inside it, where half a header word is no text.
    """
    reading = _read(header, bare=True)
    reading.repairs.setdefault("missing message")
    text = (reading.ahead + reading.behind).removeprefix(" ")
    unfinished = cut and any(word.startswith(text.strip()) for word in _MARKUP_WORDS)
    reading.ahead, reading.behind = "", "" if unfinished or not text.strip() else text
    return reading


def _read(header: Header, *, bare: bool = False) -> Reading:
    reading = Reading(repairs=dict(header.repairs))
    for position, (marker, raw) in enumerate(header.segments):
        text = raw.decode(errors="replace")
        at = _read_role(text, reading) if position == 0 else 0
        while found := _WORD.match(text, at):
            kind, word = found.lastgroup, found[found.lastgroup or 0]
            if kind == "recipient":
                _address(word, reading)
            elif kind == "channel" and reading.channel is None:
                reading.channel = "commentary" if word == "comment" else word
            elif kind == "content_type" and reading.content_type is None and (position > 0 or reading.recipient):
                reading.content_type = _content_type(marker, word)
            else:
                break
            at = found.end()
        if marker == "constrain" and reading.content_type is None and (found := _ANY_TYPE.match(text, at)):
            reading.content_type, at = _content_type(marker, found[0].strip()), found.end()
        if position > 0:
            reading.behind += text[at:]
        elif _speaks_at_once(header, text[:at], text[at:], bare=bare):
            reading.ahead, reading.role, reading.channel = text, None, None
        else:
            reading.ahead = text[at:]
    return reading


def _content_type(marker: str, word: str) -> str:
    return f"<|constrain|>{word}" if marker == "constrain" else word


def _speaks_at_once(header: Header, words: str, rest: str, *, bare: bool) -> bool:
    """Whether the header words in front of ``rest`` are the first words of a text."""
    if header.announced or "to=" in words:
        return False
    return bool(rest.strip()) if bare and len(header.segments) == 1 else len(header.segments) > 1 and _is_text(rest)


def _is_text(left_over: str) -> bool:
    words = _LEFT_OVER.findall(left_over)
    return len(words) > 1 and any(word not in _MARKUP_WORDS for word in words)


def _only_text(left_over: str, reading: Reading, *, noise: bool = False) -> str:
    """``left_over`` if it is text; noise is only noted."""
    if left_over.strip():
        reading.repairs.setdefault("unexpected header")
    return left_over.removeprefix(" ") if _is_text(left_over) and not noise else ""


def _without_tool(left_over: str, reading: Reading, recipients: Recipients) -> str:
    """``left_over`` without the word that names a tool, which becomes the recipient."""
    for position, word in enumerate(left_over.split()):
        recipient = word.removeprefix("to=")
        is_known = recipients.knows(recipient) and (position == 0 or "." in recipient)
        is_named = is_known or recipient.startswith("functions.")
        if is_named and reading.recipient in (None, recipient) and reading.channel != "final":
            reading.recipient = recipient
            return left_over.replace(word, "", 1)
    return left_over


def _read_role(text: str, reading: Reading) -> int:
    found = _ROLE.match(text)
    if found is None:
        return 0
    reading.role = found["foreign"] or found["tool"]
    return found.end()


def _address(recipient: str, reading: Reading) -> None:
    if recipient not in _NOBODY and reading.recipient is None:
        reading.recipient = recipient


def raw(opening: Opening, reading: Reading, text: str) -> dict[str, Any]:
    """What was understood of a message, as a raw message."""
    match opening:
        case ReasoningOpened() | CodeCallOpened() | WebCallOpened() | ShellCallOpened():
            channel = "analysis"
        case MessageOpened():
            channel = "final"
        case _:
            channel = "commentary"
    return raw_message(
        "assistant",
        text,
        channel=reading.channel or channel,
        recipient=reading.recipient,
        content_type=reading.content_type,
    )
