"""Shapes as Python: types that compile, whatever a schema says.

The type of an object is a dict of types, as in the proposal of inline typed dicts.  Its notes are comments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from penstock.extensions.programs.names import whole_object
from penstock.stages.models.harmony.shapes import Array, Intersection, Node, Notes, Object, OneOf, Shape, Union, Word

INDENT: Final = "    "

MOST_LEVELS: Final = 6
"""Levels of lists and objects in a type; what is deeper is a plain ``list`` or ``dict``."""

LINE_CHARACTERS: Final = 100
"""Characters of a line without comments, before it is broken into several."""

MOST_DEFAULT_CHARACTERS: Final = 60
"""Characters of a default; a longer one is left out."""

MOST_EXAMPLES: Final = 3

ELLIPSIS: Final = "..."

_KEYWORDS: Final = {
    "string": "str",
    "number": "float",
    "boolean": "bool",
    "null": "None",
    "object": "dict",
    "Array<any>": "list",
    "any": "Any",
    "never": "Never",
}
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_TWO_QUOTES = re.compile('"(?="|$)')


def python_type(node: Node, indent: str = "", levels: int = MOST_LEVELS) -> str:
    """Return the type of ``node``; its lines after the first begin with ``indent``."""
    match node.shape:
        case Word() as word:
            return _either([word], indent, levels)
        case OneOf(options):
            return _either(options, indent, levels)
        case Union(variants):
            return _either([variant.shape for variant in variants], indent, levels)
        case Intersection(parts) as shape:
            return python_type(Node(whole_object(shape) or parts[0]), indent, levels)
        case Array(items):
            return f"list[{python_type(items, indent, levels - 1)}]" if levels else "list"
        case Object() as shape:
            return _object(shape, indent, levels - 1) if levels else "dict"


def _either(options: Sequence[Shape], indent: str, levels: int) -> str:
    types: dict[str, None] = {}
    literals: list[str] = []
    for option in options:
        if isinstance(option, Word) and (literal := _literal(option)):
            types["Literal"] = None
            literals.append(literal)
        else:
            types[_word(option) if isinstance(option, Word) else python_type(Node(option), indent, levels)] = None
    if "Any" in types:
        return "Any"
    values = ", ".join(dict.fromkeys(literals))
    return " | ".join(f"Literal[{values}]" if text == "Literal" else text for text in types)


def _word(word: Word) -> str:
    if word.is_whole:
        return "int"
    if word.text in _KEYWORDS:
        return _KEYWORDS[word.text]
    return {"{": "dict", "[": "list"}.get(word.text[:1], "Any")


def _literal(word: Word) -> str:
    """Return the value that a word stands for; empty if it is a type, or a value without a literal of its own."""
    if word.text in _KEYWORDS or word.text[:1] in "{[":
        return ""
    return python_value(word.text) or ""


def python_value(text: str) -> str | None:
    """Return a JSON value as Python, on one line; None for what is none."""
    try:
        return _spelled(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _spelled(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False) if value.isprintable() else repr(value)
        case dict():
            return "{" + ", ".join(f"{_spelled(key)}: {_spelled(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_spelled, value)) + "]"
        case float() if not math.isfinite(value):
            raise ValueError(value)
        case _:
            return repr(value)


def _object(shape: Object, indent: str, levels: int) -> str:
    inner = indent + INDENT
    entries = [_entry(name, node, inner, levels, is_required=name in shape.required) for name, node in shape.properties]
    others = python_type(shape.index, inner, levels) if shape.index else ""
    if not entries:
        return f"dict[str, {others}]" if others else "dict"
    if others:
        entries.append((f"str: {others}", remark(shape.index.notes) if shape.index else ""))
    return laid_out("{", entries, "}", indent)


def _entry(name: str, node: Node, indent: str, levels: int, *, is_required: bool) -> tuple[str, str]:
    text = python_type(node, indent, levels)
    return f"{_spelled(name)}: {text if is_required else f'NotRequired[{text}]'}", remark(node.notes, with_default=True)


def laid_out(opening: str, entries: Sequence[tuple[str, str]], closing: str, indent: str) -> str:
    """Return entries between brackets: in one line if they are short, and none has a remark."""
    flat = f"{opening}{', '.join(text for text, _ in entries)}{closing}"
    if len(flat) <= LINE_CHARACTERS and "\n" not in flat and not any(noted for _, noted in entries):
        return flat
    lines = [opening]
    for text, noted in entries:
        first, line_break, rest = f"{indent}{INDENT}{text},".partition("\n")
        lines.append(f"{first}  # {noted}{line_break}{rest}" if noted else f"{first}{line_break}{rest}")
    return "\n".join([*lines, f"{indent}{closing}"])


def remark(notes: Notes, *, with_default: bool = False) -> str:
    """Return notes as the text of a comment."""
    parts = [one_line(notes.description or "")]
    if with_default and (default := default_of(notes)) != ELLIPSIS:
        parts.append(f"Default: {default}.")
    if notes.examples:
        parts.append(f"Such as {one_line(', '.join(notes.examples[:MOST_EXAMPLES]))}.")
    return " ".join(filter(None, parts))


def default_of(notes: Notes) -> str:
    """Return the default as Python; an ellipsis if there is none, or it is long."""
    if notes.default is None or len(notes.default) > MOST_DEFAULT_CHARACTERS:
        return ELLIPSIS
    return python_value(notes.default) or ELLIPSIS


def one_line(text: str) -> str:
    """Return a text as one line."""
    return " ".join(filter(None, (line.strip() for line in _lines(text))))


def docstring(text: str, indent: str) -> str:
    """Return a text as a docstring, from which nothing in it breaks out; empty for an empty text."""
    lines = [f"{indent}{line}".rstrip() for line in _lines(text.strip())]
    escaped = _TWO_QUOTES.sub(r'\\"', "\n".join(lines).strip().replace("\\", "\\\\"))
    return f'{indent}"""{escaped}"""' if escaped else ""


def _lines(text: str) -> Iterable[str]:
    return (_UNPRINTABLE.sub(" ", line).rstrip() for line in text.splitlines())
