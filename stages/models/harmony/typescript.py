"""Tools in the Harmony format: TypeScript namespaces with one type per tool.

The layout matches openai_harmony's to the last comment and blank, because the model was trained on it.  Its oddities,
such as the indentation of nested objects and repeated descriptions, are kept on purpose.  This module differs only
when the package would print invalid TypeScript or lose information from the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, McpTool
from penstock.stages.models.harmony.schema import Inlining, literal, read
from penstock.stages.models.harmony.shapes import Array, Intersection, Node, Notes, Object, OneOf, Union, Word
from penstock.stages.models.harmony.vocabulary import FUNCTIONS

_LINE_BREAK = re.compile("\r\n|[\n\r\u2028\u2029]")
_IDENTIFIER = re.compile(r"[^\W\d][\w$]*|\$[\w$]*")


NamedTool: TypeAlias = FunctionTool | CustomTool | McpTool
"""A tool that a client or an MCP server declares, as opposed to a built-in one."""


def tools_section(tools: Iterable[NamedTool], descriptions: Mapping[str, str]) -> str:
    """Return the section of the developer message that declares ``tools``; ``descriptions`` are by namespace."""
    lines, inlining = ["# Tools"], Inlining()
    for namespace, members in by_namespace(tools).items():
        lines += ["", *namespace_lines(namespace, descriptions.get(namespace), members, inlining)]
    return "\n".join(lines)


def namespace_lines(
    namespace: str, description: str | None, members: Iterable[NamedTool], inlining: Inlining
) -> Iterator[str]:
    """Yield the lines that declare one namespace."""
    yield from (f"## {namespace}", "", *(comment(description) if description else ()))
    yield from (f"namespace {namespace} {{", "")
    for tool in members:
        yield from _custom(tool) if isinstance(tool, CustomTool) else _function(tool, inlining)
    yield f"}} // namespace {namespace}"


def by_namespace(tools: Iterable[NamedTool]) -> dict[str, list[NamedTool]]:
    """Group tools by namespace; first come those without one, with those of a client's namespace ``functions``."""
    members: dict[str, list[NamedTool]] = {FUNCTIONS: []}
    for tool in tools:
        members.setdefault(tool.namespace or FUNCTIONS, []).append(tool)
    return {namespace: tools for namespace, tools in members.items() if tools}


def _function(tool: FunctionTool | McpTool, inlining: Inlining) -> list[str]:
    lines = comment(tool.description) if tool.description else []
    return [*lines, f"type {tool.name} = ({_parameter(tool.parameters, inlining)}) => any;", ""]


def _custom(tool: CustomTool) -> list[str]:
    lines = comment(tool.description) if tool.description else []
    lines += [f"// The input is plain text, not JSON{_rule(tool.grammar)}"]
    rule = comment(tool.grammar.definition) if tool.grammar else []
    return [*lines, *rule, f"type {tool.name} = (_: string) => any;", ""]


def _rule(grammar: Grammar | None) -> str:
    if grammar is None:
        return "."
    kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
    return f", and matches this {kind}:"


def _parameter(schema: Any, inlining: Inlining) -> str:
    if schema is None:
        return ""
    node = read(schema, inlining)
    return f"_: {typescript(node)}" + ("\n" if _ends_incomment(node) else "")


# Types


def typescript(node: Node, indent: str = "") -> str:
    """Return the type of ``node``; its lines after the first begin with ``indent``."""
    match node.shape:
        case Word(text):
            return text
        case OneOf(options):
            return " | ".join(typescript(Node(option), indent) for option in options)
        case Intersection(parts):
            return " & ".join(_operand(Node(part), indent) for part in parts)
        case Array(items):
            return f"{_operand(items, indent)}[]"
        case Object() as shape:
            return "\n".join([*_object(shape, node.notes.description, indent)])
        case Union() as shape:
            return "\n".join(["", *_variants(shape, [_remarks(variant.notes) for variant in shape.variants], indent)])


