"""The model's calls of the browser functions; arguments are read leniently if their meaning is clear."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from yarl import URL

from penstock.stages.models.shell_calls import ArgumentsInvalid

_MOST_QUERY_CHARACTERS = 2_000
"""Characters of a query that an item shows."""
_MOST_PATTERN_CHARACTERS = 500
"""Characters of a pattern that an item shows."""


class CallFailed(Exception):
    """A call failed; the message is for the model."""


@dataclass(frozen=True)
class Search:
    """Search for pages.  The arguments ``topn`` and ``source`` are ignored: all searches have the same settings."""

    query: str


@dataclass(frozen=True)
class Open:
    """Open a URL, a link of the page at ``cursor``, or that page at another line (``loc``)."""

    target: str | int | None = None
    cursor: int = -1
    loc: int = -1
    num_lines: int = -1
    view_source: bool = False


@dataclass(frozen=True)
class Find:
    """Find text in the page at ``cursor``."""

    pattern: str
    cursor: int = -1


Call: TypeAlias = Search | Open | Find


def parse_call(name: str, text: str) -> Call:
    """Parse a call; raises `ArgumentsInvalid` for an unknown function or invalid arguments."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ArgumentsInvalid("Invalid function arguments: they are not JSON.") from None
    if not isinstance(arguments, dict):
        raise ArgumentsInvalid("Invalid function arguments: they are not an object.")
    match name:
        case "search":
            return Search(_text(arguments, "query")[:_MOST_QUERY_CHARACTERS])
        case "open":
            return _open(arguments)
        case "find":
            return Find(_text(arguments, "pattern")[:_MOST_PATTERN_CHARACTERS], _number(arguments, "cursor"))
        case _:
            raise ArgumentsInvalid(f"Unknown function: {name}")


def _open(arguments: dict[str, Any]) -> Open:
    target = arguments.get("id")
    if isinstance(target, str) and not re.fullmatch(r"\s*-?[0-9]{1,9}\s*", target):
        chosen: str | int | None = _url(target) or None
    else:
        number = _number(arguments, "id")
        chosen = number if number >= 0 else None
    return Open(
        chosen,
        cursor=_number(arguments, "cursor"),
        loc=_number(arguments, "loc"),
        num_lines=_number(arguments, "num_lines"),
        view_source=arguments.get("view_source") is True,
    )


def _url(text: str) -> str:
    """Return the URL in its normalized form, with a scheme: models often leave it out."""
    text = _whole(text.strip())
    if text and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?![0-9])", text):
        text = f"https://{text}"
    try:
        return str(URL(text)) if text.startswith(("http://", "https://")) else text
    except ValueError:  # the model wrote a port or a host that cannot be; fetching it fails with the reason
        return text


def _whole(text: str) -> str:
    """Replace lone surrogates, which JSON can spell but UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ArgumentsInvalid(f"Invalid function arguments: `{name}` has to be a text.")
    return _whole(value)


def _number(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name)
    if value is None:
        return -1
    if isinstance(value, bool) or not re.fullmatch(r"\s*-?[0-9]{1,9}(\.0*)?\s*", str(value)):
        raise ArgumentsInvalid(f"`{name}` should be an integer, not `{type(value).__name__}`")
    return int(float(value))
