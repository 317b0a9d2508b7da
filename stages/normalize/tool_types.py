"""The types of tools in a request: which ones this server can run, and which ones the model sees as functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from penstock.pipeline.hosted_kinds import HostedKind, kinds
from penstock.pipeline.protocol.params import tools as params
from penstock.pipeline.protocol.tools import FunctionTool
from penstock.stages.models.client_actions import MOST_ACTIONS
from penstock.stages.models.harmony.vocabulary import FUNCTIONS
from penstock.stages.models.shell_calls import MOST_COMMANDS

NO_TOOL = "none"


def types_of(namespaces: Iterable[str]) -> tuple[str, ...]:
    """Return the types by which a request names these built-in tools, in order."""
    known = kinds()
    return tuple(sorted(known[name].api_type for name in namespaces if name in known))


def is_label(name: str) -> bool:
    """Return True if a tool of the operator's own may have this label."""
    return bool(_LABEL.fullmatch(name)) and name not in (*kinds().by_name, NO_TOOL, FUNCTIONS)


_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def named(names: Iterable[str], own: Collection[str] | None = ()) -> frozenset[str]:
    """Return the built-in tools with these labels, and those of ``own`` labels; none for `NO_TOOL`.

    Raises `ValueError` for any other name.  If it is not known which ``own`` there are, each name may be one.
    """
    known, found = kinds().by_name, set[str]()
    for name in names:
        if name in known:
            found.add(known[name].namespace)
        elif name != NO_TOOL:
            if not (is_label(name) if own is None else name in own):
                raise ValueError(f"{name!r} is not one of {', '.join((*known, *sorted(own or ())))} and {NO_TOOL}")
            found.add(name)
    return frozenset(found)


MISSING = "missing"
"""The name for all tools that the server does not run, also for those of types that it does not know."""

_OF_OTHERS = frozenset({"computer", "image_generation", "tool_search"})
"""The tools without a kind that an operator can have left out of requests."""


def leavable_tools() -> tuple[str, ...]:
    """Return the tools that an operator can have left out of requests, without their versions."""
    return (*sorted(_OF_OTHERS.union(kinds().by_type)), MISSING)


def is_unasked(tool_type: str) -> bool:
    """Return True if coding agents declare a tool beside their own in each request, whether a server runs it or not."""
    name = unversioned(tool_type)
    kind = kinds().by_type.get(name)
    return kind.is_unasked if kind else name == "image_generation"


def advice_on(tool_type: str) -> str:
    """Return the advice in the error about a tool that the server does not run."""
    name = unversioned(tool_type)
    kind = kinds().by_type.get(name)
    provided = f"provide it by {kind.option}, or " if kind and kind.option else ""
    left_out = name if name in leavable_tools() else MISSING
    return f"Its operator can {provided}have it left out of requests: --leave-out-tool {left_out}."


def leavable(names: Iterable[str]) -> frozenset[str]:
    """Return these names of tools; raises `ValueError` for one that is not among the `leavable_tools`."""
    known = leavable_tools()
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return frozenset(names)


def hosted_kind_of(tool: params.ToolParam) -> HostedKind | None:
    """Return the kind of built-in tool that a tool of the request means, or None."""
    match tool:
        case params.McpToolParam(connector_id=None, server_label=label):
            kind = kinds().by_label.get(label)
            return kind if kind and (tool.server_url is None or label == kind.label_of_vllm) else None
        case params.ShellToolParam(runs_here=False):
            return None
        case _:
            return kinds().by_type.get(unversioned(tool.type))


def kinds_of(choice_type: str) -> tuple[str, ...]:
    """Return the kinds of tools that a choice of this type may mean: a built-in tool, or a tool of the client."""
    if unversioned(choice_type) == "computer":
        return ("computer", "computer_use_preview")
    hosted = kinds().by_type.get(unversioned(choice_type))
    return (choice_type,) if hosted is None else (hosted.namespace, choice_type)


