"""An output of a model, what an oracle makes of it, and what penstock makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from penstock.pipeline.frames import ChatTurn, FinishReason, GenerationFinished
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import VllmParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.oracles.sources import PARSER_FOLDERS
from tests.support.chat_families import FAMILIES, EndingTemplate, tokenizer_with
from tests.support.parsed_output import parse_chat_frames, parsed_items, token_chunks, turn_started

SIZES = (1, 2, 3, 10**6)
"""Tokens per chunk."""

_MARK = re.compile(r"""["'](<[^"'<>= {}\\]{1,40}>|\[/?[A-Z_]{3,}\]|<[|｜][^"'<>{}\\]{1,40}[|｜]>|<\|"\|>)["']""")
"""A string in vLLM's code that looks like a mark."""

Names: TypeAlias = tuple[str | None, str | None]
"""The names of a parser of reasoning and of one of calls."""


@dataclass(frozen=True)
class Reading:
    """What a reader makes of an output: thoughts, messages, and calls as names and arguments.

    The arguments of a call are None if the oracle does not say.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str | None], ...] = ()

    def equals(self, other: Reading) -> bool:
        """Return True if both are equal but for white space, and for the spelling of JSON."""
        if _closed_up(self.reasoning, self.content) != _closed_up(other.reasoning, other.content):
            return False
        return len(self.calls) == len(other.calls) and all(map(_equal, self.calls, other.calls))


def _closed_up(*texts: str) -> list[str]:
    return ["".join(text.split()) for text in texts]


def _equal(one: tuple[str, str | None], other: tuple[str, str | None]) -> bool:
    is_known = one[1] is not None and other[1] is not None
    return one[0] == other[0] and (not is_known or _value(one[1] or "") == _value(other[1] or ""))


def _value(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except ValueError:
        return arguments


@dataclass(frozen=True)
class Case:
    """An output of the tests of an ``oracle``, and what may be made of it."""

    oracle: str
    family: str
    name: str
    text: str
    expected: tuple[Reading, ...]
    chat: ChatModel = field(repr=False)
    tools: tuple[FunctionTool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    reasons: tuple[FinishReason, ...] = ("stop", "length")
    """The ends that the test may mean: it may end in the middle of an output."""

    def seen(self) -> list[Reading]:
        """Return what penstock makes of the output: one reading, or several if they depend on the chunks.

        The tools and the end are those with which penstock agrees, if there are such: a test may call functions that it
        does not declare.
        """
        called = {name for each in self.expected for name, _ in each.calls} - {tool.name for tool in self.tools}
        declared = (*self.tools, *(FunctionTool(name) for name in sorted(called)))
        ways = list(product([self.tools, declared] if called else [self.tools], self.reasons))
        agreeing = (way for way in ways if self.accepts(self.read(*way)))
        tools, reason = next(agreeing, (declared, self.reasons[0]))
        return list(dict.fromkeys(self.read(tools, reason, size) for size in SIZES))

    def accepts(self, reading: Reading) -> bool:
        """Return True if the oracle reads the output so."""
        return any(reading.equals(each) for each in self.expected)

    def read(self, tools: Sequence[FunctionTool], reason: FinishReason, size: int = 1) -> Reading:
        """Return what penstock makes of the output, in chunks of ``size`` tokens."""
        started = turn_started(
            tools=Toolset(tuple(tools)),
            prompt=tuple(self.chat.vocabulary.encode(self.prompt)),
            chat=ChatTurn(self.variables),
        )
        chunks = token_chunks(self.chat.vocabulary.encode(self.text), size)
        frames = parse_chat_frames(self.chat, [started, *chunks, GenerationFinished(reason, 0, 0.0)])
        texts, calls = {"Reasoning": "", "Message": ""}, list[tuple[str, str | None]]()
        for item in parsed_items(frames):
            if item.kind in texts and "undeclared tool" not in item.repairs:
                texts[item.kind] += item.text
            else:
                calls.append((item.name, item.text))
        return Reading(texts["Reasoning"], texts["Message"], tuple(calls))


@cache
def stand_in(more: frozenset[str] = frozenset()) -> Any:
    """A tokenizer with the marks of all families, and ``more``, in place of those of the hub."""
    code = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]  # it is installed
    files = [path for name in PARSER_FOLDERS for path in sorted((code / name).rglob("*.py"))]
    marks = {mark for path in files for mark in _MARK.findall(path.read_text())}
    marks |= {mark for family in FAMILIES.values() for mark in (*family.ends, *family.marks)} | more
    return tokenizer_with(["</s>", *sorted(marks - {"</s>"})])


@cache
def model_of(parsers: Names, ends: frozenset[str] = frozenset(), marks: frozenset[str] = frozenset()) -> ChatModel:
    """A model with these parsers; raise `UnknownParser` if they do not fit the tokenizer."""
    tokenizer = stand_in(ends | marks)
    vocabulary = Vocabulary(tokenizer)
    all_ends = {end for family in FAMILIES.values() for end in family.ends} | ends
    stops = tuple(vocabulary.marks[end] for end in sorted(all_ends))
    named = tuple(name for name in parsers if name)
    return ChatModel(vocabulary, EndingTemplate(""), VllmParsers(tokenizer, *parsers), stops, {}, named)


def numbered(names: Iterator[str]) -> Iterator[str]:
    """Give each name after its first use a number."""
    count: dict[str, int] = {}
    for name in names:
        count[name] = count.get(name, 0) + 1
        yield name if count[name] == 1 else f"{name} {count[name]}"
