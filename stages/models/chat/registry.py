"""The readers of chat models that are not vLLM's: those of the families in `forms`, and those of the operator.

A parser is a function that makes the reader of one output.  A `CallForm` and a `ThoughtForm` are such functions, so a
description suffices for most families.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from penstock.pipeline.frames import CallSyntax
from penstock.pipeline.members import missing_members
from penstock.pipeline.plugins import PARSERS, WrongPlugin, function_named, installed, made_by, names_code
from penstock.stages.models.chat.call_ids import CallId, id_of_client
from penstock.stages.models.chat.forms import CALL_FORMS, MESSAGE_FORMS, THOUGHT_FORMS
from penstock.stages.models.chat.inkling import InklingBlocks
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import Function
from penstock.stages.models.chat.suffixes import suffix, suffixed, texts
from penstock.stages.models.chat.syntaxes import (
    BareArguments,
    Guarded,
    ListedCalls,
    MakeSyntax,
    OutputStart,
    Syntax,
    TextParser,
)
from penstock.stages.models.chat.thoughts import Turn
from penstock.stages.models.chat.written_calls import chosen

OWN_CALLS: Mapping[str, MakeSyntax] = {**CALL_FORMS, **MESSAGE_FORMS, "inkling": InklingBlocks}
"""The readers of calls, by the names of tool call parsers."""

OWN_THOUGHTS: Mapping[str, MakeSyntax] = {**THOUGHT_FORMS, **MESSAGE_FORMS, "inkling": InklingBlocks}
"""The readers of thoughts, by the names of reasoning parsers."""


@dataclass(frozen=True)
class OperatorParser:
    """A parser of the operator's, by the ``name`` of the option."""

    name: str
    make: Callable[[OutputStart], TextParser]

    def __call__(self, start: OutputStart) -> Syntax:
        """Return a reader that fails quietly: the rest of the output is then text."""
        return Guarded(self.make(start), self.name)

    def __str__(self) -> str:
        return self.name


NamedParser: TypeAlias = str | OperatorParser | None
"""A parser by vLLM's name, or one of the operator's; None for no parser."""


def operator_parser(name: str, option: str) -> OperatorParser | None:
    """Return the parser of the operator's that an ``option`` names; None for the name of another parser.

    It is ``module:name``, ``file.py:name`` or an entry point of the group ``penstock.parsers``: a `CallForm`, a
    `ThoughtForm`, or a function that takes an `OutputStart` and returns a `TextParser`.  Raises `WrongPlugin`.
    """
    if not names_code(name) and name not in installed(PARSERS):
        return None
    make = function_named(name, option, PARSERS)
    made = made_by(make, name, option, OutputStart(), wanted="one argument, the OutputStart, if it is no description")
    if problems := missing_members(made, TextParser):
        raise WrongPlugin(name, "; ".join(problems), option)
    return OperatorParser(name, make)


def made(parser: NamedParser, known: Mapping[str, MakeSyntax], marks: Iterable[str]) -> MakeSyntax | None:
    """Return a parser, if it is one of ``known`` or the operator's, with the ``marks`` as the vocabulary has them."""
    if not isinstance(parser, str):
        return parser
    described, ending = known.get(parser), suffix(marks)
    return suffixed(described, ending) if ending else described


def tokens_of_marks(parsers: Iterable[MakeSyntax | None], marks: Mapping[str, int]) -> Mapping[str, int]:
    """Return the ``marks`` of a vocabulary that the descriptions of some parsers have, with their tokens."""
    described = {text for parser in parsers for text in texts(_described(parser))}
    telling = (mark for mark in marks if len(mark) > 1 and not (mark.isalnum() or mark.isspace() or "`" in mark))
    return {mark: marks[mark] for mark in telling if any(mark in text for text in described)}


def thinking(parser: MakeSyntax | None) -> tuple[str, str] | None:
    """Return the marks around the thoughts that a parser reads; None if it does not say."""
    return getattr(_described(parser), "thinking", None)


def call_id(parser: MakeSyntax | None) -> CallId:
    """Return the function that makes the ids of calls that a parser reads; they are the client's if it does not say."""
    made: CallId = getattr(_described(parser), "call_id", id_of_client)
    return made


def calls_format(
    parser: MakeSyntax | None, functions: Sequence[Function], marks: Container[str], *, parallel: bool
) -> dict[str, Any] | None:
    """Return the format of a family's calls, if its description has it, as `Parsers.calls` does."""
    written = chosen(getattr(_described(parser), "written", ()), marks)
    return written.format(functions, parallel=parallel) if written else None


def _described(parser: MakeSyntax | None) -> object:
    return parser.make if isinstance(parser, OperatorParser) else parser


def reader(
    reasoning: MakeSyntax | None, calls: MakeSyntax | None, syntax: CallSyntax, start: OutputStart
) -> Syntax | None:
    """Return the reader of an output by the parsers of its thoughts and calls; None if there is nothing to read.

    ``syntax`` is the one that the calls of the turn are held to.  If both parsers are the same, one reads all.
    """
    if reasoning and reasoning == calls and syntax == "native":
        return reasoning(start)
    in_answer = _calls(calls, syntax, start)
    first = reasoning(start) if reasoning else None
    if first is None or in_answer is None:
        return first or in_answer
    described = _described(calls)
    whole = partial(described, start, whole=True) if isinstance(described, CallForm) and syntax == "native" else None
    return Turn(first, in_answer, whole)


def _calls(parser: MakeSyntax | None, syntax: CallSyntax, start: OutputStart) -> Syntax | None:
    if syntax == "list":
        return ListedCalls()
    if syntax == "arguments":
        return BareArguments((start.names or [""])[0])
    return parser(start) if parser else None
