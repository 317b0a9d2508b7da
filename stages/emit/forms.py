"""Forms: how the items of tools that have a type of their own tell what the model wrote as the arguments of a function.

Whatever is no valid JSON of the form is passed on as text all the same, in the place where the client looks first:
it answers that this cannot be done, and the model may do better.
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
    """The action of a call of ``local_shell``."""
    said = _read(arguments, _LocalShell) or {"command": [arguments]}
    return {"type": "exec", "env": {}, **said}


def shell_action(arguments: str) -> Json:
    """The action of a call of a ``shell`` of the client's."""
    return _read(arguments, _Shell) or {"commands": [arguments]}


def patch_operation(arguments: str) -> Json:
    """The operation of a call of ``apply_patch``."""
    said = _read(arguments, _CreateFile | _UpdateFile | _DeleteFile)
    return said or {"type": "update_file", "path": "", "diff": arguments}


def _read(arguments: str, form: Any) -> Json | None:
    """What the model said of the form, without what it left open; None where it is no JSON of that form."""
    try:
        said: Json = msgspec.to_builtins(msgspec.json.decode(arguments, type=form))
    except (msgspec.DecodeError, RecursionError):
        return None
    return said
