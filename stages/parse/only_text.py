"""The input of a custom tool, which gpt-oss sometimes writes as the JSON arguments of a function."""

from __future__ import annotations

import json
import re

_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BEGIN = re.compile(r'\s*(?:\{\s*(?:"i?n?p?u?t?(?:"\s*(?::\s*)?)?)?)?')
"""Text that more text may complete to such a beginning."""
_LONGEST_BEGINNING = 64
"""Characters.  A possible beginning is matched again with each piece, so its length is limited."""


class CustomInput:
    """Unwraps the input of one call: an object whose only value is the text ``input`` is that text.

    Text that begins like such an object is held back until its end.  All other text is passed on.
    """

    def __init__(self) -> None:
        self._beginning = ""
        self._rest: list[str] = []
        self._is_object = False
        self.is_plain = False
        """True once all further text is passed on as it is."""

    def feed(self, text: str) -> str:
        """Take more text and return the text that may be passed on."""
        if self.is_plain:
            return text
        if self._is_object:
            self._rest.append(text)
            return ""
        self._beginning += text
        self._is_object = _BEGINNING.match(self._beginning) is not None
        if self._is_object or (len(self._beginning) <= _LONGEST_BEGINNING and _MAY_BEGIN.fullmatch(self._beginning)):
            return ""
        self.is_plain = True
        return self._beginning

    def end(self) -> tuple[str, bool]:
        """Return the text that is still held back, and True if it was unwrapped."""
        if self.is_plain:
            return "", False
        written = self._beginning + "".join(self._rest)
        text = _only_input(written)
        return (written, False) if text is None else (text, True)


def _only_input(written: str) -> str | None:
    """Return the text ``input`` of an object that has nothing else; None for all other text."""
    try:
        arguments = json.loads(written, strict=False)  # models write line breaks as they are
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or arguments.keys() != {"input"} or not isinstance(arguments["input"], str):
        return None
    return arguments["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
