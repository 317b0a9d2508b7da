"""The arguments of a call, as templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.pipeline.protocol.params.json_body import DEEPEST

_BROKEN = "arguments"


class Arguments(dict[str, Any]):
    """Arguments by their names; a template that wants text gets JSON: the model's own words, broken or not.

    Words that are no JSON object, or one of very many levels, are the one argument ``arguments`` to a template that
    wants names.
    """

    def __init__(self, text: str, named: Mapping[str, Any] | None = None) -> None:
        super().__init__(_named(text) if named is None else named)
        self.text = text

    def __str__(self) -> str:
        return self.text or "{}"

    def __add__(self, more: str) -> str:
        return str(self) + more

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __deepcopy__(self, memo: object) -> Arguments:
        return Arguments(self.text, self)  # nobody writes to it


def _named(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        named = None
    return named if isinstance(named, dict) and not _is_deep(named, DEEPEST) else {_BROKEN: text}


def _is_deep(value: Any, most: int) -> bool:
    """Whether it has more than so many levels: templates, and who writes JSON, go down level by level."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner)
