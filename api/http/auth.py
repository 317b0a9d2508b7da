"""Authentication: the API keys of this server, with the owner that each stands for.

Only the SHA-256 digest of a key is kept.  It is also the name of the owner in the store, so that neither memory nor
the database reveals a key.  A server without keys has a single owner, whose name is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from aiohttp import web

from penstock.api.http.errors import Handler
from penstock.api.http.prefix import prefix_of
from penstock.api.key_sources import UnusableKeys, given_keys, lines, usable
from penstock.pipeline.errors import Unauthorized
from penstock.pipeline.protocol.tools import HostedKind
from penstock.stages.normalize.tool_types import named

OWNER: web.RequestKey[str] = web.RequestKey("owner", str)
"""The owner of a request: the SHA-256 of its key in hex, or empty if no key is needed.

Only the owner of a response finds it.  An application around this one may set any other text.
"""

OPEN = frozenset({"/", "/health", "/openapi.json"})
"""The paths that need no key."""

_TOOLS = " tools="


def is_open(request: web.Request) -> bool:
    """True if a request needs no key."""
    return request.rel_url.raw_path.removeprefix(prefix_of(request)) in OPEN


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
        source = f"--api-key-file {file}"
        parts = [line.partition(_TOOLS) for line in lines(file, source)]
        keys += usable((key.strip() for key, _, _ in parts), source)
        tools = {key.strip(): _named(names, source) for key, separator, names in parts if separator}
    if given is not None:
        keys += usable(given_keys(given), "PENSTOCK_API_KEYS, or api-keys in penstock.toml")
    return Keys(keys, tools)


def _named(names: str, source: str) -> frozenset[HostedKind]:
    try:
        return named(names.split(","))
    except ValueError as error:
        raise UnusableKeys(f"{source}: tools: {error}") from None


def _digest(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()
