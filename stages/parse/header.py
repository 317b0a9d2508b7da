"""Harmony message headers: what stands between ``<|start|>`` and ``<|message|>``, read with forgiveness.

A header is a few words and markers: a role, ``<|channel|>`` and its name, ``to=`` and a recipient, ``<|constrain|>``
and a content type.  Models write all of them in the wrong place now and then, so the reader takes each word for what
it is, wherever it stands.  Whatever is no such word is left over: noise in a header that ended in ``<|message|>``, and
the message's own text in one that never did.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from pipeline.frames import FunctionCallOpened, MessageOpened, ReasoningOpened, Repair

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
    r"|(?P<tool>[\w.]+)(?= to=assistant\b)"  # the answer of a tool, made up by the model
    r")"
)
_MARKUP_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "text", "python", "to=")
_CONTENT_TYPES = ("json", "code", "text", "python")
_NOBODY = ("assistant", "all", "user")
"""Recipients that are no tool: the model talks to itself or to the user."""

Opening = ReasoningOpened | MessageOpened | FunctionCallOpened


@dataclass
class Header:
    """A header as it is being read: text, cut into segments by the markers in it."""

    segments: list[tuple[str, bytearray]] = field(default_factory=lambda: [("start", bytearray())])
    length: int = 0
    """Tokens read so far."""
    repairs: list[Repair] = field(default_factory=list)
    """What was wrong before its words are read."""

    @property
    def is_whole(self) -> bool:
        """Whether the text so far ends with a whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self.segments[-1][1]))
        return not decoder.getstate()[0]

    def mark(self, marker: str) -> None:
        """Begin a segment behind ``<|channel|>`` or ``<|constrain|>``."""
        self.length += 1
        self.segments.append((marker, bytearray()))

    def add(self, token: bytes) -> None:
        """Take the bytes of one more text token."""
        self.length += 1
        self.segments[-1][1].extend(token)


@dataclass
class Reading:
    """What the words of a header say."""

    role: str | None = None
    """The foreign role, where the model speaks for somebody else."""
    channel: str | None = None
    recipient: str | None = None
    rest: str = ""
    """Everything that is no header word, in order."""
    repairs: list[Repair] = field(default_factory=list)

    def opening(self, tools: frozenset[str]) -> Opening:
        """Which item the message is: the recipient decides before the channel (facts of many real models)."""
        if self.role is not None:
            self.repairs.append("foreign role")
            return ReasoningOpened()
        if self.recipient is not None:
            return self._call(self.recipient, tools)
        match self.channel:
            case "analysis":
                return ReasoningOpened()
            case "commentary":
                return MessageOpened("commentary")
            case _:
                return MessageOpened("final_answer")

    def _call(self, recipient: str, tools: frozenset[str]) -> Opening:
        name = _function_name(recipient, tools)
        if name is None:
            self.repairs.append("undeclared tool")
            return ReasoningOpened()
        return FunctionCallOpened(name)


def read_header(header: Header, tools: frozenset[str]) -> Reading:
    """Read a header that ended in ``<|message|>``; words that fit nowhere are noise."""
    reading = _read(header)
    for word in reading.rest.split():
        if reading.recipient is None and reading.channel != "final" and _names_a_tool(word, tools):
            reading.recipient = word
        else:
            reading.repairs.append("unexpected header")
    if not any(marker == "channel" for marker, _ in header.segments):
        reading.repairs.append("missing channel")
    elif reading.channel is None:
        reading.repairs.append("unknown channel")
    return reading


def read_bare(header: Header, *, cut: bool) -> Reading:
    """Read a header that never came to ``<|message|>``: its rest is the message's text.

    ``cut`` says that generation ended inside it, where half a header word is no text.
    """
    reading = _read(header)
    reading.repairs.append("missing message")
    reading.rest = reading.rest.removeprefix(" ")
    unfinished = cut and any(word.startswith(reading.rest.strip()) for word in _MARKUP_WORDS)
    if unfinished or not reading.rest.strip():
        reading.rest = ""
    return reading


def _read(header: Header) -> Reading:
    reading = Reading(repairs=list(header.repairs))
    content_type: str | None = None
    for position, (marker, raw) in enumerate(header.segments):
        text = raw.decode(errors="replace")
        at = _read_role(text, reading) if position == 0 else 0
        while found := _WORD.match(text, at):
            kind, word = found.lastgroup, found[found.lastgroup or 0]
            if kind == "recipient":
                _address(word, reading)
            elif kind == "channel" and reading.channel is None:
                reading.channel = "commentary" if word == "comment" else word
            elif kind == "content_type" and content_type is None and (position > 0 or reading.recipient):
                content_type = word
            else:
                break
            at = found.end()
        rest = text[at:]
        if marker == "constrain" and content_type is None:  # any one word may name the type
            content_type, _, rest = rest.lstrip().partition(" ")
        reading.rest += rest
    return reading


def _read_role(text: str, reading: Reading) -> int:
    found = _ROLE.match(text)
    if found is None:
        return 0
    reading.role = found["foreign"] or found["tool"]
    return found.end()


def _address(recipient: str, reading: Reading) -> None:
    if recipient not in _NOBODY and reading.recipient is None:
        reading.recipient = recipient


def _names_a_tool(word: str, tools: frozenset[str]) -> bool:
    return word.startswith("functions.") or word in tools


def _function_name(recipient: str, tools: frozenset[str]) -> str | None:
    """The function that a recipient means, or None for a tool that nobody declared."""
    name = recipient.removeprefix("functions.")
    if name in tools:
        return name
    for content_type in _CONTENT_TYPES:  # "functions.get_weatherjson"
        if name.endswith(content_type) and name.removesuffix(content_type) in tools:
            return name.removesuffix(content_type)
    return name if name and recipient.startswith("functions.") else None
