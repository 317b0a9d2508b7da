"""The built-in tools as a section of the system message.

Their words are those of gpt-oss's training, openai_harmony's own, unless the host of the tool declares it itself.  The
words about a sandbox hold for one sandbox only, so that the host of each names its own folder, time and network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from openai_harmony import ToolNamespaceConfig

from penstock.pipeline.protocol.tools import HOSTED, FunctionTool, HostedKind, HostedTool
from penstock.stages.models.harmony.schema import Inlining
from penstock.stages.models.harmony.typescript import namespace_lines

_TIME = "after 120.0 seconds"
_DRIVE = "The drive at '/mnt/data' can be used to save and persist user files."
_NETWORK = "Internet access for this session is UNKNOWN. Depends on the cluster."
_NO_NETWORK = "Internet access for this session is disabled."
_WORKING_FOLDER = "The working folder can be used to save and persist user files: open them by their names alone."
_CONTAINER = "Tool for running commands in a sandbox.\nWhat one command leaves in its files is there for the next."
_EXEC = FunctionTool(
    "exec",
    "Runs the program `cmd[0]` with the rest of `cmd` as its arguments, and returns what it writes.\n"
    "`env` adds to its environment, and `timeout` is in milliseconds.",
    {
        "type": "object",
        "properties": {
            "cmd": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "env": {"type": ["object"]},
            "timeout": {"type": "number"},
        },
        "required": ["cmd"],
    },
)
_FILE_SEARCH = (
    "Tool for searching in the files of the user.\n"
    "A search returns parts of files. Each begins with a line such as `[1000] report.pdf`.\n"
    "Cite a part after what you take from it, as `【1000†L1】`: its number, and a line of it."
)
_SEARCH = FunctionTool(
    "search",
    "Finds the parts of the files that fit any of the queries.",
    {
        "type": "object",
        "properties": {
            "queries": {
                "type": "array",
                "items": {"type": "string"},
                "description": "One to five queries: the words that the parts should have, or a question.",
            }
        },
        "required": ["queries"],
    },
)


def python_description(seconds: float, *, has_drive: bool) -> str:
    """Return the training's description of Python, with the facts of a sandbox without network.

    A call may take ``seconds``.  If there is no drive, only the working folder leads to the files.
    """
    text = _trained()["python"][0].replace(_TIME, f"after {float(seconds)} seconds").replace(_NETWORK, _NO_NETWORK)
    return text if has_drive else text.replace(_DRIVE, _WORKING_FOLDER)


def container_description(seconds: float, *, has_drive: bool) -> str:
    """Return the description of the shell, with the facts of a sandbox without network, as for Python."""
    drive = _DRIVE if has_drive else _WORKING_FOLDER
    return f"{_CONTAINER}\nThe commands of a call end after {seconds:g} seconds. {drive} {_NO_NETWORK}"


def hosted_section(tools: Sequence[HostedTool], descriptions: Mapping[str, str]) -> str:
    """Return the section of the system message that declares ``tools``, with namespaces in the package's order.

    ``descriptions`` are those of their hosts, by namespace.
    """
    lines = ["# Tools"]
    for kind in sorted(HOSTED):
        if members := [tool for tool in tools if tool.namespace == kind]:
            lines += ["", *_namespace(kind, description_of(kind, descriptions), members)]
    return "\n".join(lines)


def _namespace(kind: HostedKind, description: str, members: Sequence[HostedTool]) -> Iterator[str]:
    if functions := [function for tool in members if (function := function_of(tool))]:
        yield from namespace_lines(kind, description, functions, Inlining())
    else:
        yield from (f"## {kind}", "", description)


def description_of(kind: HostedKind, descriptions: Mapping[str, str]) -> str:
    """Return the description of a built-in tool: that of its host, or else that of the training."""
    return descriptions.get(kind) or _trained()[kind][0]


def function_of(tool: HostedTool) -> FunctionTool | None:
    """Return the function that the model reads; None for Python, which takes plain code."""
    if (tool.namespace, tool.name) == ("python", "python"):
        return None
    if tool.parameters is not None:
        return FunctionTool(tool.name, tool.description, tool.parameters)
    return next(function for function in _trained()[tool.namespace][1] if function.name == tool.name)


@cache
def _trained() -> Mapping[HostedKind, tuple[str, Sequence[FunctionTool]]]:
    return {
        "browser": _of_package(ToolNamespaceConfig.browser()),
        "python": _of_package(ToolNamespaceConfig.python()),
        "container": (_CONTAINER, (_EXEC,)),
        "file_search": (_FILE_SEARCH, (_SEARCH,)),
    }


def _of_package(namespace: ToolNamespaceConfig) -> tuple[str, Sequence[FunctionTool]]:
    tools = tuple(FunctionTool(tool.name, tool.description, tool.parameters) for tool in namespace.tools)
    return namespace.description or "", tools
