"""Prefixes: lines whose prompts begin alike run together, so that the engine has their beginning in its cache."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

FIRST = 64
"""Bytes of the first piece of a prompt; each piece is as long as all before it."""

PIECES = 16
"""The most pieces: they reach over 2 MiB."""

_DIGITS = 6


def prefix_of(parts: Iterable[bytes]) -> str:
    """Return a text for the ``parts`` of a prompt: those that begin alike have texts that begin alike.

    It has a digest for each piece, of all up to its end.  Texts that are sorted are therefore grouped by their first
    piece, in each group by the next one, and so on.
    """
    digest, texts, at, size = blake2b(digest_size=8), list[str](), 0, FIRST
    prompt = b"\0".join(parts)
    while at < len(prompt) and len(texts) < PIECES:
        digest.update(memoryview(prompt)[at : at + size])
        texts.append(digest.hexdigest()[:_DIGITS])
        at += size
        size = at
    return "".join(texts)
