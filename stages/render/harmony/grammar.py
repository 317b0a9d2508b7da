"""One grammar over the whole turn of gpt-oss, where a request promises what the model will write.

The prompt ends where the model begins the header of its first message, so the grammar begins there.  It leaves the
model free to think, and to speak before it calls, a few messages long; what it writes in the end is a call of a tool
that may be called, or an answer in the format that was asked for.  Special tokens stand in it by their ids, and no
text can match one.

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
from penstock.stages.models.harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    recipient_of,
)
from penstock.stages.render.answers import STRUCTURAL_TAG, Answer, answer
from penstock.stages.render.constraint import (
    Unenforceable,
    grammar_problem,
    json_body,
    lark_body,
    regex_body,
    schema_problem,
)

MOST_BEFORE = 8
"""Messages ahead of an answer or a call: a model that never wants to come to the point would write on for ever."""

MOST_CALLS = 16
"""Calls in one turn."""

_FREE = "FREE"
_ANY_OBJECT = json_body({"type": "object"})


def grammar(
    tools: Toolset, text_format: Mapping[str, Any], structured: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """The grammar of the next turn; None where there is nothing to enforce.

    ``text_format`` is the request's ``text.format``, ``structured`` its ``structured_outputs``.  Raises
    `InvalidRequest` for what cannot be enforced.
    """
    if STRUCTURAL_TAG in structured:
        raise UnsupportedParameter(
            "This model has a markup of its own: give no structural tag.", param=f"structured_outputs.{STRUCTURAL_TAG}"
        )
    asked = answer(text_format, structured)
    final = asked.body if asked else _FREE
    if not asked and not is_bound(tools):
        return None
    calls = {recipient_of(tool): _rule(tool) for tool in tools.callable}
    must_call = bool(calls) and tools.choice == "required"
    turn = _turn(calls, None if must_call else final, parallel=tools.parallel)
    try:
        problem = grammar_problem(turn)
    except Unenforceable as error:
        problem = str(error)
    if problem:
        _blame(tools, asked, problem)
    return turn


def is_bound(tools: Toolset) -> bool:
    """Whether anything is promised of the calls."""
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


# What stands in the messages


@dataclass(frozen=True)
class _Rule:
    """What calls of a tool must look like: their channel, the word for the form of their input, and the input."""

    channel: str
    kind: str
    body: str


def _rule(tool: Tool) -> _Rule:
    """The rule for calls of ``tool``; the built-in tools are called in the middle of a thought, as it was taught."""
    body = _input(tool)
    if isinstance(tool, HostedTool):
        return _Rule("analysis", "code" if body == _FREE else "form", body)
    return _Rule("commentary", "json" if body.startswith("%json") else "code", body)


def _input(tool: Tool) -> str:
    """What the input of a call of ``tool`` must be; nobody promises anything of those that this server runs."""
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


# What is wrong


def _blame(tools: Toolset, asked: Answer | None, problem: str) -> None:
    """Raise `InvalidRequest` for the schema that is the reason for ``problem``, or for all of them together."""
    if asked:
        asked.refuse_wrong_schema()
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
    """The grammar of a turn; ``calls`` are recipients and how they are called, ``final`` None where one must call."""
    ends = [*(["final"] if final else []), *(["calls"] if calls else [])]
    befores = ["thought", *(["preamble"] if calls or final == _FREE else [])]
    rules = [
        f"start: before{{0,{MOST_BEFORE}}} ({' | '.join(ends)})",
        f"before: ({' | '.join(befores)}) next",
        f'next: <[{END}]> <[{START}]> "assistant"',
        f'thought: <[{CHANNEL}]> "analysis" <[{MESSAGE}]> {_FREE}',
        rf"{_FREE}: /(.|\n)*/",
    ]
    if len(befores) > 1:
        rules.append(f'preamble: <[{CHANNEL}]> "commentary" <[{MESSAGE}]> {_FREE}')
    if final:
        marked = "" if not final.startswith("%json") else f' (" " <[{CONSTRAIN}]> "json")?'
        rules.append(f'final: <[{CHANNEL}]> "final"{marked} <[{MESSAGE}]> answer <[{RETURN}]>')
        rules.append(f"answer: {final}")
    return "\n".join([*rules, *(_calls(calls, parallel=parallel) if calls else ())]) + "\n"


def _calls(calls: Mapping[str, _Rule], *, parallel: bool) -> list[str]:
    more = f" (next before{{0,{MOST_BEFORE}}} call){{0,{MOST_CALLS - 1}}}" if parallel else ""
    bodies = dict.fromkeys(rule.body for rule in calls.values())
    names = {body: f"input{at}" for at, body in enumerate(bodies)}
    return [
        f"calls: call{more} <[{CALL}]>",
        f"call: {' | '.join(f'call{at}' for at in range(len(calls)))}",
        *(f"call{at}: {_call(*call, names)}" for at, call in enumerate(calls.items())),
        *(f"{name}: {body}" for body, name in names.items()),
        *(f'{kind}: " {kind}" | " " <[{CONSTRAIN}]> "{kind}"' for kind in ("json", "code")),
        *(["form: code | json"] if any(rule.kind == "form" for rule in calls.values()) else []),
    ]


def _call(recipient: str, rule: _Rule, names: Mapping[str, str]) -> str:
    """A call whose header names the recipient behind the channel, or ahead of it."""
    behind, ahead = (json.dumps(f"{channel} to={recipient}") for channel in (rule.channel, ""))
    headers = f'<[{CHANNEL}]> {behind} {rule.kind} | {ahead} <[{CHANNEL}]> "{rule.channel}" {rule.kind}'
    return f"({headers}) <[{MESSAGE}]> {names[rule.body]}"


WARM_UP = _turn({}, _ANY_OBJECT, parallel=False)
"""The smallest grammar there is: an engine's first one takes seconds, whatever it says."""
