"""One grammar over the whole turn of gpt-oss, for requests that constrain what the model writes.

The prompt ends inside the header of the model's first message, so the grammar begins there.  The model may first think,
and speak before a call, in a limited number of messages.  It must end with a call of an allowed tool, or with an answer
in the requested format.  The grammar names special tokens by id, so that no text can match one.

    start:  before{0,n} (final | calls)
    before: (thought | preamble) next
    calls:  call (next before{0,n} call){0,m} <|call|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.pipeline.errors import UnsupportedParameter
from penstock.pipeline.hosted_kinds import takes_text
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, HostedTool, McpTool, Tool, Toolset
from penstock.stages.models.harmony import vocabulary
from penstock.stages.render import constraint
from penstock.stages.render.constraint import ANY_OBJECT, MOST_CALLS, STRUCTURAL_TAG, is_json

MOST_BEFORE = 8
"""The most messages before an answer or a call: without a limit, a model might never come to the point."""

_FREE = "FREE"


def grammar(
    tools: Toolset, text_format: Mapping[str, Any], structured: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the grammar of the next turn; None if there is nothing to enforce.

    ``text_format`` is the request's ``text.format``, ``structured`` its ``structured_outputs``.  Raises
    `InvalidRequest` for a constraint that cannot be enforced.
    """
    if STRUCTURAL_TAG in structured:
        raise UnsupportedParameter(
            "This model does not support structural tags: it has a markup of its own.",
            param=f"structured_outputs.{STRUCTURAL_TAG}",
        )
    answer = constraint.answer(text_format, structured)
    return constraint.at_level(tools, lambda held: _made(held, answer))


def _made(tools: Toolset, answer: constraint.Constraint | None) -> str | None:
    if not answer and not constraint.is_bound(tools):
        return None
    holds_all = constraint.holds_all(tools)
    try:
        return _checked(tools, answer, holds_all=holds_all)
    except constraint.UnenforceableTogether:
        if not holds_all:
            raise
        return _checked(tools, answer, holds_all=False)


def _checked(tools: Toolset, answer: constraint.Constraint | None, *, holds_all: bool) -> str:
    """Return the grammar of a turn; if it ``holds_all``, the schemas of all functions hold, else of strict ones."""
    final = answer.body if answer else _FREE
    inputs = [(tool, _input(tool, holds_all=holds_all)) for tool in tools.callable]
    calls = {vocabulary.recipient_of(tool): _rule(tool, body) for tool, body in inputs}
    must_call = bool(calls) and tools.choice == "required"
    turn = _turn(calls, None if must_call else final, parallel=tools.parallel)
    constraint.check(turn, answer, inputs)
    return turn


# The contents of messages


@dataclass(frozen=True)
class _Rule:
    """The form of a tool's calls: their channel, and rules for the content type and the input."""

    channel: str
    kind: str
    body: str


def _rule(tool: Tool, body: str) -> _Rule:
    """The rule for calls of ``tool``.  Built-in tools are called on the analysis channel, as in gpt-oss's training."""
    if isinstance(tool, HostedTool):
        return _Rule("analysis", "code" if body == _FREE else "form", body)
    return _Rule("commentary", "json" if is_json(body) else "code", body)


def _input(tool: Tool, *, holds_all: bool) -> str:
    """Return the rule body for the input of ``tool``; the input of tools that this server runs follows no schema."""
    try:
        match tool:
            case FunctionTool(parameters=parameters) if tool.strict and parameters is not None:
                return constraint.json_body(parameters)
            case FunctionTool(parameters=dict() as parameters) if holds_all:
                return constraint.json_body(constraint.arguments_schema(parameters))
            case CustomTool(grammar=Grammar() as rule):
                return constraint.tool_body(rule)
            case CustomTool():
                return _FREE
            case HostedTool() if takes_text(tool):
                return _FREE
            case FunctionTool() | McpTool() | HostedTool():
                return ANY_OBJECT
    except constraint.Unenforceable as error:
        raise constraint.UnenforceableTool(tool, str(error)) from error


# The turn


def _turn(calls: Mapping[str, _Rule], final: str | None, *, parallel: bool) -> str:
    """Return the grammar of a turn.

    ``calls`` are the rules for the allowed tools, by recipient.  ``final`` is the rule body for the answer; None if
    the model must call a tool.
    """
    ends = [*(["final"] if final else []), *(["calls"] if calls else [])]
    openings = ["thought", *(["preamble"] if calls or final == _FREE else [])]
    rules = [
        f"start: before{{0,{MOST_BEFORE}}} ({' | '.join(ends)})",
        f"before: ({' | '.join(openings)}) next",
        f'next: <[{vocabulary.END}]> <[{vocabulary.START}]> "assistant"',
        f'thought: <[{vocabulary.CHANNEL}]> "analysis" <[{vocabulary.MESSAGE}]> {_FREE}',
        rf"{_FREE}: /(.|\n)*/",
    ]
    if len(openings) > 1:
        rules.append(f'preamble: <[{vocabulary.CHANNEL}]> "commentary" <[{vocabulary.MESSAGE}]> {_FREE}')
    if final:
        marked = f' (" " <[{vocabulary.CONSTRAIN}]> "json")?' if is_json(final) else ""
        rules.append(
            f'final: <[{vocabulary.CHANNEL}]> "final"{marked} <[{vocabulary.MESSAGE}]> answer <[{vocabulary.RETURN}]>'
        )
        rules.append(f"answer: {final}")
    return "\n".join([*rules, *(_calls(calls, parallel=parallel) if calls else ())]) + "\n"


def _calls(calls: Mapping[str, _Rule], *, parallel: bool) -> list[str]:
    more = f" (next before{{0,{MOST_BEFORE}}} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
    bodies = dict.fromkeys(rule.body for rule in calls.values())
    names = {body: f"input{at}" for at, body in enumerate(bodies)}
    return [
        f"calls: call{more} <[{vocabulary.CALL}]>",
        f"call: {' | '.join(f'call{at}' for at in range(len(calls)))}",
        *(f"call{at}: {_call(*call, names)}" for at, call in enumerate(calls.items())),
        *(f"{name}: {body}" for body, name in names.items()),
        *(f'{kind}: " {kind}" | " " <[{vocabulary.CONSTRAIN}]> "{kind}"' for kind in ("json", "code")),
        *(["form: code | json"] if any(rule.kind == "form" for rule in calls.values()) else []),
    ]


def _call(recipient: str, rule: _Rule, names: Mapping[str, str]) -> str:
    after, before = (json.dumps(f"{channel} to={recipient}") for channel in (rule.channel, ""))
    headers = (
        f'<[{vocabulary.CHANNEL}]> {after} {rule.kind} | {before} <[{vocabulary.CHANNEL}]> "{rule.channel}" {rule.kind}'
    )
    return f"({headers}) <[{vocabulary.MESSAGE}]> {names[rule.body]}"


WARM_UP = _turn({}, ANY_OBJECT, parallel=False)
"""A minimal grammar to warm up an engine: its first grammar takes seconds, however small."""
