"""Rewrite: change the model's text while it streams.

The server does not use this stage itself; it is a base for stages of your own.  A function changes the text, and text
that may still become part of a match is held back until more has arrived.
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
    """Let ``change`` rewrite messages, refusals and reasoning; the stage goes after ``parse``.

    The arguments of tool calls pass unchanged, because the tools need the original text.  ``held`` matches text at the
    end of the stream so far that must wait for more.  Everything that ``change`` replaces has to lie within one such
    match; then the result does not depend on how the stream was cut.
    """

    change: Change
    held: re.Pattern[str]

    async def __call__(self, source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        """Yield the rewritten frames; token ids, logprobs and raw messages do not reveal the original text either."""
        rewriter = Rewriter(self.change, self.held)
        async for frame in source:
            for rewritten in rewriter.feed(frame):
                yield rewritten


_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


def _at_the_end(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern anchored at the end of the text.

    Inline flags such as ``(?i)`` are removed from its start, where alone they are allowed; ``pattern.flags`` has them.
    """
    bare = pattern.pattern.removeprefix(flags[0] if (flags := _FLAGS.match(pattern.pattern)) else "")
    return re.compile(f"(?:{bare}{chr(10) if pattern.flags & re.VERBOSE else ''})\\Z", pattern.flags)


class Rewriter:
    """State machine, one per generation."""

    def __init__(self, change: Change, held: re.Pattern[str]) -> None:
        self._change = change
        self._held = _at_the_end(held)
        self._rest: str | None = None  # None unless a rewritten item is open
        self._is_changed = False

    def feed(self, frame: ParsedFrame) -> Iterable[ParsedFrame]:
        """Take one frame and return the frames that can be passed on now."""
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
        match = self._held.search(text)
        at = match.start() if match else len(text)
        self._rest = text[at:]
        yield from self._settle(text[:at])

    def _settle(self, text: str) -> Iterator[ItemDelta]:
        """Yield the changed text; drop logprobs (they would reveal the original text), and emit no empty delta."""
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
        if isinstance(value, str):
            return self._change(value)
        if isinstance(value, dict):
            return {name: self._everywhere(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._everywhere, value))
        return value
