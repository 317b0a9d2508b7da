"""Recorded text in a form that is safe to show in a terminal."""

from __future__ import annotations

from typing import Any

import msgspec

ALARM = "bold red"


def visible(text: str) -> str:
    """Escape all characters that are not printable, so that text cannot control the terminal, and mark line ends."""
    return "".join(_visible(character) for character in text).removesuffix("\n")


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def short(text: str, limit: int) -> str:
    """Return the first ``limit`` characters of a text, and the number of characters left out."""
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit} characters more"


def as_json(value: Any) -> str:
    """Return a value as JSON on one line."""
    return msgspec.json.encode(value).decode()
