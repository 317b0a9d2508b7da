"""The content of messages in the two forms that chat templates take: one text, or a list of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Content: TypeAlias = str | list[dict[str, Any]]


def text_part(text: str) -> dict[str, Any]:
    """Return a part that is text."""
    return {"type": "text", "text": text}


def content_of(texts: Sequence[str]) -> Content:
    """Return the content of a message with these texts, which stay apart."""
    return [text_part(text) for text in texts] if len(texts) > 1 else "".join(texts)


def as_text(content: Content | None) -> Content:
    """Return content as one text, with each part on a line of its own; as it is if it has images."""
    parts = as_parts(content)
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def as_parts(content: Content | None) -> list[dict[str, Any]]:
    """Return content as a list of parts; empty for None."""
    if content is None:
        return []
    return [text_part(content)] if isinstance(content, str) else content


def as_template_takes(message: dict[str, Any], *, parts: bool) -> dict[str, Any]:
    """Return a message for a template that takes ``parts``, or texts; the output of a call is a text for both."""
    form = as_parts if parts and message["role"] != "tool" else as_text
    return {**message, "content": form(message.get("content"))}
