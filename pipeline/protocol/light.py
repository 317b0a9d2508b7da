"""Light work: a few short texts, which are read, rendered or written in less time than a thread takes to begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

FEW_ITEMS: Final = 16
"""The most items, and parts of one, that are light."""

SHORT_CHARACTERS: Final = 2**13
"""The most characters that are light: about 2,000 tokens of English."""


_TEXTS = frozenset({"input_text", "output_text", "reasoning_text", "summary_text"})


def are_light(items: Sequence[Any], *texts: str | None) -> bool:
    """Return True for a few messages and thoughts of text alone that, with other ``texts``, are `SHORT_CHARACTERS`.

    Items of other kinds may need more work than their length shows: an image is decoded, and the arguments of a call
    are JSON.
    """
    if len(items) > FEW_ITEMS:
        return False
    return sum(map(_length, items)) + sum(len(text) for text in texts if text) <= SHORT_CHARACTERS


def _length(item: Any) -> int:
    """Return the characters of an item, or more than `SHORT_CHARACTERS` if it is not text alone."""
    content = item.content if item.type in ("message", "reasoning") else None
    if not content or len(content) > FEW_ITEMS:
        return SHORT_CHARACTERS + 1
    return len(getattr(item, "encrypted_content", None) or "") + sum(map(_length_of_part, content))


def _length_of_part(part: Any) -> int:
    kind = part.__struct_config__.tag or part.type
    is_plain = kind in _TEXTS and not (getattr(part, "annotations", ()) or getattr(part, "logprobs", ()))
    return len(part.text) if is_plain else SHORT_CHARACTERS + 1
