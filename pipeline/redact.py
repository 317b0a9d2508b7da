"""What recordings leave out: secrets always, and texts where the operator wants none.

Secrets are what says whose a request is, what opens its servers of tools, and what keeps its prefix cache apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from pipeline.protocol.given_mcp import reduced
from pipeline.protocol.response import Response
from pipeline.record import Failure
from pipeline.secret import unwritten


def without_secrets(said: Any) -> Any:
    """A request, a response, or a frame that tells of them, as JSON has it and without what is secret in it."""
    told: dict[str, Any] = msgspec.to_builtins(said, enc_hook=unwritten)
    told.pop("cache_salt", None)
    if origin := told.get("origin"):
        told["origin"] = {key: value for key, value in origin.items() if key == "position"}
    if scheduling := told.get("scheduling"):
        told["scheduling"] = {"priority": scheduling["priority"]}
    offered = told.get("tools") or ()
    if isinstance(offered, dict):
        offered["servers"] = [_open(server, "url") for server in offered.get("servers", ())]
    elif offered:
        told["tools"] = [_open(tool, "server_url") for tool in offered]
    return told


def _open(server: dict[str, Any], key: str) -> dict[str, Any]:
    """A server, or another tool, that shows where it is and not how to get in."""
    told = {name: value for name, value in server.items() if name not in ("headers", "authorization")}
    return told | {key: reduced(told[key])} if told.get(key) else told


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
