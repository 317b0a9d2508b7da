"""The built-in tools as in gpt-oss's training: a section of the system message, in openai_harmony's own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from openai_harmony import ToolNamespaceConfig

from penstock.pipeline.protocol.tools import HOSTED, FunctionTool, HostedKind, HostedTool
from penstock.stages.models.harmony.schema import Inlining
from penstock.stages.models.harmony.typescript import namespace_lines

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


def hosted_section(tools: Sequence[HostedTool]) -> str:
    """Return the section of the system message that declares ``tools``, with namespaces in the package's order."""
    lines = ["# Tools"]
    for kind in sorted(HOSTED):
        if names := {tool.name for tool in tools if tool.namespace == kind}:
            lines += ["", *_namespace(kind, names)]
    return "\n".join(lines)


def _namespace(kind: HostedKind, names: set[str]) -> Iterator[str]:
    description, functions = described()[kind]
    if functions:
        yield from namespace_lines(kind, description, [tool for tool in functions if tool.name in names], Inlining())
    else:
        yield from (f"## {kind}", "", description)


@cache
def described() -> Mapping[HostedKind, tuple[str, Sequence[FunctionTool]]]:
    """Return the description and the functions of each built-in tool; python has no functions, it takes plain code."""
    return {
        "browser": _of_package(ToolNamespaceConfig.browser()),
        "python": _of_package(ToolNamespaceConfig.python()),
        "container": (_CONTAINER, (_EXEC,)),
    }


def _of_package(namespace: ToolNamespaceConfig) -> tuple[str, Sequence[FunctionTool]]:
    tools = tuple(FunctionTool(tool.name, tool.description, tool.parameters) for tool in namespace.tools)
    return namespace.description or "", tools