def _operand(node: Node, indent: str) -> str:
    text = typescript(node, indent)
    match node.shape:
        case OneOf() | Intersection():
            return f"({text})"
        case Union():
            return f"({text}\n{indent})"
        case Word() | Array() | Object():
            return text


def _object(shape: Object, description: str | None, indent: str) -> Iterator[str]:
    if description is not None:
        yield from comment(description, indent)
    yield "{"
    for name, node in shape.properties:
        key = name if _IDENTIFIER.fullmatch(name) else literal(name)
        yield from _property(key if name in shape.required else f"{key}?", node, indent)
    if shape.index:
        yield from _property("[key: string]", shape.index, indent)
    yield indent + "}"


def _property(key: str, node: Node, indent: str) -> Iterator[str]:
    notes = node.notes
    if notes.title is not None:
        yield from (*comment(notes.title, indent), f"{indent}//")
    if isinstance(node.shape, Union):
        yield from _examples(notes, indent)
        yield from _union_property(key, node.shape, notes, indent)
        return
    if notes.description is not None:
        yield from comment(notes.description, indent)
    yield from _examples(notes, indent)
    default = f" // {_default(notes)}" if notes.default is not None else ""
    yield f"{indent}{key}: {typescript(node, indent + '    ')},{default}"


def _union_property(key: str, union: Union, notes: Notes, indent: str) -> Iterator[str]:
    """Yield a property with one line per variant.

    As in openai_harmony, the property's description replaces the first variant's and is not repeated for others.  If
    it equals the first variant's, it is not printed at all.
    """
    first = union.variants[0].notes.description
    is_described = notes.description is not None and notes.description != first
    if is_described:
        yield from comment(notes.description or "", indent)
    if notes.default is not None:
        yield f"{indent}// {_default(notes)}"
    yield f"{indent}{key}:"
    yield from _variants(union, list(_property_remarks(union, notes, is_described=is_described)), indent)
    yield f"{indent},"


def _variants(union: Union, remarks: Iterable[list[str]], indent: str) -> Iterator[str]:
    for variant, texts in zip(union.variants, remarks, strict=True):
        comment = f" // {' '.join(texts)}" if texts else ""
        yield f"{indent} | {typescript(variant, indent + '   ')}{comment}"


def _ends_incomment(node: Node) -> bool:
    """True if the type ends in a comment, so that code after it needs a new line."""
    if not isinstance(node.shape, Union):
        return False
    last = node.shape.variants[-1]
    return bool(_remarks(last.notes)) or _ends_incomment(last)


# Notes


def _remarks(notes: Notes) -> list[str]:
    default = [f"default: {notes.default}"] if notes.default is not None else []
    return [*_one_line(notes.description), *default]


def _property_remarks(union: Union, notes: Notes, *, is_described: bool) -> Iterator[list[str]]:
    for position, variant in enumerate(union.variants):
        described = variant.notes.description
        repeated = described == notes.description or (position == 0 and is_described)
        default = [_default(variant.notes)] if variant.notes.default is not None else []
        yield [*(() if repeated else _one_line(described)), *default]


def _default(notes: Notes) -> str:
    """Return the text for the default value; a string of an ``enum`` has no quotes if it needs no escapes."""
    text = notes.default or ""
    is_plain = notes.of_enum and text.startswith('"') and "\\" not in text
    return f"default: {text[1:-1] if is_plain else text}"


def _examples(notes: Notes, indent: str) -> Iterator[str]:
    if notes.examples:
        yield f"{indent}// Examples:"
        yield from (f"{indent}// - {example}" for example in notes.examples)


def _one_line(text: str | None) -> list[str]:
    return [] if text is None else [" ".join(_lines(text))]


def comment(text: str, indent: str = "") -> list[str]:
    """Return ``text`` as TypeScript comment lines."""
    return [f"{indent}// {line}" for line in _lines(text)]


def _lines(text: str) -> list[str]:
    """Split ``text`` into lines; a line break at its end does not begin another line."""
    lines = _LINE_BREAK.split(text)
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines
