"""What recordings leave out: secrets always, and texts where the operator wants none.

Secrets are what says whose a request is, what opens its servers of tools, and what keeps its prefix cache apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
from pydantic_core import from_json

from penstock.pipeline.protocol.params.mcp import TOLD, reduced
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import Failure
from penstock.pipeline.secret import unwritten


def request_told(body: bytes) -> dict[str, Any]:
    """What may be written of the body of a request: no secrets, and nothing that nobody knows."""
    told = {name: value for name, value in from_json(body).items() if name in _KNOWN}
    return told | {name: _open(told[name]) for name in _WITH_TOOLS if name in told}


def without_secrets(frame: Any) -> dict[str, Any]:
    """A response, or a frame that tells of a request, as JSON has it and without what is secret in it."""
    told: dict[str, Any] = msgspec.to_builtins(frame, enc_hook=unwritten)
    if origin := told.get("origin"):
        told["origin"] = {key: value for key, value in origin.items() if key == "position"}
    if scheduling := told.get("scheduling"):
        told["scheduling"] = {"priority": scheduling["priority"]}
    offered = told.get("tools")
    if isinstance(offered, dict):
        for server in offered.get("servers", ()):
            if server["url"]:
                server["url"] = reduced(server["url"])
    return told


_KNOWN = frozenset(field.alias or name for name, field in CreateResponse.model_fields.items()) - {"cache_salt"}


_WITH_TOOLS = ("tools", "tool_choice", "input")
"""Where tools may stand: some clients choose one by repeating all of it."""


def _open(said: Any) -> Any:
    """Tools, and what has some; an MCP server shows where it is and not how to get in, a sandbox not how to get out."""
    match said:
        case list():
            return [_open(each) for each in said]
        case {"type": "mcp"}:
            told = {name: value for name, value in said.items() if name in TOLD or name == "name"}
            return told | {"server_url": reduced(str(told["server_url"]))} if told.get("server_url") else told
        case dict():
            return {name: _part(name, value) for name, value in said.items()}
        case _:
            return said


def _part(name: str, value: Any) -> Any:
    if name in ("container", "environment") and isinstance(value, dict):
        return {key: part for key, part in value.items() if key != "network_policy"}
    return _open(value) if name == "tools" else value


class Redaction:
    """What is written of one response: here, all of it that is no secret."""

    keeps_request = True
    changes_frames = False
    """Whether even frames that tell of no request are written otherwise."""

    def keeps(self, stage: str) -> bool:
        """Whether there is a file at all of what is behind ``stage``."""
        return True

    def frames(self, stage: str, frame: Any) -> Iterable[Any]:
        """What is written in place of a frame behind ``stage``: nothing, where that has to wait for the next one."""
        return (frame,)

    def response(self, response: Response) -> Response:
        """What is written in place of the response that the stream ended with."""
        return response

    def failure(self, failure: Failure) -> Failure:
        """What is written in place of a failure."""
        return failure


Redact: TypeAlias = Callable[[], Redaction]
"""Gives each response its own, as it may wait for what follows."""
