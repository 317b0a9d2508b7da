"""Hide the secrets in a server's configuration from text that models and clients read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

from penstock.stages.services.mcp.config import HttpServer, ServerConfig

_SHORTEST = 8
"""Minimum length of a secret in characters.  A shorter text may be part of an ordinary word."""

_PUBLIC = frozenset(
    ("accept", "accept-encoding", "accept-language", "cache-control", "content-type", "origin", "referer", "user-agent")
)

_SECRETIVE = re.compile("key|token|secret|passw|pwd|auth|credential", re.IGNORECASE)
"""Names of environment variables that hold secrets.  Other values may appear in tool results."""


class Hidden:
    """Secrets to be removed from texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        longest_first = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def hide(self, text: str) -> str:
        """Return ``text`` with each secret replaced by ``[hidden]``."""
        return self._found.sub("[hidden]", text) if self._found else text


def hidden(config: ServerConfig) -> Hidden:
    """Return the secrets in a server's configuration.

    They are the header values except for well-known public headers, the password and query of the URL, and environment
    variables with a name that suggests a secret.
    """
    if isinstance(config, HttpServer):
        return Hidden((*_of_headers(config.headers), *_of_url(config.url)))
    return Hidden(value for name, value in config.env.items() if _SECRETIVE.search(name))


def _of_headers(headers: Mapping[str, str]) -> Iterable[str]:
    for name, value in headers.items():
        if name.lower() not in _PUBLIC:
            yield value
            yield value.partition(" ")[2]


def _of_url(url: str) -> Iterable[str]:
    parts = urlsplit(url)
    yield parts.query
    yield parts.password or ""
    yield unquote(parts.password or "")
    for pair in parts.query.split("&"):
        yield pair.partition("=")[2]
        yield unquote(pair.partition("=")[2])
