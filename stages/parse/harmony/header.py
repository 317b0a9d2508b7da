"""Read Harmony message headers, the part between ``<|start|>`` and ``<|message|>``, leniently.

A header consists of a few words and markers: a role, ``<|channel|>`` and its name, ``to=`` and a recipient,
``<|constrain|>`` and a content type.  Models sometimes write any of these in the wrong place, so each word is
recognised by itself, wherever it stands.  All other words are left over, and no text may be lost:

* If the header ended in ``<|message|>``, one left-over word is noise, and two or more are text.  Text before the first
  marker is a message of its own.  Text after it is the beginning of the opened message; in a call it would break the
  arguments, so there it is noise.
* If the header never reached ``<|message|>``, all left-over words are the message's text.
* If no ``<|start|>`` came before the header, a channel or role in front of text is the first word of that text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.pipeline import frames
from penstock.stages.models.harmony.raw_message import raw_message
from penstock.stages.models.harmony.vocabulary import CHANNEL, CONSTRAIN, TEXT_TOKENS
from penstock.stages.parse.harmony.recipients import Recipients
from penstock.stages.parse.parser import Opening

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
    r"|(?P<tool>[^\s<=]+)(?= to=assistant\b)"  # a tool's result, made up by the model
    r")"
)
_CHANNELS = ("analysis", "commentary", "final")
_MARKUP_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "text", "python", "to=")
_ANY_TYPE = re.compile(r"\s*[\w./+-]+(?=\s*(?:$|[{\[]))")
"""A content type after ``<|constrain|>``: any single word, alone or before JSON."""
_LEFT_OVER = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w\S*")
"""A word, for counting.  A Chinese or Japanese character counts as a word, since these scripts use no spaces."""
_SEGMENTS = {CHANNEL: "channel", CONSTRAIN: "constrain"}

_NOT_TOOLS = ("assistant", "all", "user")
"""Recipients that are not tools: the model addresses itself or the user."""

_LONG_HEADER_TOKENS = 64
"""Tokens.  A header of this length that holds text is an answer without its markup, and is streamed from then on.  A
header of this length that holds only header words may still be a call: a function name has up to 64 characters, and in
a hexadecimal name each may be a token."""

_LONGEST_HEADER_TOKENS = 256
"""Tokens.  Anything of this length is not a header."""

_LOOK_EVERY_TOKENS = 16
"""Tokens between two checks of a long header: each check reads all of it."""

Repairs: TypeAlias = dict[frames.Repair, None]
"""The kinds of repairs made, each once, in the order of first occurrence: a dict as an ordered set."""


@dataclass
class HarmonyHeader:
    """A header while it arrives: its text, cut into segments at the markers."""

    announced: bool = False
    """True if it began with ``<|start|>``."""
    segments: list[tuple[str, bytearray]] = field(default_factory=lambda: [("start", bytearray())])
    length: int = 0
    """Tokens read so far."""
    repairs: Repairs = field(default_factory=dict)
    """Repairs already known before the words are read."""

    def add(self, token: int, token_bytes: Mapping[int, bytes] | Sequence[bytes]) -> None:
        """Append a text token; a marker begins a new segment, or is a mistake."""
        if token < TEXT_TOKENS:
            self.segments[-1][1].extend(token_bytes[token])
        elif token in _SEGMENTS:
            self.segments.append((_SEGMENTS[token], bytearray()))
        else:
            self.repairs.setdefault("stray marker")
            return
        self.length += 1

    @property
    def is_answer(self) -> bool:
        """True if the header is so long that it is really an answer without its markup."""
        if self.length < _LONG_HEADER_TOKENS or self.length % _LOOK_EVERY_TOKENS:
            return False
        return self._is_whole and (self._holds_text or self.length >= _LONGEST_HEADER_TOKENS)

    @property
    def _is_whole(self) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self.segments[-1][1]))
        return not decoder.getstate()[0]

    @property
    def _holds_text(self) -> bool:
        """True if the words left over after the first marker are text, or all left-over words if there is no marker.

        Text before a marker does not count: the rest of a header may still follow it.
        """
        reading = _read(self)
        return _is_text(reading.text_after if len(self.segments) > 1 else reading.text_before)


@dataclass(slots=True)
class HeaderFields:
    """The meaning of a header: its fields, and the words left over."""

    role: str | None = None
    """The role if it is not ``assistant``: the model writes in the name of the user, a tool or the system."""
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    """The content type, with its marker if it has one."""
    text_before: str = ""
    """Words left over before the first marker."""
    text_after: str = ""
    """Words left over after the first marker."""
    repairs: Repairs = field(default_factory=dict)

    def opening(self, recipients: Recipients) -> Opening:
        """Return the frame that opens the message's item.

        The recipient takes precedence over the channel, as the output of many real models has shown to be right.
        """
        if self.role is not None:
            self.repairs.setdefault("foreign role")
            return frames.ReasoningOpened()
        if self.recipient is not None:
            return self._call(self.recipient, recipients)
        match self.channel:
            case "analysis":
                return frames.ReasoningOpened()
            case "commentary":
                return frames.MessageOpened("commentary")
            case _:
                return frames.MessageOpened("final_answer")

    def _call(self, recipient: str, recipients: Recipients) -> Opening:
        call = recipients.call(recipient)
        if isinstance(call, frames.ReasoningOpened):
            self.repairs.setdefault("undeclared tool")
        return call


def read_header(header: HarmonyHeader, recipients: Recipients) -> HeaderFields:
    """Read a header that ended in ``<|message|>``; noise is dropped from the left-over words."""
    reading = _read(header)
    reading.text_before = _without_tool(reading.text_before, reading, recipients)
    reading.text_after = _without_tool(reading.text_after, reading, recipients)
    reading.text_before = _only_text(reading.text_before, reading)
    text = _only_text(reading.text_after, reading, noise=reading.recipient is not None)
    reading.text_after = text if not text or text[-1].isspace() else f"{text} "
    if not any(marker == "channel" for marker, _ in header.segments):
        reading.repairs.setdefault("missing channel")
    elif reading.channel is None:
        reading.repairs.setdefault("unknown channel")
    return reading


def read_bare(header: HarmonyHeader, *, cut: bool) -> HeaderFields:
    """Read a header that never reached ``<|message|>``: left-over words are text; ``cut`` drops the part of one.

    The beginning of a channel's name after ``<|channel|>`` is no text, even if a mark ends it.
    """
    reading = _read(header, bare=True, cut=cut)
    reading.repairs.setdefault("missing message")
    names_channel = header.segments[-1][0] == "channel" and reading.channel is None
    if names_channel and any(name.startswith(reading.text_after.strip()) for name in _CHANNELS):
        reading.text_after = ""
    text = (reading.text_before + reading.text_after).removeprefix(" ")
    unfinished = cut and any(word.startswith(text.strip()) for word in _MARKUP_WORDS)
    reading.text_before, reading.text_after = "", "" if unfinished or not text.strip() else text
    return reading


def _read(header: HarmonyHeader, *, bare: bool = False, cut: bool = False) -> HeaderFields:
    reading = HeaderFields(repairs=dict(header.repairs))
    last = len(header.segments) - 1
    for position, (marker, raw) in enumerate(header.segments):
        text, _ = codecs.utf_8_decode(raw, "replace", not (cut and position == last))
        at = _read_role(text, reading) if position == 0 else 0
        while match := _WORD.match(text, at):
            kind, word = match.lastgroup, match[match.lastgroup or 0]
            if kind == "recipient":
                _address(word, reading)
            elif kind == "channel" and reading.channel is None:
                reading.channel = "commentary" if word == "comment" else word
            elif kind == "content_type" and reading.content_type is None and (position > 0 or reading.recipient):
                reading.content_type = _content_type(marker, word)
            else:
                break
            at = match.end()
        if marker == "constrain" and reading.content_type is None and (match := _ANY_TYPE.match(text, at)):
            reading.content_type, at = _content_type(marker, match[0].strip()), match.end()
        if position > 0:
            reading.text_after += text[at:]
        elif _speaks_at_once(header, text[:at], text[at:], bare=bare):
            reading.text_before, reading.role, reading.channel = text, None, None
        else:
            reading.text_before = text[at:]
    return reading


def _content_type(marker: str, word: str) -> str:
    return f"<|constrain|>{word}" if marker == "constrain" else word


def _speaks_at_once(header: HarmonyHeader, words: str, rest: str, *, bare: bool) -> bool:
    """Return True if the header words in front of ``rest`` are really the first words of a text."""
    if header.announced or "to=" in words:
        return False
    return bool(rest.strip()) if bare and len(header.segments) == 1 else len(header.segments) > 1 and _is_text(rest)


def _is_text(left_over: str) -> bool:
    words = _LEFT_OVER.findall(left_over)
    return len(words) > 1 and any(word not in _MARKUP_WORDS for word in words)


def _only_text(left_over: str, reading: HeaderFields, *, noise: bool = False) -> str:
    if left_over.strip():
        reading.repairs.setdefault("unexpected header")
    return left_over.removeprefix(" ") if _is_text(left_over) and not noise else ""


def _without_tool(left_over: str, reading: HeaderFields, recipients: Recipients) -> str:
    """Return ``left_over`` without a word that names a tool; that word becomes the recipient."""
    for position, word in enumerate(left_over.split()):
        recipient = word.removeprefix("to=")
        is_known = recipients.knows(recipient) and (position == 0 or "." in recipient)
        is_named = is_known or recipient.startswith("functions.")
        if is_named and reading.recipient in (None, recipient) and reading.channel != "final":
            reading.recipient = recipient
            return left_over.replace(word, "", 1)
    return left_over


def _read_role(text: str, reading: HeaderFields) -> int:
    match = _ROLE.match(text)
    if match is None:
        return 0
    reading.role = match["foreign"] or match["tool"]
    return match.end()


def _address(recipient: str, reading: HeaderFields) -> None:
    if recipient not in _NOT_TOOLS and reading.recipient is None:
        reading.recipient = recipient


def raw(opening: Opening, reading: HeaderFields, text: str) -> dict[str, Any]:
    """Return a message, with its header as understood, in the JSON of openai_harmony's ``Message``."""
    if isinstance(opening, frames.ReasoningOpened | frames.HostedCallOpened):
        channel = "analysis"
    else:
        channel = "final" if isinstance(opening, frames.MessageOpened) else "commentary"
    return raw_message(
        "assistant",
        text,
        channel=reading.channel or channel,
        recipient=reading.recipient,
        content_type=reading.content_type,
    )
