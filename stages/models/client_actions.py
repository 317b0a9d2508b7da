"""Actions: what the client shall do for a call of a tool with a form of its own, read from the model's arguments.

The model calls these tools as functions, and a grammar holds it to their form where there is one.  Near forms are read
as well.  All other arguments are no action: nothing but what the model wrote as a command may become one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.pipeline.protocol.tools import ClientForm
from penstock.stages.models.shell_calls import ArgumentsInvalid, shell_call, shown

Json: TypeAlias = dict[str, Any]


class _CreateFile(msgspec.Struct, tag_field="type", tag="create_file"):
    path: str
    diff: str


class _UpdateFile(msgspec.Struct, tag_field="type", tag="update_file"):
    path: str
    diff: str


class _DeleteFile(msgspec.Struct, tag_field="type", tag="delete_file"):
    path: str


_Operation: TypeAlias = _CreateFile | _UpdateFile | _DeleteFile


def action_of(form: ClientForm, arguments: str) -> Json:
    """Return the action of a call of this form.  Raises `ArgumentsInvalid`, with a message for the model."""
    return _READERS[form](arguments)


def problem_of(form: ClientForm, arguments: str) -> str:
    """Return what is wrong with a call of this form, for the model; empty if it has an action."""
    try:
        action_of(form, arguments)
    except ArgumentsInvalid as error:
        return f"Error: the call was not made. {error}"
    return ""


def _shell(arguments: str) -> Json:
    call = shell_call(arguments)
    if call.workdir is not None or call.user is not None or call.env:
        raise ArgumentsInvalid("The shell takes no folder, user or variables: set them in the command.")
    limits = {"timeout_ms": call.timeout_ms, "max_output_length": call.max_output_length}
    return {"commands": [shown(words) for words in call.commands], **_set(limits)}


def _local_shell(arguments: str) -> Json:
    call = shell_call(arguments)
    first, *others = call.commands
    if others:
        raise ArgumentsInvalid("A call runs one command.")
    fields = {"timeout_ms": call.timeout_ms, "user": call.user, "working_directory": call.workdir}
    return {"type": "exec", "env": dict(call.env), "command": list(first), **_set(fields)}


def _set(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _patch(arguments: str) -> Json:
    try:
        operation: _Operation = msgspec.json.decode(arguments, type=_Operation)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArgumentsInvalid(f"The arguments do not have the form that the tool takes: {error}") from None
    if not operation.path.strip() or "\0" in operation.path:
        raise ArgumentsInvalid("The path names no file.")
    fields: Json = msgspec.to_builtins(operation)
    return fields


def _search(arguments: str) -> Json:
    try:
        return msgspec.json.decode(arguments, type=Json)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArgumentsInvalid(f"The arguments are no JSON object: {error}") from None


# The actions of a computer


class _Keyed(msgspec.Struct, omit_defaults=True, tag_field="type"):
    keys: list[str] | None = None


class _Click(_Keyed, tag="click", kw_only=True):
    button: Literal["left", "right", "wheel", "back", "forward"]
    x: int
    y: int


class _DoubleClick(_Keyed, tag="double_click", kw_only=True):
    x: int
    y: int


class _Point(msgspec.Struct):
    x: int
    y: int


class _Drag(_Keyed, tag="drag", kw_only=True):
    path: list[_Point]


class _Keypress(msgspec.Struct, tag_field="type", tag="keypress"):
    keys: list[str]


class _Move(_Keyed, tag="move", kw_only=True):
    x: int
    y: int


class _Screenshot(msgspec.Struct, tag_field="type", tag="screenshot"):
    pass


class _Scroll(_Keyed, tag="scroll", kw_only=True):
    x: int
    y: int
    scroll_x: int
    scroll_y: int


class _Type(msgspec.Struct, tag_field="type", tag="type"):
    text: str


class _Wait(msgspec.Struct, tag_field="type", tag="wait"):
    pass


_ComputerAction: TypeAlias = _Click | _DoubleClick | _Drag | _Keypress | _Move | _Screenshot | _Scroll | _Type | _Wait


class _Actions(msgspec.Struct):
    actions: list[_ComputerAction] | None = None
    action: _ComputerAction | None = None


MOST_ACTIONS = 64
"""The most actions of one call."""


def _computer(arguments: str) -> Json:
    actions = _computer_actions(arguments)
    if not 1 <= len(actions) <= MOST_ACTIONS:
        raise ArgumentsInvalid(f"A call has from one to {MOST_ACTIONS} actions, not {len(actions)}.")
    return {"actions": tuple(map(msgspec.to_builtins, actions))}


def _one_computer_action(arguments: str) -> Json:
    actions = _computer_actions(arguments)
    if len(actions) != 1:
        raise ArgumentsInvalid(f"A call has one action, not {len(actions)}.")
    return {"action": msgspec.to_builtins(actions[0])}


def _computer_actions(arguments: str) -> list[_ComputerAction]:
    """Return the actions in a list, or a single one under its key."""
    try:
        written = msgspec.json.decode(arguments, type=_Actions)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArgumentsInvalid(f"The arguments do not have the form that the tool takes: {error}") from None
    return [*(written.actions or ()), *([written.action] if written.action else ())]


_READERS: Mapping[ClientForm, Callable[[str], Json]] = {
    "local_shell": _local_shell,
    "shell": _shell,
    "apply_patch": _patch,
    "tool_search": _search,
    "computer": _computer,
    "computer_use_preview": _one_computer_action,
}
