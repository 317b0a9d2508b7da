"""Citations: turn the marks with which the model cites pages and files into annotations, those of pages with a link.

The state machine rewrites the text of messages while it streams, and passes everything else on.  A mark may arrive in
any number of pieces, so a tail that may still become a mark is held back; marks are short, and so is that tail.  A mark
of an unknown page or file stays as it is: it is the model's own text, and may be quoted from the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.pipeline.frames import AnnotationAdded, ItemClosed, ItemDelta, MessageOpened
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.urls import host_of
from penstock.services.tools import FileSource, Listed, Source

Frame = TypeVar("Frame")

MARK = re.compile(r"【([0-9]{1,6})†L([0-9]{1,9})[^【】\n]{0,80}】")
_BEGINNING = re.compile(r"【(?:[0-9]{1,6}(?:†(?:L(?:[0-9][^【】\n]{0,88})?)?)?)?\Z")
"""A tail of text that may still become a mark: any prefix of one."""


class Citations:
    """State machine, one per turn; ``resolve`` returns the page or the file of a cursor, or None if there is none."""

    def __init__(self, resolve: Callable[[int], Source | FileSource | None]) -> None:
        self._resolve = resolve
        self._is_message = False
        self._length = 0
        self._last = ""
        self._held = ""
        self._logprobs: tuple[Logprob, ...] = ()
        self._owed: tuple[Logprob, ...] | None = None  # those of removed marks, until text follows

    def feed(self, frame: Frame) -> Iterable[Frame | ItemDelta | AnnotationAdded]:
        """Take one frame of the parser and return the frames that replace it."""
        match frame:
            case MessageOpened():
                self._is_message, self._length, self._last, self._owed = True, 0, "", None
            case ItemDelta() if self._is_message:
                if not self._held and self._owed is None and "【" not in frame.text:
                    self._count(frame.text)
                    return (frame,)
                return tuple(self._grown(frame))
            case ItemClosed() if self._is_message:
                self._is_message = False
                return (*self._rest(), frame)
            case _:
                pass
        return (frame,)

    def _grown(self, delta: ItemDelta) -> Iterator[ItemDelta | AnnotationAdded]:
        parts = list(self._read(self._held + delta.text))
        logprobs = (*self._logprobs, *delta.logprobs)
        at = _end(logprobs, self._held) if parts else 0
        logprobs, self._logprobs = logprobs[:at], logprobs[at:]
        for part in parts:
            if isinstance(part, str):
                yield from self._passed(part, logprobs)
            elif isinstance(part, FileSource):
                yield self._removed(part, logprobs)
            else:
                yield from self._cited(part, logprobs)
            logprobs = ()

    def _passed(self, text: str, logprobs: tuple[Logprob, ...]) -> Iterator[ItemDelta]:
        """Yield text of the model.

        After a removed mark, its first character comes without logprobs.  If every delta of a text has logprobs, their
        tokens have to spell the text, and those of the mark spell more.
        """
        owed, self._owed = self._owed, None
        logprobs = (*(owed or ()), *logprobs)
        if owed is not None and logprobs:
            yield self._delta(text[0])
            text = text[1:]
        yield self._delta(text, logprobs)

    def _removed(self, source: FileSource, logprobs: tuple[Logprob, ...]) -> AnnotationAdded:
        """Return the annotation in place of a mark of a file, where the text has nothing."""
        self._owed = (*(self._owed or ()), *logprobs)
        cited = {"file_id": source.file_id, "filename": source.filename, "index": self._length}
        return AnnotationAdded({"type": "file_citation", **cited})

    def _read(self, text: str) -> Iterator[str | Source | FileSource]:
        """Yield the text, with each mark replaced by its page or file; hold back a tail that may become a mark."""
        done = at = 0
        self._held = ""
        while (at := text.find("【", at)) >= 0:
            if (mark := MARK.match(text, at)) and (source := self._source(mark)):
                yield from (text[done:at], source) if at > done else (source,)
                done = at = mark.end()
            elif _BEGINNING.match(text, at):
                self._held = text[at:]
                break
            else:
                at += 1
        if rest := text[done : len(text) - len(self._held)]:
            yield rest

    def _source(self, mark: re.Match[str]) -> Source | FileSource | None:
        source = self._resolve(int(mark[1]))
        return source.at(int(mark[2])) if isinstance(source, Listed) else source

    def _cited(self, source: Source, logprobs: tuple[Logprob, ...]) -> Iterator[ItemDelta | AnnotationAdded]:
        """Yield a link in place of a mark, and its annotation.

        Its first character comes without logprobs.  If every delta of a text has logprobs, their tokens have to spell
        the text, and those of the mark do not spell the link.
        """
        address = source.url.replace("(", "%28").replace(")", "%29")  # a bare ")" would end the Markdown link
        link = f"([{host_of(source.url) or source.title}]({address}))"
        start = self._length
        if self._last.strip():
            start += 1
            yield self._delta(" ")
            yield self._delta(link, logprobs)
        else:
            yield self._delta(link[0])
            yield self._delta(link[1:], logprobs)
        yield AnnotationAdded(
            {
                "type": "url_citation",
                "url": source.url,
                "title": source.title,
                "start_index": start,
                "end_index": self._length,
            }
        )

    def _rest(self) -> Iterator[ItemDelta]:
        held, logprobs = self._held, self._logprobs
        self._held, self._logprobs = "", ()
        if held:
            yield from self._passed(held, logprobs)
        if self._owed:
            yield self._delta("", self._owed)

    def _delta(self, text: str, logprobs: tuple[Logprob, ...] = ()) -> ItemDelta:
        self._count(text)
        return ItemDelta(text, logprobs)

    def _count(self, text: str) -> None:
        self._length += len(text)
        self._last = text[-1:] or self._last


def _end(logprobs: tuple[Logprob, ...], held: str) -> int:
    at, bytes_left = len(logprobs), len(held.encode())
    while at and bytes_left > 0:
        at -= 1
        bytes_left -= len(logprobs[at].bytes)
    return at
