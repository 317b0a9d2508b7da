"""The values of settings, as text and as JSON: durations, sizes, lists and tables."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def seconds(value: Any) -> Any:
    """Return the seconds of ``30d``, ``12h``, ``5m``, ``90s`` or ``90``, or a number as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(value))):
        raise ValueError(f"expected a duration, such as 30d, 12h, 5m or 90s, not {value!r}")
    return float(match[1]) * _UNITS[match[2]]


def size(value: Any) -> Any:
    """Return the bytes of ``32MiB`` or ``33554432``; leave anything else to pydantic."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]iB)?\s*", value) if isinstance(value, str) else None
    return int(match[1]) * _SIZES[match[2] or ""] if match else value


def listed(value: Any) -> Any:
    """Return the entries of ``a,b`` or of a JSON list; leave what is no text to pydantic."""
    if not isinstance(value, str):
        return value
    is_json = re.match(r'\s*\[\s*["\]]', value)  # and not an address as in [::1]
    return decoded(value) if is_json else [part.strip() for part in value.split(",") if part.strip()]


def decoded(value: Any) -> Any:
    """Return the value of a JSON text; leave anything else to pydantic."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error


def web_address(url: str) -> str:
    """Return a URL of a server; raise `ValueError` if it is none."""
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError("it must begin with http:// or https://, and name a host, without a user or a password")
    return url


Duration = Annotated[float, BeforeValidator(seconds), Field(ge=0, allow_inf_nan=False, title="TIME")]
"""A duration in seconds; as text it may have one of the units ``s``, ``m``, ``h`` and ``d``."""

Size = Annotated[int, BeforeValidator(size), Field(gt=0, title="SIZE")]
"""A number of bytes; as text it may have one of the units ``KiB``, ``MiB`` and ``GiB``."""

Texts = Annotated[list[str], NoDecode, BeforeValidator(listed)]
"""A list, whose text is one entry, entries with commas between them, or JSON."""

Table = Annotated[dict[str, Any], NoDecode, BeforeValidator(decoded), Field(title="JSON")]
"""A table, whose text is JSON."""

Tables = Annotated[dict[str, dict[str, Any]], NoDecode, BeforeValidator(decoded)]
"""Tables by their names, whose text is JSON."""
