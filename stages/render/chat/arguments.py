"""The arguments of a call, as templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.pipeline.protocol.params.json_body import DEEPEST

_BROKEN = "arguments"


class Arguments(dict[str, Any]):
    """Arguments as a dict by name; as a string, the JSON text that the model wrote, valid or not.

    A template may use either form.  Text that is not a JSON object, or is nested too deeply, becomes the single
    argument ``arguments`` of the dict.
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
        return Arguments(self.text, self)  # the values are never changed, so they can be shared


def _named(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):
        named = None
    return named if isinstance(named, dict) and not _is_deep(named, DEEPEST) else {_BROKEN: text}


def _is_deep(value: Any, most: int) -> bool:
    """Return True if ``value`` has more than ``most`` levels: templates and JSON encoders recurse into each level."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner)
