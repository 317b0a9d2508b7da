"""Authentication: the API keys of this server, with the owner that each stands for.

Only the SHA-256 digest of a key is kept.  It is also the name of the owner in the store, so that neither memory nor
the database reveals a key.  A server without keys has a single owner, whose name is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from aiohttp import web

from penstock.api.http.errors import Handler
from penstock.api.http.prefix import prefix_of
from penstock.pipeline.errors import CannotStart, Unauthorized
from penstock.pipeline.protocol.tools import HostedKind
from penstock.stages.normalize.tool_types import named

OWNER: web.RequestKey[str] = web.RequestKey("owner", str)
"""The owner of a request: the SHA-256 of its key in hex, or empty if no key is needed.

Only the owner of a response finds it.  An application around this one may set any other text.
"""

OPEN = frozenset({"/", "/health", "/openapi.json"})
"""The paths that need no key."""


LEAST_LENGTH = 16
"""The fewest characters of a key.  A shorter one could be guessed, at the latest from its digest in the store."""


_TOOLS = " tools="


def is_open(request: web.Request) -> bool:
    """True if a request needs no key."""
    return request.rel_url.raw_path.removeprefix(prefix_of(request)) in OPEN


class UnusableKeys(CannotStart):
    """The configured keys are missing, too short to protect the server, or impossible to send in a header."""


class Keys:
    """The API keys of this server; without keys it is open to all clients."""

    def __init__(self, keys: Iterable[str] = (), tools: Mapping[str, frozenset[HostedKind]] | None = None) -> None:
        self._owners = tuple(dict.fromkeys(map(_digest, keys)))
        self.tools = {_digest(key): kinds for key, kinds in (tools or {}).items()}
        """The built-in tools that an owner may use, for keys with a list of their own."""

    @property
    def are_needed(self) -> bool:
        """True if a request needs a key."""
        return bool(self._owners)

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Set the `OWNER` of a request; raise `Unauthorized` if its key is missing or unknown.

        A middleware of an application around this one may have set it already.
        """
        if OWNER not in request:
            request[OWNER] = "" if is_open(request) else self.owner(request.headers.get("Authorization", ""))
        return await handler(request)

    def owner(self, authorization: str) -> str:
        """Return the owner for an ``Authorization`` header; raise `Unauthorized` if its key is missing or unknown."""
        if not self._owners:
            return ""
        scheme, _, key = authorization.partition(" ")
        sent = _digest(key.strip())
        matches = [compare_digest(sent, owner) for owner in self._owners]  # all, so that timing reveals nothing
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized
        return sent


def load_keys(file: Path | None, given: str | Sequence[str] | None) -> Keys:
    """Load the keys of ``file``, one per line, and the ``given`` keys; in a text, commas or white space separate them.

    A line of the file may name the built-in tools of its key, as in ``KEY tools=code_interpreter,web_search``.

    Raises `UnusableKeys` if the file cannot be read, and for an unusable key or a source without any key.
    """
    keys: list[str] = []
    tools: dict[str, frozenset[HostedKind]] = {}
    if file is not None:
        lines = [line.partition(_TOOLS) for line in _lines(file)]
        keys += _usable((key.strip() for key, _, _ in lines), f"--api-key-file {file}")
        tools = {key.strip(): _named(names, f"--api-key-file {file}") for key, separator, names in lines if separator}
    if given is not None:
        keys += _usable(
            re.findall(r"[^,\s]+", given) if isinstance(given, str) else given,
            "PENSTOCK_API_KEYS, or api-keys in penstock.toml",
        )
    return Keys(keys, tools)


def _named(names: str, source: str) -> frozenset[HostedKind]:
    try:
        return named(names.split(","))
    except ValueError as error:
        raise UnusableKeys(f"{source}: tools: {error}") from None


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file without ``#`` comments, leaving out empty ones."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UnusableKeys(f"--api-key-file {file}: {error.strerror}") from error
    for line in text.splitlines():
        if key := re.sub(r"(^|\s)#.*", "", line).strip():
            yield key


def _usable(keys: Iterable[str], source: str) -> Iterator[str]:
    """Yield the same keys; raise `UnusableKeys` for an unusable one, without showing it in the message."""
    number = 0
    for number, key in enumerate(keys, start=1):
        if len(key) < LEAST_LENGTH:
            raise UnusableKeys(f"{source}: key {number} has fewer than {LEAST_LENGTH} characters")
        if not re.fullmatch("[!-~]+", key):
            raise UnusableKeys(f"{source}: key {number} is not one word of visible ASCII characters")
        yield key
    if not number:
        raise UnusableKeys(f"{source}: there is no API key")


def _digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()
