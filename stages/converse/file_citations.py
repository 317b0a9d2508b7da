"""Citations of files: annotations for the places of a message that name a file of a container by its path.

A path may go on in the next delta, so that the places are found at the end of the message, whose text stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from penstock.pipeline.frames import AnnotationAdded, ItemClosed, ItemDelta, MessageOpened
from penstock.services.containers import HOME, file_id
from penstock.services.tools import ContainerFiles

Frame = TypeVar("Frame")

MOST_CITED = 100
"""Annotations of one message for files."""

MOST_LOOKED_AT = 1_000
"""Places of one message that may be citations."""

_GOES_ON = re.compile(r"[\w/-]|\.\w")
"""The beginning of more of a path: the one before it is not the whole."""


class FileCitations:
    """State machine, one per turn, for the files that the calls of the response have left."""

    def __init__(self, files: Sequence[ContainerFiles]) -> None:
        self._files = files
        self._texts: list[str] | None = None

    def feed(self, frame: Frame) -> Iterable[Frame | AnnotationAdded]:
        """Take one frame of the turn, and return it, after the annotations if it ends a message."""
        match frame:
            case MessageOpened():
                self._texts = []
            case ItemDelta(text) if self._texts is not None:
                self._texts.append(text)
            case ItemClosed() if self._texts is not None:
                text, self._texts = "".join(self._texts), None
                return (*(AnnotationAdded(cited) for cited in citations(text, self._files)), frame)
            case _:
                pass
        return (frame,)


def citations(text: str, files: Sequence[ContainerFiles]) -> Iterator[dict[str, Any]]:
    """Yield an annotation for each place in a text that names a file, in order."""
    found = [mention for each in files for mention in _mentions(text, each)]
    end = 0
    for start, until, container_id, path in sorted(found, key=lambda each: (each[0], -each[1]))[:MOST_CITED]:
        if start < end:
            continue
        end = until
        yield {
            "type": "container_file_citation",
            "container_id": container_id,
            "file_id": file_id(container_id, path),
            "filename": path.rpartition("/")[2],
            "start_index": start,
            "end_index": until,
        }


def _mentions(text: str, files: ContainerFiles) -> Iterator[tuple[int, int, str, str]]:
    """Yield the start, the end, the container and the path of each mention; each takes a step per length of a path."""
    homes = [home for home in dict.fromkeys((HOME, files.home)) if f"{home}/" in text]
    if not homes:
        return
    paths = {written: path for path in files.paths for written in (path, quote(path))}
    lengths = sorted({len(written) for written in paths}, reverse=True)
    pattern = re.compile(f"(?:sandbox:)?(?:{'|'.join(map(re.escape, homes))})/")
    for match in islice(pattern.finditer(text), MOST_LOOKED_AT):
        at = match.end()
        for length in lengths:
            end = at + length
            path = paths.get(text[at:end]) if end <= len(text) else None
            if path is not None and not _GOES_ON.match(text, end):
                yield match.start(), end, files.container_id, path
                break
