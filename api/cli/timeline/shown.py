"""What was recorded, as a terminal may show it."""

from __future__ import annotations

from typing import Any

import msgspec

ALARM = "bold red"


def visible(text: str) -> str:
    """Text that neither moves the cursor nor hides: what is no printable character is escaped, and lines show ends."""
    return "".join(_visible(character) for character in text).removesuffix("\n")


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def short(text: str, limit: int) -> str:
    """The beginning of a text, and how much more there is of it."""
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit} characters more"


def as_json(value: Any) -> str:
    """A value on one line."""
    return msgspec.json.encode(value).decode()
