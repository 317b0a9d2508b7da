"""The words about a wrong value of a setting: they name what was expected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from penstock.pipeline.protocol.params.json_body import shortened

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def expected(error: ErrorDetails, example: Any, *, is_shown: bool) -> str:
    """Return what was expected in place of a wrong value, which the text has if it ``is_shown``."""
    message = error["msg"]
    if error["type"] == "value_error":
        return message.removeprefix("Value error, ")
    given = error["input"]
    if error["type"] in ("too_short", "string_too_short") and isinstance(given, str | SecretStr):
        return f"expected at least {error.get('ctx', {}).get('min_length')} characters"
    if is_shown and isinstance(given, str | int | float):
        message += f", not {shortened(str(given))!r}"
    if error["type"] == "literal_error" or example is None:  # the message lists all values
        return message
    return f"{message}, for example {example if isinstance(example, str) else json.dumps(example)}"
