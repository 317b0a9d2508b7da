"""One grammar over the whole turn of a chat model, for requests that constrain what the model writes.

The prompt may end in the middle of a thought, or leave the model free to think.  The thought is not constrained.  After
it comes an answer in the requested format, or calls of allowed tools in the model's own markup, if the description of
the family or vLLM has a format of it.  If neither has, calls are a JSON list, or the bare arguments of the only tool
that must be called.  A model with undescribed markup that may also answer freely is only constrained if the request
limits the tools; otherwise ``strict`` is not enforced.

    start: (thought <white space>)? (answer | calls) <end of turn>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import CallSyntax, ResolvedRequest, TokenIds
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Tool, Toolset
from penstock.stages.models.chat.model import ChatModel, Function
from penstock.stages.models.chat.names import ToolNames, text_argument
from penstock.stages.render import constraint
from penstock.stages.render.chat.lark_rules import SPACE, Free, Mark, Part, Rules, Words
from penstock.stages.render.chat.tags import Format, Tags, Undescribed, lead, of_calls, structural_tag, without
from penstock.stages.render.constraint import ANY_OBJECT, MOST_CALLS, STRUCTURAL_TAG, Constraint, Unenforceable

_TAIL_TOKENS = 64
"""Tokens at the end of a prompt to check for an open thought."""


def grammar(
    chat: ChatModel,
    request: ResolvedRequest,
    functions: Sequence[Function],
    prompt_ids: TokenIds,
    *,
    continues: bool = False,
    thinks: bool = False,
) -> tuple[str | None, CallSyntax]:
    """Return the grammar of the next turn, or None if there is nothing to enforce, and the syntax of its calls.

    ``functions`` are all functions that the prompt shows.  With ``continues``, the turn begins in an answer, and with
    ``thinks`` in a thought.  A custom tool's Lark grammar is shown to the model with the
    tool, but not enforced: the tool's text is an argument within JSON.  Raises `InvalidRequest` for a constraint that
    cannot be enforced.
    """
    structured = request.facts.structured
    answer = constraint.answer(request.facts.text_format, structured)
    tag = structured.get(STRUCTURAL_TAG)
    opening = partial(_opening, chat=chat, prompt_ids=prompt_ids, thinks=thinks) if not continues else _no_opening

    def made(tools: Toolset) -> tuple[str | None, CallSyntax]:
        if not answer and tag is None and not constraint.is_bound(tools):
            return None, "native"
        holds_all = constraint.holds_all(tools)
        try:
            return _Turn(chat, tools, answer, holds_all=holds_all).made(opening, functions, tag)
        except constraint.UnenforceableTogether:
            if not holds_all:
                raise
            return _Turn(chat, tools, answer, holds_all=False).made(opening, functions, tag)

    return constraint.at_level(request.facts.tools, made)


def holds_optional_calls(chat: ChatModel) -> bool:
    """Return True if a grammar can hold calls that the model may omit."""
    try:
        return bool(_Turn(chat, Toolset(), None, holds_all=False).lead)
    except Undescribed:
        return False


def _no_opening(rules: Rules) -> list[Part]:
    return []


def _opening(rules: Rules, chat: ChatModel, prompt_ids: TokenIds, *, thinks: bool) -> list[Part]:
    """Return the parts for the thought before all else, and for the white space after it; none if it has ended."""
    if chat.parsers.thinking is None:
        return []
    begin, end = chat.parsers.thinking
    tail = chat.vocabulary.decode(prompt_ids[-_TAIL_TOKENS:]).rstrip()
    if tail.endswith(end.strip()) and not thinks:
        return []
    rest: list[Part] = [Free(), *rules.literal(end), rules.body(SPACE)]
    if thinks or (begin and tail.endswith(begin.strip())):
        return rest
    return [rules.either([[*rules.literal(begin), *rest]], "?")]


@dataclass(frozen=True)
class _Callable:
    """A tool that may be called: its name, and the schema that its arguments are held to, if any."""

    name: str
    tool: Tool
    schema: Mapping[str, Any] | None

    @property
    def body(self) -> str:
        return ANY_OBJECT if self.schema is None else constraint.json_body(self.schema)

    def function(self, shown: Mapping[str, Function]) -> Function:
        parameters = self.schema or shown.get(self.name, {}).get("parameters")
        return _function(self.name, parameters, strict=self.schema is not None)


class _Turn:
    """A turn; if it ``holds_all``, the schemas of all functions hold, else only those of strict ones."""

    def __init__(self, chat: ChatModel, tools: Toolset, answer: Constraint | None, *, holds_all: bool) -> None:
        self.rules = Rules(chat.vocabulary)
        self._chat = chat
        self._tools = tools
        self._answer = answer
        self._tags = Tags(self.rules, MOST_CALLS)
        names = ToolNames(tools)
        self._callable = [
            _Callable(names.of(tool), tool, _schema(tool, holds_all=holds_all)) for tool in tools.callable
        ]

    def made(
        self, opening: Callable[[Rules], list[Part]], functions: Sequence[Function], tag: str | Format | None
    ) -> tuple[str | None, CallSyntax]:
        """Return the grammar, or None if there is nothing to enforce, and the syntax of its calls."""
        branches, syntax = self.branches(functions) if tag is None else (self.tagged(tag), "native")
        if not branches:
            return None, syntax
        text = self.grammar(opening(self.rules), branches)
        self.check(text)
        return text, syntax

    def branches(self, functions: Sequence[Function]) -> tuple[list[list[Part]], CallSyntax]:
        """Return the alternatives after the thought, none if nothing is enforced, and the syntax of calls in them."""
        answers = [] if self._must_call else [self._final()]
        if not self._callable:
            return answers, "native"
        try:
            return self._native(answers, functions), "native"
        except Undescribed:
            return self._undescribed(answers)
        except Unenforceable as error:
            message = f"The tools of this request cannot be enforced: {error}."
            raise constraint.UnenforceableTogether(message, param="tools") from error

    def tagged(self, tag: str | Format) -> list[list[Part]]:
        """Return the alternatives for a client's structural tag: a single one."""
        param = f"structured_outputs.{STRUCTURAL_TAG}"
        if constraint.is_bound(self._tools):
            raise InvalidRequest("A structural tag cannot be combined with limits on tool calls.", param=param)
        try:
            return [Tags(self.rules).parts(structural_tag(tag))]
        except Undescribed as error:
            raise constraint.unenforceable(param, f"the format {shortened(str(error))!r} is not supported") from error
        except Unenforceable as error:
            raise constraint.unenforceable(param, str(error)) from error

    def grammar(self, opening: Iterable[Part], branches: Iterable[Iterable[Part]]) -> str:
        ends = [[Mark(token)] for token in self._chat.stop_token_ids]
        turn = [*opening, self.rules.either(branches), *([self.rules.either(ends)] if ends else [])]
        return self.rules.grammar(self.rules.joined(turn))

    def check(self, text: str) -> None:
        constraint.check(text, self._answer, ((called.tool, called.body) for called in self._callable))

    @property
    def _must_call(self) -> bool:
        return bool(self._callable) and self._tools.choice == "required"

    def _final(self) -> list[Part]:
        return [self.rules.body(self._answer.body)] if self._answer else [Free()]

    # Calls

    def _native(self, answers: list[list[Part]], functions: Sequence[Function]) -> list[list[Part]]:
        """Return the alternatives with calls in the model's own markup.  Raises `Undescribed` and `Unenforceable`."""
        shown = {function["function"]["name"]: function["function"] for function in functions}
        calls = self._calls([called.function(shown) for called in self._callable])
        if self._must_call or self._answer:
            return [*answers, self._tags.parts(calls)]
        begin = self.lead
        if not begin:
            raise Undescribed
        text = Free(excluded=(begin,))
        return [[text], [Free(), *self.rules.literal(begin), *self._tags.parts(without(calls, begin))]]

    @property
    def lead(self) -> str:
        """The text with which all calls begin; empty if it is not known.  Raises `Undescribed`."""
        return lead(self._calls([_function(name, None, strict=False) for name in ("a", "b")]))

    def _calls(self, functions: Sequence[Function]) -> Format:
        described = self._chat.parsers.calls(functions, parallel=self._tools.parallel)
        if described is None:
            raise Undescribed
        return of_calls(described)

    def _undescribed(self, answers: list[list[Part]]) -> tuple[list[list[Part]], CallSyntax]:
        """Return the alternatives with calls in JSON; none if the request limits neither the answer nor the tools."""
        if not self._must_call and not self._answer and self._tools.allowed is None:
            return [], "native"
        if self._must_call and len(self._callable) == 1:
            return [[self.rules.body(self._callable[0].body)]], "arguments"
        one = self.rules.either(self._listed(called) for called in self._callable)
        more = self.rules.either([[Words(", "), one]], f"{{0,{MOST_CALLS - 1}}}")
        listed: list[Part] = [Words("["), one, *([more] if self._tools.parallel else []), Words("]")]
        return [*answers, listed], "list"

    def _listed(self, called: _Callable) -> list[Part]:
        head = f'{{"name": {json.dumps(called.name)}, "parameters": '
        return [Words(head), self.rules.body(called.body), Words("}")]


