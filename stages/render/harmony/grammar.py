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

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Tool, Toolset
from penstock.stages.models.harmony import vocabulary
from penstock.stages.render.constraint import (
    STRUCTURAL_TAG,
    Answer,
    Unenforceable,
    answer,
    grammar_problem,
    json_body,
    lark_body,
    regex_body,
    schema_problem,
)

MOST_BEFORE = 8
"""The most messages before an answer or a call: without a limit, a model might never come to the point."""

MOST_CALLS = 16
"""The most calls in one turn."""

_FREE = "FREE"
_ANY_OBJECT = json_body({"type": "object"})


def grammar(
    tools: Toolset, text_format: Mapping[str, Any], structured: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Return the grammar of the next turn; None if there is nothing to enforce.

    ``text_format`` is the request's ``text.format``, ``structured`` its ``structured_outputs``.  Raises
    `InvalidRequest` for a constraint that cannot be enforced.
    """
    if STRUCTURAL_TAG in structured:
        raise UnsupportedParameter(
            "This model has a markup of its own: give no structural tag.", param=f"structured_outputs.{STRUCTURAL_TAG}"
        )
    constraint = answer(text_format, structured)
    final = constraint.body if constraint else _FREE
    if not constraint and not is_bound(tools):
        return None
    calls = {vocabulary.recipient_of(tool): _rule(tool) for tool in tools.callable}
    must_call = bool(calls) and tools.choice == "required"
    turn = _turn(calls, None if must_call else final, parallel=tools.parallel)
    try:
        problem = grammar_problem(turn)
    except Unenforceable as error:
        problem = str(error)
    if problem:
        _blame(tools, constraint, problem)
    return turn


def is_bound(tools: Toolset) -> bool:
    """Return True if the request constrains calls in any way."""
    if tools.choice == "none":
        return False
    if tools.choice == "required" or tools.allowed is not None:
        return True
    return any(not tools.parallel or _is_strict(tool) for tool in tools.callable)


def _is_strict(tool: Tool) -> bool:
    match tool:
        case FunctionTool():
            return tool.strict is True
        case CustomTool():
            return tool.grammar is not None
        case McpTool() | HostedTool():
            return False


# The contents of messages


@dataclass(frozen=True)
class _Rule:
    """The form of a tool's calls: the channel, the rule for the content type, and the rule body for the input."""

    channel: str
    kind: str
    body: str


def _rule(tool: Tool) -> _Rule:
    """The rule for calls of ``tool``.  Built-in tools are called on the analysis channel, as in gpt-oss's training."""
    body = _input(tool)
    if isinstance(tool, HostedTool):
        return _Rule("analysis", "code" if body == _FREE else "form", body)
    return _Rule("commentary", "json" if body.startswith("%json") else "code", body)


def _input(tool: Tool) -> str:
    """Return the rule body for the input of ``tool``; the input of tools that this server runs follows no schema."""
    try:
        match tool:
            case FunctionTool():
                return _function_input(tool)
            case CustomTool():
                return _custom_input(tool)
            case McpTool():
                return _ANY_OBJECT
            case HostedTool(namespace=kind):
                return _FREE if kind == "python" else _ANY_OBJECT
    except Unenforceable as error:
        raise _bad_tool(tool, str(error)) from error


def _function_input(tool: FunctionTool) -> str:
    return json_body(tool.parameters) if tool.strict and tool.parameters is not None else _ANY_OBJECT


def _custom_input(tool: CustomTool) -> str:
    if tool.grammar is None:
        return _FREE
    return (lark_body if tool.grammar.syntax == "lark" else regex_body)(tool.grammar.definition)


# Errors


def _blame(tools: Toolset, constraint: Answer | None, problem: str) -> None:
    """Raise `InvalidRequest` for the schema that causes ``problem``, or for all of them if each is right by itself."""
    if constraint:
        constraint.refuse_wrong_schema()
    for tool in tools.callable:
        if (body := _input(tool)).startswith("%json") and (reason := schema_problem(body)):
            raise _bad_tool(tool, reason)
    raise InvalidRequest(f"The formats of this request cannot be enforced together: {problem}.", param="tools")


def _bad_tool(tool: Tool, reason: str) -> InvalidRequest:
    what = "parameters" if isinstance(tool, FunctionTool) else "format"
    return InvalidRequest(
        f"The {what} of the tool {shortened(tool.name)!r} cannot be enforced: {reason}.", param="tools"
    )


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
        marked = "" if not final.startswith("%json") else f' (" " <[{vocabulary.CONSTRAIN}]> "json")?'
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
    """The expression for a call, whose header may name the recipient after the channel or before it."""
    after, before = (json.dumps(f"{channel} to={recipient}") for channel in (rule.channel, ""))
    headers = (
        f'<[{vocabulary.CHANNEL}]> {after} {rule.kind} | {before} <[{vocabulary.CHANNEL}]> "{rule.channel}" {rule.kind}'
    )
    return f"({headers}) <[{vocabulary.MESSAGE}]> {names[rule.body]}"


WARM_UP = _turn({}, _ANY_OBJECT, parallel=False)
"""A minimal grammar to warm up an engine: its first grammar takes seconds, however small."""
