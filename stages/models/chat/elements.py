"""Values made of elements: ``<name>`` and ``</name>`` after a mark, which nest, translated into JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.stages.models.chat.argument_values import ArgumentSchema, as_json
from penstock.stages.models.chat.json_value import to_json

_MOST_LEVELS = 64
"""Elements within elements after which what is written stays text."""


def elements_as_json(text: str, schema: ArgumentSchema, mark: str) -> str:
    """Return a value as JSON: an object or a list of its elements if it has any, and else what its text means.

    An element begins with ``mark`` and ``<``; without a mark there are none.  Those of one name
    become a list in an object.
    """
    if not mark or f"{mark}<" not in text:
        return as_json(text, schema)
    try:
        return to_json(_Elements(text, mark).value(schema, 0))
    except _NotClosed:
        return as_json(text, schema)


class _NotClosed(Exception):
    """An element does not end."""


class _Elements:
    def __init__(self, text: str, mark: str) -> None:
        self._text = text
        self._tag = re.compile(re.escape(mark) + r"<(/?)([^<>]+)>")
        self._at = 0

    def value(self, schema: ArgumentSchema, depth: int, name: str | None = None) -> Any:
        """Read up to the end of the element ``name``, or of the text without one.  Raises `_NotClosed`."""
        children: list[tuple[str, Any]] = []
        begin = self._at
        is_list = "array" in schema.types and "object" not in schema.types
        while True:
            tag = self._tag.search(self._text, self._at)
            if tag is None or (tag[1] and tag[2] == name):
                self._at = tag.end() if tag else len(self._text)
                if tag is None and name is not None:
                    raise _NotClosed
                break
            if tag[1] or depth > _MOST_LEVELS:
                raise _NotClosed
            self._at = tag.end()
            is_item = is_list or (tag[2] == "item" and not schema.has("item") and "array" in schema.types)
            child_schema = schema.of_items if is_item else schema.of_property(tag[2])
            children.append((tag[2], self.value(child_schema, depth + 1, tag[2])))
        if not children:
            written = self._text[begin : tag.start() if tag else None]
            return json.loads(as_json(written, schema))
        names = [child for child, _ in children]
        if is_list or ("array" in schema.types and set(names) == {"item"} and not schema.has("item")):
            return [value for _, value in children]
        given: dict[str, list[Any]] = {}
        for child, value in children:
            given.setdefault(child, []).append(value)
        return {child: values if len(values) > 1 else values[0] for child, values in given.items()}