def _function(name: str, parameters: Mapping[str, Any] | None, *, strict: bool) -> Function:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _schema(tool: Tool, *, holds_all: bool) -> Mapping[str, Any] | None:
    """Return the schema for the arguments of ``tool`` if they must match one, else None.

    The arguments of strict functions, of all if it ``holds_all``, and of tools that take one plain text do.
    """
    try:
        match tool, text_argument(tool):
            case FunctionTool(strict=True, parameters=dict() as parameters), _:
                constraint.json_body(parameters)
                return parameters
            case FunctionTool(parameters=dict() as parameters), _ if holds_all:
                return constraint.arguments_schema(parameters)
            case _, str(argument):
                text = {"type": "string", **(_pattern(tool) if isinstance(tool, CustomTool) else {})}
                fields = {"properties": {argument: text}, "required": [argument]}
                return {"type": "object", **fields, "additionalProperties": False}
            case _:
                return None
    except Unenforceable as error:
        raise constraint.UnenforceableTool(tool, str(error)) from error


def _pattern(tool: CustomTool) -> Mapping[str, str]:
    """Return the schema keyword for the tool's regular expression; a Lark grammar is checked, but not enforced."""
    if tool.grammar is None:
        return {}
    constraint.tool_body(tool.grammar)
    return {"pattern": f"^(?:{tool.grammar.definition})$"} if tool.grammar.syntax == "regex" else {}
