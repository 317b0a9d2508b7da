"""The parsers of chat models that vLLM does not bring: penstock's own, by vLLM's names, and those of the operator.

A parser is a function that makes the reader of one output.  A `CallForm` and a `ThoughtForm` are such functions, so a
description suffices for most families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock.pipeline.frames import CallSyntax
from penstock.pipeline.members import missing_members
from penstock.pipeline.plugins import PARSERS, WrongPlugin, called, function_named, installed, names_code
from penstock.stages.models.chat.inkling import InklingBlocks
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.syntaxes import (
    BareArguments,
    Guarded,
    Joined,
    ListedCalls,
    MakeSyntax,
    OutputStart,
    Syntax,
    TextParser,
)
from penstock.stages.models.chat.thoughts import ThoughtForm

_LLAMA = CallForm(("<|python_tag|>",), is_bare=True)
_LISTED = CallForm(("<tool_calls>",), ("</tool_calls>",))
_DEEPSEEK = CallForm(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    head=r"(?:function<｜tool▁sep｜>)?([^\n<`{]+)(?:<｜tool▁sep｜>|\n```json\s)\s*(?=\{)",
    between=("<｜tool▁call▁end｜>", "```"),
)
FORMS: Mapping[str, CallForm] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "granite": CallForm(("<|tool_call|>", "<tool_call>")),
    "granite-20b-fc": CallForm(("<function_call>",)),
    "apertus": CallForm(("<|tools_prefix|>",), ("<|tools_suffix|>",), is_keyed=True),
    "phi4_mini_json": CallForm(("functools",)),
    "jamba": _LISTED,
    "hunyuan_a13b": _LISTED,
    "xlam": CallForm(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>", "```"), ("```json", "```"), is_bare=True),
    "pythonic": CallForm(is_bare=True, is_python=True),
    "llama4_pythonic": CallForm(("<|python_start|>",), ("<|python_end|>",), is_bare=True, is_python=True),
    "olmo3": CallForm(("<function_calls>",), ("</function_calls>",), is_bare=True, is_python=True),
    "lfm2": CallForm(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_python=True),
    "internlm": CallForm(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)),
}
"""Tool call parsers that lose or garble calls, or take ever longer for each token, with the form of their calls."""

WHOLE: Mapping[str, MakeSyntax] = {"inkling": InklingBlocks}
"""Parsers that read a whole output in place of vLLM's, thoughts and calls."""

OWN: Mapping[str, MakeSyntax] = {**FORMS, **WHOLE}
"""Tool call parsers in whose place penstock reads the calls itself."""

CALLS: Mapping[str, MakeSyntax] = {**FORMS, "hermes": CallForm(("<tool_call>",), ("</tool_call>",))}
"""Tool call parsers that penstock has itself if vLLM is not installed."""

THOUGHTS: Mapping[str, MakeSyntax] = {
    "qwen3": ThoughtForm(is_open=True, ends_at_calls=True),
    "deepseek_r1": ThoughtForm(is_open=True),
    "deepseek_v3": ThoughtForm(),
}
"""Reasoning parsers that penstock has itself if vLLM is not installed."""


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
    made = called(make, name, option, OutputStart(), wanted="one argument, the OutputStart, if it is no description")
    if problems := missing_members(made, TextParser):
        raise WrongPlugin(name, "; ".join(problems), option)
    return OperatorParser(name, make)


def thinking(parser: MakeSyntax | None) -> tuple[str, str] | None:
    """Return the marks around the thoughts that a parser reads; None if it does not say."""
    return getattr(_described(parser), "thinking", None)


def call_marks(parser: MakeSyntax | None) -> tuple[str, ...]:
    """Return the marks that the calls of a parser begin with; none if it does not say."""
    described = _described(parser)
    return described.begins if isinstance(described, CallForm) else ()


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
    after = _calls(calls, syntax, start)
    first = reasoning(start) if reasoning else None
    return Joined(first, after) if first and after else first or after


def _calls(parser: MakeSyntax | None, syntax: CallSyntax, start: OutputStart) -> Syntax | None:
    if syntax == "list":
        return ListedCalls()
    if syntax == "arguments":
        return BareArguments((start.names or [""])[0])
    return parser(start) if parser else None
