"""The tools of a request as functions of a program, by names that Python takes.

A function of the client, or a custom tool, has its own name.  The tools of a namespace are methods of an object with
the name of the namespace; those of an MCP server, of one with its label; and those of a built-in tool, of one with its
type.
A name that is no identifier, or that Python has itself, is changed, and no two functions get the same.
"""

from __future__ import annotations

import builtins
import keyword
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.pipeline.hosted_kinds import kinds, own_function
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, Tool, ToolKey, tool_key
from penstock.stages.models.chat.names import text_argument
from penstock.stages.models.harmony.hosted import function_of
from penstock.stages.models.harmony.schema import Inlining, read
from penstock.stages.models.harmony.shapes import ANY, STRING, Intersection, Node, Notes, Object, Shape, Union

TOOL_ERROR: Final = "ToolError"
"""The exception by which a call fails in a program."""

RESERVED: Final = frozenset(dir(builtins)) | {TOOL_ERROR, "asyncio", "json"}
"""Names that programs have already."""

MOST_CHARACTERS: Final = 64
"""Characters of a name, before a number that makes it unique."""

_UNNAMED: Final = "unnamed"


@dataclass(frozen=True)
class Function:
    """A tool as a function of a program."""

    tool: Tool
    object: str
    """The object of which it is a method; empty if it is of none."""
    name: str
    parameters: Mapping[str, str]
    """The tool's names of its arguments by those of the parameters, in the order of positional arguments."""
    required: frozenset[str]
    """The parameters that a call must give."""
    text_argument: str | None
    """The parameter that is the whole input of a tool called with plain text; None for a tool called with JSON."""
    shape: Object | None
    """The arguments, as far as they are known; None if a call may give any, by their names."""
    returned: Node | None
    """The result, as far as it is known."""

    @property
    def path(self) -> str:
        """The name by which a program calls it."""
        return f"{self.object}.{self.name}" if self.object else self.name


class Names:
    """The functions of a request's tools: by their paths, and by the keys of their tools."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        inlining = Inlining()
        self.functions = tuple(_functions(tuple(tools), inlining))
        self.by_path: Mapping[str, Function] = {function.path: function for function in self.functions}
        self.by_key: Mapping[ToolKey, Function] = {tool_key(function.tool): function for function in self.functions}


def _functions(tools: Sequence[Tool], inlining: Inlining) -> Iterator[Function]:
    objects: dict[str | None, list[Tool]] = {
        None: []
    }  # its functions come first: they are never the ones to be numbered
    for tool in tools:
        objects.setdefault(_object(tool), []).append(tool)
    alone = objects.pop(None)
    named = [name for name in objects if name is not None]
    outer = python_names([*(tool.name for tool in alone), *named], RESERVED)
    for tool, name in zip(alone, outer, strict=False):
        yield _function(tool, "", name, inlining)
    for namespace, whole in zip(named, outer[len(alone) :], strict=True):
        members = objects[namespace]
        for tool, name in zip(members, python_names([tool.name for tool in members]), strict=True):
            yield _function(tool, whole, name, inlining)


def _object(tool: Tool) -> str | None:
    if isinstance(tool, HostedTool) and (kind := kinds().get(tool.namespace)):
        return kind.api_type
    return tool.namespace


def _function(tool: Tool, whole: str, name: str, inlining: Inlining) -> Function:
    text = text_argument(tool)
    shape = whole_object(_node(tool, text, inlining).shape)
    # Python wants parameters without a default first
    ordered = sorted(shape.properties, key=lambda each: each[0] not in shape.required) if shape else ()
    names = python_names([key for key, _ in ordered])
    parameters = dict(zip(names, (key for key, _ in ordered), strict=True))
    required = frozenset(name for name, key in parameters.items() if shape and key in shape.required)
    return Function(
        tool=tool,
        object=whole,
        name=name,
        parameters=parameters,
        required=required,
        text_argument=text,
        shape=shape,
        returned=read(tool.output_schema, inlining) if isinstance(tool, FunctionTool) and tool.output_schema else None,
    )


def _node(tool: Tool, text: str | None, inlining: Inlining) -> Node:
    if text is not None:
        own = own_function(tool) if isinstance(tool, HostedTool) else None
        return Node(
            Object(((text, Node(STRING, Notes(description=own.description if own else None))),), frozenset({text}))
        )
    assert not isinstance(tool, CustomTool)  # it takes text
    function = function_of(tool) if isinstance(tool, HostedTool) else tool
    parameters = function.parameters if function else None
    return Node(Object()) if parameters is None else read(parameters, inlining)


def whole_object(shape: Shape) -> Object | None:
    """Return all properties that a shape names as one object; None if it may be another type, or says nothing of it."""
    match shape:
        case Object():
            unknown = sorted(shape.required.difference(name for name, _ in shape.properties))
            return replace(shape, properties=(*shape.properties, *((name, Node(ANY)) for name in unknown)))
        case Intersection(parts):
            found = [known for each in parts if (known := whole_object(each)) is not None]
            return _joined(found, frozenset[str]().union(*(part.required for part in found))) if found else None
        case Union(variants):
            found = [known for each in variants if (known := whole_object(each.shape)) is not None]
            if len(found) < len(variants):
                return None
            return _joined(found, frozenset.intersection(*(part.required for part in found)))
        case _:
            return None


def _joined(objects: Sequence[Object], required: frozenset[str]) -> Object:
    properties: dict[str, Node] = {}
    for name, node in (pair for shape in objects for pair in shape.properties):
        properties[name] = node if properties.setdefault(name, node) == node else Node(ANY, properties[name].notes)
    return Object(
        tuple(properties.items()),
        required,
        next((shape.index for shape in objects if shape.index), None),
    )


def python_names(names: Sequence[str], reserved: Collection[str] = ()) -> list[str]:
    """Return an identifier for each name, no two the same and none ``reserved``; a name that fits stays."""
    found, taken = [""] * len(names), set(reserved)
    for at, name in enumerate(names):
        if name == _identifier(name) and name not in taken:
            found[at] = name
            taken.add(name)
    counts: dict[str, int] = {}
    for at, name in enumerate(names):
        if not found[at]:
            base = _identifier(name)
            found[at] = _free(f"{base}_" if base in reserved else base, taken, counts)
            taken.add(found[at])
    return found


def _free(base: str, taken: Collection[str], counts: dict[str, int]) -> str:
    name = base
    while name in taken:
        counts[base] = counts.get(base, 1) + 1
        name = f"{base}_{counts[base]}"
    return name


def _identifier(name: str) -> str:
    """Return the name in the form to which Python normalizes it, without what an identifier cannot hold.

    It begins with no underscore, except before a digit: Python changes some such names within a class.
    """
    normal = unicodedata.normalize("NFKC", name[:MOST_CHARACTERS])
    text = "".join(each if f"_{each}".isidentifier() else "_" for each in normal)[:MOST_CHARACTERS].lstrip("_")
    if not text:
        return _UNNAMED
    if not text.isidentifier():
        return f"_{text}"
    return f"{text}_" if keyword.iskeyword(text) else text
