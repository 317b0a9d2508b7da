"""The texts that families write around their calls, as the format of a grammar, if vLLM has no structural tag."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from penstock.stages.models.chat.model import Function


@dataclass(frozen=True)
class WrittenCalls:
    """The texts around the names and the arguments of calls.

    ``begin`` stands before the first name, ``middle`` between a name and its arguments, ``between`` after arguments and
    before the next name, and ``end`` after the last arguments.  ``style`` is the notation of arguments that are not
    JSON.  A family of which some models lack the ``mark`` writes in several ways.
    """

    begin: str
    middle: str
    between: str
    end: str = ""
    style: str = "json"
    mark: str = ""

    def format(self, functions: Iterable[Function], *, parallel: bool) -> dict[str, Any]:
        """Return the ``format`` of an xgrammar structural tag for calls of ``functions``, in turn if ``parallel``.

        The end of each call is that of its tag: a line break before it may also stand before another argument.
        """
        same = "" if self.style == "json" else commonprefix([self.between, self.end])  # noqa: RUF071 - no path
        closing = same[: same.rfind(">") + 1]  # whole marks
        tags = [self._tag(function["function"], closing) for function in functions]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.between.removeprefix(closing),
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        begin, end = ({"type": "const_string", "value": text} for text in (self.begin, self.end.removeprefix(closing)))
        return {"type": "sequence", "elements": [begin, calls, *([end] if end["value"] else [])]}

    def _tag(self, function: Function, closing: str) -> dict[str, Any]:
        schema = function.get("parameters", True) if function.get("strict") else True
        content = {"type": "json_schema", "json_schema": schema, "style": self.style}
        return {"type": "tag", "begin": f"{function['name']}{self.middle}", "content": content, "end": closing}


def json_objects(
    begin: str, end: str = "", *, between: str = ", ", arguments: str = "arguments", mark: str = ""
) -> WrittenCalls:
    """Return calls that are JSON objects with a name and arguments."""
    head = '{"name": "'
    return WrittenCalls(f"{begin}{head}", f'", "{arguments}": ', f"}}{between}{head}", f"}}{end}", mark=mark)


def chosen(written: Sequence[WrittenCalls], marks: Container[str]) -> WrittenCalls | None:
    """Return the first way for which the vocabulary has the mark; None if there is none."""
    return next((each for each in written if not each.mark or each.mark in marks), None)
