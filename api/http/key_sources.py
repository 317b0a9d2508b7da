"""The places that keys come from: files with one key per line, and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.api.http.api_key import ApiKey, key_of, plain_key
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import counted

T = TypeVar("T")

SHOWN = 5
"""The most mistakes of one source that an error names."""


class UnusableKeys(CannotStart):
    """The configured keys are missing, too short to protect the server, or impossible to send in a header."""


MAKING = {"api-key": "penstock keys make NAME --file {}", "seal-key": "openssl rand -hex 32 > {}"}
"""Commands that make a file of keys, by its option."""


def _lines(file: Path, source: str, making: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line of a file that has more than a ``#`` comment."""
    try:
        text = text_of(file)
    except FileNotFoundError as error:
        raise UnusableKeys(f"{source}: {error.strerror}; to make it: {making.format(file)}") from error
    except OSError as error:
        raise UnusableKeys(f"{source}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if key := without_comment(line):
            yield f"the key in line {number}", key


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
        keys += _usable(_lines(file, source, MAKING[option]), source, kind, read)
    if given is not None:
        source = f"PENSTOCK_{option.upper().replace('-', '_')}S, or {option}s in penstock.toml"
        separate = re.findall(r"[^,\s]+", given) if isinstance(given, str) else given
        keys += _usable(((f"key {at}", key) for at, key in enumerate(separate, start=1)), source, kind, read)
    return keys


def _usable(given: Iterable[tuple[str, str]], source: str, kind: str, read: Callable[[str], T]) -> list[T]:
    """Read each key at its place; raise `UnusableKeys` for unusable ones, without showing them in the message."""
    keys, mistakes = list[T](), list[str]()
    for place, key in given:
        try:
            keys.append(read(key))
        except ValueError as error:
            mistakes.append(f"{place} {error}")
    if mistakes:
        more = f"; {counted(len(mistakes) - SHOWN, 'more mistake')}" if len(mistakes) > SHOWN else ""
        raise UnusableKeys(f"{source}: {'; '.join(mistakes[:SHOWN])}{more}")
    if kind and not keys:
        raise UnusableKeys(f"{source}: there is no {kind}")
    return keys
