"""Tools of Anthropic's that the client runs: functions for the model, with the fields that Anthropic publishes.

See https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = {"type": "string"}
_LINE = {"type": "integer", "minimum": 0}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_POINT = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}

_FILES = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "For create: the content of the file."},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace, which is in the file once."},
    "new_str": {**_TEXT, "description": "For str_replace: the text that replaces it."},
    "insert_line": {**_LINE, "description": "For insert: the line after which to insert; 0 is the beginning."},
    "insert_text": {**_TEXT, "description": "For insert: the text."},
    "view_range": {**_LINES, "description": "For view: the first and the last line, counted from 1; -1 is the end."},
}
_FILE_COMMANDS = ("view", "create", "str_replace", "insert")

_ACTIONS = ("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click")
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


@dataclass(frozen=True)
class ClientTool:
    """A tool of the client's as a function."""

    description: str
    properties: Mapping[str, Any]
    required: Sequence[str] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the input."""
        return {"type": "object", "properties": {**self.properties}, "required": [*self.required]}


def _choice(names: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": [*names]}


def _bash(_: str) -> ClientTool:
    restart = {"type": "boolean", "description": "True to restart the session; no command is needed then."}
    command = {**_TEXT, "description": "The command to run."}
    described = "Runs a command in a bash session that lasts, and returns what it wrote."
    return ClientTool(described, {"command": command, "restart": restart})


def _text_editor(version: str) -> ClientTool:
    commands = (*_FILE_COMMANDS, *(("undo_edit",) if version < "20250429" else ()))
    described = "Views a file or a folder, and creates and edits files."
    return ClientTool(described, {"command": _choice(commands), **_FILES}, ("command", "path"))


def _memory(_: str) -> ClientTool:
    described = (
        "Keeps notes over conversations, as files in the folder /memories. Look there before a task, and note what "
        "will be of use later. For rename: old_path and new_path."
    )
    commands = _choice((*_FILE_COMMANDS, "delete", "rename"))
    return ClientTool(described, {"command": commands, **_FILES, "old_path": _TEXT, "new_path": _TEXT}, ("command",))


def _computer(version: str, *, zooms: bool) -> ClientTool:
    later, zooms = version >= "20250124", zooms and version >= "20251124"
    actions = (*_ACTIONS, "screenshot", "cursor_position", *(_LATER_ACTIONS * later), *(("zoom",) * zooms))
    properties: dict[str, Any] = {
        "action": _choice(actions),
        "coordinate": {**_POINT, "description": "Pixels from the left and from the top."},
        "text": {**_TEXT, "description": "The text to type, or the keys, as in ctrl+s."},
    }
    if later:
        properties |= {
            "start_coordinate": {**_POINT, "description": "For left_click_drag: the place to begin at."},
            "scroll_direction": _choice(("up", "down", "left", "right")),
            "scroll_amount": _LINE,
            "duration": {"type": "number", "minimum": 0, "description": "For hold_key and wait: seconds."},
        }
    if zooms:
        corners = {**_POINT, "minItems": 4, "maxItems": 4}
        properties["region"] = {**corners, "description": "For zoom: the upper left and the lower right corner."}
    described = "Controls a computer with a mouse and a keyboard, and returns screenshots."
    return ClientTool(described, properties, ("action",))


_KINDS = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}
_TYPE = re.compile(rf"({'|'.join(_KINDS)}|computer)_(\d{{8}})")


def client_tool(tool_type: str, *, zooms: bool = False) -> ClientTool | None:
    """Return the tool of a type of Anthropic's, of any version; None for one that the client does not run.

    A computer whose client ``zooms`` has an action for that, if its version knows it.
    """
    found = _TYPE.fullmatch(tool_type)
    if not found:
        return None
    kind, version = found.groups()
    return _computer(version, zooms=zooms) if kind == "computer" else _KINDS[kind](version)
