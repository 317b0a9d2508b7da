"""Rewrite: what the model says, in other words, while it says it.

Not a stage of the server's, but one to build others of: what to change is a function of a text, and what may still
become part of what it changes is held back until more has come.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from penstock.pipeline.frames import (
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    RefusalOpened,
    TurnFinished,
)

Change = Callable[[str], str]


@dataclass(frozen=True)
class Rewrite:
    """Lets ``change`` rewrite messages, refusals and thoughts, behind ``parse``; tools would miss what it changes.

    ``held`` matches, at the end of a text, what is too early to be changed.  Whatever ``change`` looks for has to be
    within one such match: then it does not matter how the text was cut.
    """

    change: Change
    held: re.Pattern[str]

    async def __call__(self, source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Nothing that is rewritten stays as it was anywhere: in tokens, logprobs or raw messages."""
        rewriter = Rewriter(self.change, self.held)
        async for frame in source:
            for rewritten in rewriter.feed(frame):
                yield rewritten


_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


def _at_the_end(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """The same pattern, matching up to the end of a text only; flags in front of it may stand nowhere else."""
    bare = pattern.pattern.removeprefix(flags[0] if (flags := _FLAGS.match(pattern.pattern)) else "")
    return re.compile(f"(?:{bare}{chr(10) if pattern.flags & re.VERBOSE else ''})\\Z", pattern.flags)


class Rewriter:
    """The machine: one per generation."""

    def __init__(self, change: Change, held: re.Pattern[str]) -> None:
        self._change = change
        self._held = _at_the_end(held)
        self._rest: str | None = None  # None while nothing is open that is rewritten
        self._is_changed = False

    def feed(self, frame: ParsedFrame) -> Iterable[ParsedFrame]:
        """Take one frame, give what is settled by it."""
        match frame:
            case ItemDelta(text):
                return (frame,) if self._rest is None else self._read(self._rest + text)
            case ItemClosed():
                return self._close(frame)
            case TurnFinished(raw_messages=messages) if messages is not None:
                return (replace(frame, raw_messages=self._everywhere(messages)),)
            case MessageOpened() | ReasoningOpened() | RefusalOpened():
                self._rest, self._is_changed = "", False
            case _:
                pass
        return (frame,)

    def _read(self, text: str) -> Iterator[ItemDelta]:
        early = self._held.search(text)
        at = early.start() if early else len(text)
        self._rest = text[at:]
        yield from self._settle(text[:at])

    def _settle(self, text: str) -> Iterator[ItemDelta]:
        """Its tokens' logprobs would spell what it was; deltas are never empty."""
        changed = self._change(text)
        self._is_changed |= changed != text
        if changed:
            yield ItemDelta(changed)

    def _close(self, closed: ItemClosed) -> Iterator[ParsedFrame]:
        if self._rest:
            yield from self._settle(self._rest)
        yield replace(closed, token_ids=()) if self._rest is not None and self._is_changed else closed
        self._rest = None

    def _everywhere(self, value: Any) -> Any:
        """The same with all texts rewritten."""
        if isinstance(value, str):
            return self._change(value)
        if isinstance(value, dict):
            return {name: self._everywhere(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._everywhere, value))
        return value
