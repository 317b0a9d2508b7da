"""Items as text for models of any kind: instructions, calls and their results.

The functions here rebuild a result from its item.  Callers prefer the exact text that the model read, if it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, TypeVar

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.pairs import callers_of
from penstock.pipeline.protocol.tools import Tool, ToolKey, keys_of, tool_key

PENDING = "The function is running. Its output comes later."
"""The text that the model reads at once as the output of an asynchronous call."""

OneTool = TypeVar("OneTool", bound=Tool)

json_text = json.JSONEncoder(ensure_ascii=False).encode


_SUMMARY = (
    "The conversation before this point was compacted. Messages of the user stand above as they were. "
    "This is a summary of all the rest:\n\n{}\n\nGo on from there, and do not repeat what is done."
)


def summary_of(compaction: items.Compaction, results: Mapping[str, str]) -> str:
    """Return the text in place of all that a compaction supersedes."""
    return _SUMMARY.format(results.get(compaction.id, ""))


_VERBOSITIES: Mapping[str | None, str] = {
    "low": "Keep your answers short.",
    "high": "Give detailed answers.",
}
"""The sentence of the model for each ``text.verbosity``; ``medium``, the default, has none."""


def split(request: ResolvedRequest) -> tuple[tuple[str, ...], tuple[items.Item, ...]]:
    """Return the texts of the instructions, and the items after them.

    System and developer messages at the start belong to the instructions.  What the options of tools add, and the
    verbosity, are their last lines, since no model has a place of its own for them.  There are several texts if the
    instructions are one message of several parts, and else one at most.
    """
    leading = tuple(takewhile(_is_leading, request.items))
    response = request.facts.response
    given = [(response.instructions or "",), *(_texts(item) for item in leading if isinstance(item, items.Message))]
    given = [texts for texts in given if any(texts)]
    for name, options in request.facts.options.items():
        if (kind := kinds().get(name)) and (text := kind.instructions(options)):
            given.append((text,))
    verbosity = _VERBOSITIES.get(response.text.get("verbosity"))
    if verbosity and not (given and given[-1][-1].endswith(verbosity)):  # raw messages of an earlier response have it
        given.append((verbosity,))
    instructions = given[0] if len(given) == 1 else ("\n\n".join(map("\n".join, given)),)
    return instructions if any(instructions) else (), without_nested(request.items[len(leading) :])


def without_nested(history: tuple[items.Item, ...]) -> tuple[items.Item, ...]:
    """Return the items without those that only programs read: their calls with the outputs, and what has no output."""
    ended = {item.call_id for item in items.of_type(history, items.ProgramOutput)}
    programs = {item.call_id for item in items.of_type(history, items.Program)}
    if not programs and not any(map(items.caller_of, history)):
        return history
    callers = callers_of(history)
    nested = {at for at, item in enumerate(history) if items.caller_of(item)}
    nested |= {at for at, caller in callers.items() if caller in nested}
    asked = {history[at].id for at in nested}
    return tuple(
        item
        for at, item in enumerate(history)
        if at not in nested
        and not (isinstance(item, items.Program) and item.call_id not in ended)
        and not (isinstance(item, items.McpApprovalResponse) and item.approval_request_id in asked)
    )


def _texts(message: items.Message) -> tuple[str, ...]:
    return tuple(part.text for part in message.content)


def found_elsewhere(output: items.ToolSearchOutput) -> str:
    """Return the text that the model reads for a search that declares no tool in its place.

    The prompt declares the tools that the server runs before the conversation.
    """
    return "The tools are those described above." if output.tools else "No tool was found."


def is_cut(item: items.Item) -> bool:
    """Return True for a message or a thought of the model whose text was cut, so that the model can continue it."""
    match item:
        case items.Message(role="assistant", status=status) | items.Reasoning(status=status):
            return status in ("in_progress", "incomplete")
        case _:
            return False


def is_continuation(item: items.Item, before: items.Item) -> bool:
    """Return True if the model wrote the text of ``item`` to continue that of the item ``before`` it."""
    match before, item:
        case (items.Message(), items.Message(role="assistant")) | (items.Reasoning(), items.Reasoning()):
            return is_cut(before)
        case _:
            return False


def placed(request: ResolvedRequest) -> frozenset[ToolKey]:
    """Return the keys of the tools that stand in the prompt where an item brings them, not in its head.

    So the beginning of the prompt stays the same.  What a compaction has superseded is in the head again.
    """
    tools = request.facts.tools
    if not tools.loaded:
        return frozenset()
    brought = (item for item in split(request)[1] if isinstance(item, items.AdditionalTools | items.ToolSearchOutput))
    return frozenset(tools.loaded).intersection(key for item in brought for key in keys_of(item.tools))


def brought_by(item: items.AdditionalTools | items.ToolSearchOutput, tools: Iterable[OneTool]) -> list[OneTool]:
    """Return those of the ``tools`` that an item brings."""
    keys = frozenset(keys_of(item.tools))
    return [tool for tool in tools if tool_key(tool) in keys]


def _is_leading(item: items.Item) -> bool:
    if isinstance(item, items.Message):
        return item.role in {"system", "developer"} and not items.images_of(item)
    return isinstance(item, items.AdditionalTools | items.ConfigurationUpdate)


def arguments_of(call: items.CallItem) -> str:
    """Return the arguments of ``call`` as the model wrote them, or an equivalent in the model's own form."""
    match call:
        case items.WebSearchCall(action=action):
            return json_text(_browsed(action or {}))
        case items.ShellCall(runs_here=True, action=action):
            return json_text(_executed(action))
        case _:
            return call.text


def _browsed(action: Mapping[str, Any]) -> dict[str, Any]:
    match action.get("type"):
        case "open_page":
            return {"id": action["url"]} if action.get("url") else {}
        case "find_in_page":
            return {"pattern": action.get("pattern", "")}
        case _:
            return {"query": action.get("query") or "; ".join(map(str, action.get("queries") or ()))}


def _executed(action: Mapping[str, Any]) -> dict[str, Any]:
    commands = "\n".join(map(str, action.get("commands") or ()))
    limit = {"timeout": action["timeout_ms"]} if action.get("timeout_ms") else {}
    return {"cmd": ["bash", "-lc", commands], **limit}
