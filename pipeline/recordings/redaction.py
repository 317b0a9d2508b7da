"""Redaction of recordings: secrets are always left out, and texts if the operator wants none.

Secrets are the owner of a request, the credentials of its MCP servers, and the salt of its prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
from pydantic_core import from_json

from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.tools import ECHOED_KEYS
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import Failure, Header
from penstock.pipeline.secret import unwritten
from penstock.pipeline.urls import shown_url


def redacted_request(body: bytes) -> dict[str, Any]:
    """Return the body of a request without secrets and without unknown fields, which might contain some."""
    return redacted_fields(from_json(body), _KNOWN)


def redacted_fields(fields: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the known fields of the body of a request in any dialect, without secrets."""
    kept = {name: value for name, value in fields.items() if name in known and name not in _SECRET}
    return kept | {name: without_credentials(kept[name]) for name in _WITH_TOOLS if name in kept}


def without_secrets(frame: Any) -> dict[str, Any]:
    """Return a response, or a frame that refers to a request, as JSON values without secrets."""
    fields: dict[str, Any] = msgspec.to_builtins(frame, enc_hook=unwritten)
    facts = fields.get("facts", {})
    if origin := facts.get("origin"):
        kept = {name: value for name, value in origin.items() if name in _PUBLIC_ORIGIN}
        facts["origin"] = kept | ({"key": key_of(origin["owner"])} if origin.get("owner") else {})
    if scheduling := facts.get("scheduling"):
        facts["scheduling"] = {"priority": scheduling["priority"]}
    for server in facts.get("tools", {}).get("servers", ()):
        if server["url"]:
            server["url"] = shown_url(server["url"])
    return fields


def key_of(owner: str) -> str:
    """Return the `Origin.key` of an owner."""
    return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8, person=b"recording").hexdigest()


def public(frame: Any) -> Any:
    """Return a frame as it may be shown to the operator: one that may contain secrets becomes JSON values without."""
    return without_secrets(frame) if hasattr(frame, "facts") or hasattr(frame, "response") else frame


_KNOWN = frozenset(field.alias or name for name, field in CreateResponse.model_fields.items())

_PUBLIC_ORIGIN = frozenset({"position", "opening", "key", "session"})
"""The fields of the origin of a request that are written."""

_SECRET = frozenset({"cache_salt", "mcp_servers"})
"""Known fields that are never written."""

_WITH_TOOLS = ("tools", "tool_choice", "input")
"""Fields that may contain tools; in ``tool_choice``, some clients repeat the whole definition of a tool."""


def without_credentials(data: Any) -> Any:
    """Return data without the secrets of the tools in it.

    An MCP server keeps its host but not its credentials.  A sandbox loses its network policy.
    """
    match data:
        case list():
            return [without_credentials(each) for each in data]
        case {"type": "mcp"}:
            server = {name: value for name, value in data.items() if name in ECHOED_KEYS or name == "name"}
            url = server.get("server_url")
            return server | {"server_url": shown_url(str(url))} if url else server
        case dict():
            return {name: _part(name, value) for name, value in data.items()}
        case _:
            return data


def _part(name: str, value: Any) -> Any:
    if name in ("container", "environment") and isinstance(value, dict):
        return {key: part for key, part in value.items() if key != "network_policy"}
    return without_credentials(value) if name == "tools" else value


class Redaction:
    """The rules for writing one response.  This base class writes everything but secrets."""

    keeps_request = True
    changes_frames = False
    """True if frames that contain no secrets have to be redacted as well."""

    def keeps(self, stage: str) -> bool:
        """True if the output of ``stage`` is written to a file."""
        return True

    def frames(self, stage: str, frame: Any) -> Iterable[Any]:
        """Return the frames to write in place of an output of ``stage``; none if they depend on the next frame."""
        return (frame,)

    def response(self, response: Response) -> Response:
        """Return the response to write in place of the final one."""
        return response

    def failure(self, failure: Failure) -> Failure:
        """Return the failure to write in place of this one."""
        return failure


Redact: TypeAlias = Callable[[Header], Redaction]
"""Makes a redaction for each response, by its header; each is separate because it may hold back frames."""
