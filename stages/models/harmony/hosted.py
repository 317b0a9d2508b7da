"""The built-in tools as a section of the system message.

Their words are those of their kinds, unless the host of the tool declares it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.pipeline.hosted_kinds import kinds, own_function, takes_text
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool
from penstock.stages.models.harmony.schema import Inlining
from penstock.stages.models.harmony.typescript import namespace_lines


def hosted_section(tools: Sequence[HostedTool], descriptions: Mapping[str, str]) -> str:
    """Return the section of the system message that declares ``tools``, with namespaces in the package's order.

    ``descriptions`` are those of their hosts, by namespace.
    """
    lines = ["# Tools"]
    for name, namespace in sorted({(tool.spoken or tool.namespace, tool.namespace) for tool in tools}):
        members = [tool for tool in tools if tool.namespace == namespace]
        lines += ["", *_namespace(name, description_of(namespace, descriptions), members)]
    return "\n".join(lines)


def _namespace(namespace: str, description: str, members: Sequence[HostedTool]) -> Iterator[str]:
    if functions := [function for tool in members if (function := function_of(tool))]:
        yield from namespace_lines(namespace, description, functions, Inlining())
    else:
        yield from (f"## {namespace}", "", description)


def description_of(namespace: str, descriptions: Mapping[str, str]) -> str:
    """Return the description of a built-in tool: that of its host, or else that of its kind."""
    kind = kinds().get(namespace)
    return descriptions.get(namespace) or (kind.description if kind else "")


def function_of(tool: HostedTool) -> FunctionTool | None:
    """Return the function that the model reads; None for one that takes plain text, as Python does."""
    if takes_text(tool):
        return None
    if tool.parameters is not None:
        return FunctionTool(tool.name, tool.description, tool.parameters)
    return own_function(tool) or FunctionTool(tool.name)
