"""The places that keys come from: files with one key per line, and settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.pipeline.errors import CannotStart

LEAST_LENGTH = 16
"""The fewest characters of a key.  A shorter one could be guessed, at the latest from its digest in the store."""


class UnusableKeys(CannotStart):
    """The configured keys are missing, too short to protect the server, or impossible to send in a header."""


def lines(file: Path, source: str) -> Iterator[str]:
    """Yield the lines of a file without ``#`` comments, leaving out empty ones."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UnusableKeys(f"{source}: {error.strerror}") from error
    for line in text.splitlines():
        if key := re.sub(r"(^|\s)#.*", "", line).strip():
            yield key


def given_keys(given: str | Sequence[str]) -> Sequence[str]:
    """Return the keys of a setting; in a text, commas or white space separate them."""
    return re.findall(r"[^,\s]+", given) if isinstance(given, str) else given


def usable(keys: Iterable[str], source: str, kind: str = "API key") -> Iterator[str]:
    """Yield the same keys; raise `UnusableKeys` for an unusable one, without showing it in the message."""
    number = 0
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_LENGTH:
            raise UnusableKeys(f"{source}: key {number} has fewer than {LEAST_LENGTH} characters")
        if not re.fullmatch("[!-~]+", key):
            raise UnusableKeys(f"{source}: key {number} is not one word of visible ASCII characters")
        yield key
    if not number:
        raise UnusableKeys(f"{source}: there is no {kind}")


def seal_keys(file: Path | None, given: str | Sequence[str] | None) -> list[bytes]:
    """Return the keys that seal content, those of ``file`` first; raise `UnusableKeys` as for API keys."""
    keys: list[str] = []
    if file is not None:
        source = f"--seal-key-file {file}"
        keys += usable(lines(file, source), source, "key")
    if given is not None:
        keys += usable(given_keys(given), "PENSTOCK_SEAL_KEYS, or seal-keys in penstock.toml", "key")
    return [key.encode() for key in keys]
