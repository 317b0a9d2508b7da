"""Forms: the fields of calls to tools with an item type of their own, parsed from function arguments.

The model calls these tools as functions.  Arguments that are not valid JSON of the form are passed on as text, in the
field that the client reads first; the client then answers with an error, and the model can correct the call.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Json: TypeAlias = dict[str, Any]


class _LocalShell(msgspec.Struct, omit_defaults=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class _Shell(msgspec.Struct, omit_defaults=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _CreateFile(msgspec.Struct, tag_field="type", tag="create_file"):
    path: str
    diff: str


class _UpdateFile(msgspec.Struct, tag_field="type", tag="update_file"):
    path: str
    diff: str


class _DeleteFile(msgspec.Struct, tag_field="type", tag="delete_file"):
    path: str


def local_shell_action(arguments: str) -> Json:
    """Return the action of a ``local_shell`` call."""
    fields = _read(arguments, _LocalShell) or {"command": [arguments]}
    return {"type": "exec", "env": {}, **fields}


def shell_action(arguments: str) -> Json:
    """Return the action of a call to the client's ``shell``."""
    return _read(arguments, _Shell) or {"commands": [arguments]}


def patch_operation(arguments: str) -> Json:
    """Return the operation of an ``apply_patch`` call."""
    operation = _read(arguments, _CreateFile | _UpdateFile | _DeleteFile)
    return operation or {"type": "update_file", "path": "", "diff": arguments}


def _read(arguments: str, form: Any) -> Json | None:
    """Return the arguments as a dict, without unset fields, or None if they are not valid JSON of the form."""
    try:
        fields: Json = msgspec.to_builtins(msgspec.json.decode(arguments, type=form))
    except (msgspec.DecodeError, RecursionError):
        return None
    return fields
