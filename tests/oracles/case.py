"""An output of a model, what an oracle makes of it, and what penstock makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from penstock.pipeline.frames import ChatTurn, FinishReason, GenerationFinished, ParsedFrame
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.oracles.sources import PARSER_FOLDERS
from tests.support.chat_families import FAMILIES, EndingTemplate, tokenizer_with
from tests.support.parsed_output import (
    OPENINGS,
    parse_chat_frames,
    parse_harmony_frames,
    parsed_items,
    token_chunks,
    turn_started,
)

SIZES = (1, 2, 3, 10**6)
"""Tokens per chunk."""

_MARK = re.compile(r"""["'](<[^"'<>= {}\\]{1,40}>|\[/?[A-Z_]{3,}\]|<[|｜][^"'<>{}\\]{1,40}[|｜]>|<\|"\|>)["']""")
"""A string in vLLM's code that looks like a mark."""

Names: TypeAlias = tuple[str | None, str | None]
"""The names of a parser of reasoning and of one of calls."""


@dataclass(frozen=True)
class Reading:
    """The reading of an output: thoughts, messages, and calls as names and arguments.

    What the oracle does not say is None.
    """

    reasoning: str | None = ""
    content: str | None = ""
    calls: tuple[tuple[str, str | None], ...] = ()

    def equals(self, other: Reading) -> bool:
        """Return True if both are equal but for the spelling of JSON, and for white space at the ends of texts.

        Calls cut texts, so that white space beside them does not count: with calls, none does.
        """
        spelled = _closed_up if self.calls else str.strip
        texts = ((self.reasoning, other.reasoning), (self.content, other.content))
        arguments = [(one, two) for (_, one), (_, two) in zip(self.calls, other.calls, strict=False)]
        return (
            [name for name, _ in self.calls] == [name for name, _ in other.calls]
            and all(spelled(one) == spelled(two) for one, two in texts if one is not None and two is not None)
            and all(_value(one) == _value(two) for one, two in arguments if one is not None and two is not None)
        )


def _closed_up(text: str) -> str:
    return "".join(text.split())


def _value(arguments: str) -> str:
    """Return a spelling of JSON that equal values share: 5.0 equals 5, but true does not equal 1."""
    try:
        return json.dumps(json.loads(arguments or "{}", parse_float=_number), sort_keys=True)
    except ValueError:
        return arguments


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def _number(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


@dataclass(frozen=True)
class Case:
    """An output of the tests of an ``oracle``, and what may be made of it."""

    oracle: str
    family: str
    name: str
    text: str
    expected: tuple[Reading, ...]
    chat: ChatModel | None = field(repr=False)
    """The model; None for a gpt-oss."""
    tools: tuple[FunctionTool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    reason: FinishReason = "stop"
    """The end of the output, by the test; a test that does not say means the end of the turn."""
    renders_by_default: bool = False
    """True if the template renders the same prompt without the variables, which then may make no difference."""

    def seen(self) -> list[Reading]:
        """Return what penstock makes of the output: one reading, or several if they depend on more than it should."""
        readings = [self.read(size) for size in SIZES]
        if self.renders_by_default:
            readings.append(replace(self, variables={}).read())
        return list(dict.fromkeys(readings))

    def broken(self) -> list[str]:
        """Return the arguments of completed calls that are no JSON object, if the model ends its turn here."""
        items = parsed_items(replace(self, reason="stop").frames())
        return [
            item.text for item in items if item.kind == "FunctionCall" and item.complete and not _is_object(item.text)
        ]

    def declared(self) -> tuple[FunctionTool, ...]:
        """Return the tools of the test; those that the output calls, if the test declares none at all."""
        called = {name for each in self.expected for name, _ in each.calls}
        return self.tools or tuple(map(FunctionTool, sorted(called)))

    def accepts(self, reading: Reading) -> bool:
        """Return True if the oracle reads the output so."""
        return any(reading.equals(each) for each in self.expected)

    def read(self, size: int = 1) -> Reading:
        """Return what penstock makes of the output, in chunks of ``size`` tokens."""
        return read_frames(self.frames(size))

    def frames(self, size: int = 1) -> list[ParsedFrame]:
        """Return what the stage `parse` makes of the output."""
        names = Toolset(self.declared())
        if self.chat is None:
            encoding = load_encoding()
            chunks = token_chunks(encoding.encode_markup(self.text), size)
            end = GenerationFinished(self.reason, 0, 0.0)
            return parse_harmony_frames(encoding, [turn_started(tools=names), *chunks, end])
        encode = self.chat.vocabulary.encode
        started = turn_started(tools=names, prompt=tuple(encode(self.prompt)), chat=ChatTurn(self.variables))
        chunks = token_chunks(encode(self.text), size)
        return parse_chat_frames(self.chat, [started, *chunks, GenerationFinished(self.reason, 0, 0.0)])


def read_frames(frames: Sequence[ParsedFrame]) -> Reading:
    """Return what parsed frames hold; the call of an undeclared tool is a thought with a recipient."""
    texts, calls = {"Reasoning": "", "Message": ""}, list[tuple[str, str | None]]()
    openings = (frame for frame in frames if isinstance(frame, OPENINGS))
    for opening, item in zip(openings, parsed_items(frames), strict=True):
        recipient = getattr(opening, "recipient", None)
        if item.kind in texts and recipient is None:
            texts[item.kind] += item.text
        else:
            calls.append((recipient or item.name, item.text))
    return Reading(texts["Reasoning"], texts["Message"], tuple(calls))


@cache
def stand_in(more: frozenset[str] = frozenset(), without: frozenset[str] = frozenset()) -> Any:
    """A tokenizer with the marks of all families, and ``more``, but ``without`` some, in place of those of the hub."""
    code = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]  # it is installed
    files = [path for name in PARSER_FOLDERS for path in sorted((code / name).rglob("*.py"))]
    marks = {mark for path in files for mark in _MARK.findall(path.read_text())}
    marks |= {mark for family in FAMILIES.values() for mark in (*family.ends, *family.marks)} | more
    return tokenizer_with(["</s>", *sorted(marks - without - {"</s>"})])


@cache
def model_of(
    parsers: Names,
    ends: frozenset[str] = frozenset(),
    marks: frozenset[str] = frozenset(),
    without: frozenset[str] = frozenset(),
) -> ChatModel:
    """A model with these parsers; raise `UnknownParser` if they do not fit the tokenizer."""
    tokenizer = stand_in(ends | marks, without)
    vocabulary = Vocabulary(tokenizer)
    all_ends = {end for family in FAMILIES.values() for end in family.ends} | ends
    stops = tuple(vocabulary.marks[end] for end in sorted(all_ends))
    named = tuple(name for name in parsers if name)
    return ChatModel(vocabulary, EndingTemplate(""), NamedParsers(tokenizer, *parsers), stops, {}, named)


def tool_of(described: dict[str, Any]) -> FunctionTool:
    """Return a tool as the tests of other servers describe it."""
    function = described.get("function", described)
    return FunctionTool(function["name"], parameters=function.get("parameters") or {})


def numbered(names: Iterator[str]) -> Iterator[str]:
    """Give each name after its first use a number."""
    count: dict[str, int] = {}
    for name in names:
        count[name] = count.get(name, 0) + 1
        yield name if count[name] == 1 else f"{name} {count[name]}"
