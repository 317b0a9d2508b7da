"""Toolboxes that only have names: the tools of requests are read by them, and none runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from penstock.pipeline.frames import ResolvedRequest
from penstock.services.tools import NoServers, Session, Toolbox


class UnusedHost:
    """The host of a tool that no test calls."""

    def session(self, request: ResolvedRequest) -> Session:
        raise AssertionError("no call is made")

    async def close(self) -> None:
        return


class NamedServers(NoServers):
    """MCP servers that have labels alone."""

    def __init__(self, labels: Iterable[str]) -> None:
        self.labels = frozenset(labels)


def toolbox_of(hosted: Collection[str] = (), labels: Collection[str] = (), **others: Any) -> Toolbox:
    """Return a toolbox with the built-in tools ``hosted``, and servers with these labels."""
    return Toolbox({kind: UnusedHost() for kind in hosted}, NamedServers(labels), **others)