def choice_without_secrets(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a tool choice without possible secrets: some clients repeat the whole tool in it."""
    if isinstance(tools := choice.get("tools"), list):
        return choice | {"tools": [choice_without_secrets(tool) for tool in tools]}
    if choice["type"] in ("function", "custom", "namespace"):
        return choice
    return {key: value for key, value in choice.items() if key in ("type", "server_label", "name")}


def unversioned(tool_type: str) -> str:
    """Return the name of a tool in all its versions."""
    if params.is_web_search(tool_type):
        return "web_search"
    return "computer" if tool_type.startswith("computer") else tool_type


# Tools that the client runs: the model sees them as functions, and is held to their form

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_MILLISECONDS = {"type": "integer", "minimum": 1, "description": "The longest that it may take, in milliseconds."}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_SHELL = FunctionTool(
    "shell",
    "Runs commands in a shell, one after another, and tells what each wrote to stdout and stderr and how it ended.",
    _object(
        ["commands"],
        commands=_TEXTS | {"maxItems": MOST_COMMANDS, "description": "The commands, each a line for the shell."},
        timeout_ms=_MILLISECONDS,
        max_output_length={
            "type": "integer",
            "minimum": 1,
            "description": "How many characters of output to show at most.",
        },
    ),
    strict=True,
    form="shell",
)
_LOCAL_SHELL = FunctionTool(
    "local_shell",
    "Runs a command on the user's machine and returns what it wrote.",
    _object(
        ["command"],
        command=_TEXTS
        | {
            "description": 'The program and its arguments; for shell syntax, ["bash", "-lc", "..."].',
        },
        env={"type": "object", "additionalProperties": _TEXT},
        working_directory={"type": "string", "description": "The directory to run in."},
        timeout_ms=_MILLISECONDS,
        user={"type": "string", "description": "The user to run as."},
    ),
    strict=True,
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
        ["type", "path", "diff"],
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path={"type": "string", "minLength": 1, "description": "The file, relative to the root of the workspace."},
        diff={"type": "string", "description": "What to write or change; empty to delete a file."},
    ),
    strict=True,
    form="apply_patch",
)

_BUTTON = {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]}
_PIXELS = {"type": "integer"}
_KEYS = {"keys": _TEXTS | {"description": "The keys that are held down meanwhile."}}
_POINT = {"x": _PIXELS, "y": _PIXELS}


def _action(kind: str, optional: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> dict[str, Any]:
    of_kind = {"type": {"type": "string", "enum": [kind]}}
    return _object(["type", *fields], **of_kind, **fields, **optional)


_ACTION: dict[str, Any] = {
    "anyOf": [
        _action("click", _KEYS, button=_BUTTON, **_POINT),
        _action("double_click", _KEYS, **_POINT),
        _action("drag", _KEYS, path={"type": "array", "items": _object(["x", "y"], **_POINT), "minItems": 2}),
        _action("keypress", keys=_TEXTS),
        _action("move", _KEYS, **_POINT),
        _action("screenshot"),
        _action("scroll", _KEYS, **_POINT, scroll_x=_PIXELS, scroll_y=_PIXELS),
        _action("type", text=_TEXT),
        _action("wait"),
    ]
}
_ABOUT_COMPUTER = (
    "Controls a computer with a mouse and a keyboard, and then shows its screen. Places are pixels from the upper left "
    "corner of the screenshot."
)
_COMPUTER = FunctionTool(
    "computer",
    f"{_ABOUT_COMPUTER} The actions are done in their order.",
    _object(["actions"], actions={"type": "array", "items": _ACTION, "minItems": 1, "maxItems": MOST_ACTIONS}),
    strict=True,
    form="computer",
)
_COMPUTER_PREVIEW = FunctionTool(
    "computer", _ABOUT_COMPUTER, _object(["action"], action=_ACTION), strict=True, form="computer_use_preview"
)


def _of_screen(tool: params.ComputerToolParam) -> str:
    """Return a sentence about a computer; empty if nothing is known of it."""
    width, height = tool.display_width, tool.display_height
    size = f"The screen has {width} x {height} pixels." if width and height else ""
    kind = f"It is a computer of the kind {tool.environment}." if tool.environment else ""
    return " ".join(filter(None, (size, kind)))


_SKILLS = (
    "There are skills: folders with a file SKILL.md of instructions for a kind of task. Before a task that fits the "
    "description of one, read its SKILL.md, and do as it says. They are:"
)


def is_of_the_client(tool: params.ToolParam) -> bool:
    """Return True if the client runs the calls of a tool itself."""
    match tool:
        case params.FunctionToolParam() | params.CustomToolParam() | params.NamespaceToolParam():
            return True
        case params.ShellToolParam():
            return not tool.runs_here
        case _:
            return tool.type in CLIENT_TOOLS


def client_tool(tool: params.ToolParam) -> FunctionTool:
    """Return the function for a tool that the client runs; the description names a shell's skills, or a screen."""
    function = CLIENT_TOOLS[tool.type]
    if isinstance(tool, params.ComputerToolParam) and (screen := _of_screen(tool)):
        return replace(function, description=f"{function.description} {screen}")
    skills = tool.local_skills if isinstance(tool, params.ShellToolParam) else ()
    if not skills:
        return function
    listed = "\n".join(f"- {skill.name} (in {skill.path}): {skill.description}" for skill in skills)
    return replace(function, description=f"{function.description}\n\n{_SKILLS}\n{listed}")


CLIENT_TOOLS: Mapping[str, FunctionTool] = {
    tool.form: tool for tool in (_SHELL, _LOCAL_SHELL, _APPLY_PATCH, _COMPUTER, _COMPUTER_PREVIEW)
}
"""The functions by the type of the tool in a request."""
