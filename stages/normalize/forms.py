"""API tools that the client runs (shells, patches), described to the model as functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.protocol.tools import FunctionTool

_TEXT = {"type": "string"}
_MILLISECONDS = {"type": "integer", "description": "The longest that it may take, in milliseconds."}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_SHELL = FunctionTool(
    "shell",
    "Runs commands in a shell, one after another, and tells what each wrote to stdout and stderr and how it ended.",
    _object(
        ["commands"],
        commands={"type": "array", "items": _TEXT, "description": "The commands, each a line for the shell."},
        timeout_ms=_MILLISECONDS,
        max_output_length={"type": "integer", "description": "How many characters of output to show at most."},
    ),
    form="shell",
)
_LOCAL_SHELL = FunctionTool(
    "local_shell",
    "Runs a command on the user's machine and returns what it wrote.",
    _object(
        ["command"],
        command={
            "type": "array",
            "items": _TEXT,
            "description": 'The program and its arguments; for shell syntax, ["bash", "-lc", "..."].',
        },
        env={"type": "object", "additionalProperties": _TEXT},
        working_directory={"type": "string", "description": "The directory to run in."},
        timeout_ms=_MILLISECONDS,
        user={"type": "string", "description": "The user to run as."},
    ),
    form="local_shell",
)
_APPLY_PATCH = FunctionTool(
    "apply_patch",
    "Creates, changes or deletes one file.\n"
    "The diff of a new file has all its lines, each with a + in front. The diff of a change has hunks: "
    "each begins with a line of @@, which may name the function or class it is in, then come lines with a space in "
    "front where they stay, - where they go and + where they are new. Show three lines around what changes, and no "
    "line numbers.",
    _object(
        ["type", "path"],
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path={"type": "string", "description": "The file, relative to the root of the workspace."},
        diff={"type": "string", "description": "What to write or change; not needed to delete a file."},
    ),
    form="apply_patch",
)

FORMS: Mapping[str, FunctionTool] = {tool.form: tool for tool in (_SHELL, _LOCAL_SHELL, _APPLY_PATCH)}
"""The functions by the tool type in the request."""
