"""The input of a tool that takes plain text, which models sometimes write as the JSON arguments of a function."""

from __future__ import annotations

import json
import re

from penstock.stages.models.chat.json_value import ValueEnd

_KEY = r'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*'
_IN_OBJECT = re.compile(rf'\s*{_KEY}(?=")', re.DOTALL)
_IN_JSON = re.compile(rf'\s*(?:{_KEY})?(?=")', re.DOTALL)
_MAY_BEGIN = re.compile(r'\s*(?:\{\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?)?', re.DOTALL)
"""Text that more text may complete to such a beginning."""
_AFTER = re.compile(r"\s*\}?\s*")
_MOST_CHARACTERS = 256
"""Characters before and after the text.  They are matched again with each piece, so their length is limited."""


class OnlyText:
    """Unwraps the input of one call: an object whose only value is a text is that text, whatever its key.

    With ``is_json``, a JSON string is its text, too.  Text that may become one of these is held back until its end.
    All other text is passed on as the model wrote it.
    """

    def __init__(self, *, is_json: bool = False) -> None:
        self._is_json = is_json
        self._held: list[str] = []
        self._value: ValueEnd | None = None
        """The end of the text; None before its beginning."""
        self._after = ""
        self.is_plain = False
        """True once all further text is passed on as it is."""

    def feed(self, text: str) -> str:
        """Take more text and return the text that may be passed on."""
        if self.is_plain:
            return text
        self._held.append(text)
        if self._may_be_wrapped(text):
            return ""
        self.is_plain = True
        return "".join(self._held)

    def _may_be_wrapped(self, text: str) -> bool:
        if self._value is None:
            text = "".join(self._held)
            begun = (_IN_JSON if self._is_json else _IN_OBJECT).match(text)
            if begun is None:
                return len(text) <= _MOST_CHARACTERS and _MAY_BEGIN.fullmatch(text) is not None
            self._value, text = ValueEnd(), text[begun.end() :]
        if not self._value.found:
            end = self._value.feed(text)
            if end is None:
                return True
            text = text[end:]
        self._after += text
        return len(self._after) <= _MOST_CHARACTERS and _AFTER.fullmatch(self._after) is not None

    def end(self) -> tuple[str, bool]:
        """Return the text that is still held back, and True if it was unwrapped."""
        if self.is_plain:
            return "", False
        written = "".join(self._held)
        text = self._only_text(written)
        return (written, False) if text is None else (text, True)

    def _only_text(self, written: str) -> str | None:
        try:
            value = json.loads(written, strict=False)  # models write line breaks as they are
        except (ValueError, RecursionError):
            return None
        values = [*value.values()] if isinstance(value, dict) else [value] if self._is_json else []
        match values:
            case [str(text)]:
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            case _:
                return None
