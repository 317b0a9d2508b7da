"""Readings of files and images for the model: their content, or a sentence that says why it is not there.

What a tool returned, and what a conversation had before, never refuses a turn: an agent could not take it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

from msgspec.structs import replace

from penstock.pipeline.protocol.items import (
    ComputerCallOutput,
    FileReading,
    InputFile,
    InputImage,
    InputText,
    Item,
    Message,
    MessagePart,
    Unseen,
    parts_of,
)

TEXT_ONLY = "This model reads text only."
"""The reason why an image is not shown to a model that sees none."""

UNHEARD = "This server does not hear."
"""The reason why a recording is not read."""


def image_instead(reason: str) -> str:
    """Return the sentence that the model reads in the place of an image."""
    return _sentence("image", "shown", reason)


def audio_instead() -> str:
    """Return the sentence that the model reads in the place of a recording."""
    return _sentence("audio", "heard", UNHEARD)


def file_instead(name: str, reason: str) -> str:
    """Return the sentence that the model reads in the place of a file."""
    return _sentence(f"file {name!r}", "read", reason)


def _sentence(what: str, done: str, reason: str) -> str:
    return f"[The {what} cannot be {done}: {reason[:1].lower()}{reason[1:]}]"


def is_file(part: MessagePart) -> TypeGuard[InputFile | InputImage]:
    """True if the model reads something else in the place of a part: a file, or an image that is a stored file."""
    return isinstance(part, InputFile) or (isinstance(part, InputImage) and isinstance(part.file_id, str))


def as_read(item: Item, readings: Iterable[FileReading], unseen: Mapping[str, str]) -> Item:
    """Return an item as the model reads it.

    A text that is not the item's own continues the text before it, on a line of its own.
    ``readings`` take the place of its files, and sentences that of the images whose URLs are in ``unseen``, each with
    the reason.
    """
    parts, read, left = parts_of(item), list[MessagePart](), iter(readings)
    is_changed = False
    for part in parts:
        shown = tuple(_shown(next(left, (part,)) if is_file(part) else (part,), unseen))
        is_changed = is_changed or shown != (part,)
        for each in shown:
            before = read[-1] if read else None
            if each is not part and isinstance(each, InputText) and isinstance(before, InputText):
                between = "" if before.text.endswith("\n") else "\n"
                read[-1] = InputText(f"{before.text}{between}{each.text}")
            else:
                read.append(each)
    if not is_changed:
        return item
    if isinstance(item, ComputerCallOutput):
        return replace(item, output=Unseen("", "".join(part.text for part in read if isinstance(part, InputText))))
    return replace(item, **{"content" if isinstance(item, Message) else "output": tuple(read)})


def _shown(reading: str | Iterable[MessagePart], unseen: Mapping[str, str]) -> Iterator[MessagePart]:
    for part in (InputText(reading),) if isinstance(reading, str) else reading:
        reason = unseen.get(part.url) if isinstance(part, InputImage) else None
        yield part if reason is None else InputText(image_instead(reason))
