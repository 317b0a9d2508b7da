"""The places that keys come from: files with one key per line, and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.api.api_key import ApiKey, key_of, plain_key
from penstock.pipeline.errors import CannotStart

T = TypeVar("T")


class UnusableKeys(CannotStart):
    """The configured keys are missing, too short to protect the server, or impossible to send in a header."""


def lines(file: Path, source: str) -> Iterator[str]:
    """Yield the lines of a file without ``#`` comments, leaving out empty ones."""
    try:
        text = text_of(file)
    except OSError as error:
        raise UnusableKeys(f"{source}: {error.strerror}") from error
    yield from filter(None, map(without_comment, text.splitlines()))


def text_of(file: Path) -> str:
    """Return the text of a file of keys; what is no text in it stays in a comment."""
    return file.read_text(encoding="utf-8-sig", errors="surrogateescape")


def without_comment(line: str) -> str:
    """Return a line of a file of keys without its ``#`` comment, and without the blanks around it."""
    return re.sub(r"(^|\s)#.*", "", line).strip()


def api_keys(
    file: Path | None,
    given: str | Sequence[str] | None,
    own: Collection[str] | None = (),
    *,
    may_be_none: bool = False,
) -> list[ApiKey]:
    """Return the API keys of ``file``, one per line, and the ``given`` keys; ``own`` is that of `key_of`.

    Raises `UnusableKeys` if the file cannot be read, for an unusable key, and for a source without any key, unless it
    ``may_be_none``.
    """
    return _keys(file, given, "api-key", "" if may_be_none else "API key", partial(key_of, own=own))


def seal_keys(file: Path | None, given: str | Sequence[str] | None) -> list[bytes]:
    """Return the keys that seal content, those of ``file`` first; raise `UnusableKeys` as for API keys."""
    return [key.encode() for key in _keys(file, given, "seal-key", "key", plain_key)]


def _keys(
    file: Path | None, given: str | Sequence[str] | None, option: str, kind: str, read: Callable[[str], T]
) -> list[T]:
    """Read each key of both sources; in a text, commas or white space separate the given keys.

    ``kind`` names in an error what a source without any key lacks; it is empty if that is no error.
    """
    keys: list[T] = []
    if file is not None:
        source = f"--{option}-file {file}"
        keys += _usable(lines(file, source), source, kind, read)
    if given is not None:
        source = f"PENSTOCK_{option.upper().replace('-', '_')}S, or {option}s in penstock.toml"
        separate = re.findall(r"[^,\s]+", given) if isinstance(given, str) else given
        keys += _usable(separate, source, kind, read)
    return keys


def _usable(given: Iterable[str], source: str, kind: str, read: Callable[[str], T]) -> Iterator[T]:
    """Read each key; raise `UnusableKeys` for an unusable one, without showing it in the message."""
    number = 0
    for number, key in enumerate(given, start=1):
        try:
            yield read(key)
        except ValueError as error:
            raise UnusableKeys(f"{source}: key {number} {error}") from None
    if kind and not number:
        raise UnusableKeys(f"{source}: there is no {kind}")
